"""Routers and the quota actor joined by a network with round trips, in virtual time; no Ray and nothing that waits.

Both ends, and what their shells do, are those of `autoscaling.simulator`: `VirtualActor` and `RouterLink`. Here are the
engines, which have slots and KV tokens and run nothing, and callers who ask and end what was granted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoscaling.simulator import Clock, RouterLink, VirtualActor
from serve_app.core.memory import Device, EngineReport, Rank, SessionRequest
from serve_app.core.queue import Action, Arrival, Grant, QueuePolicy, Refuse
from serve_app.core.shared_queue import RouterQueue
from serve_app.core.times import ENGINE_HEARTBEAT_S
from serve_app.types import RequestClass

MODEL = "m"
# of a session: its time to live, and until routers have given back the credit it needs
NEVER_S = 1e9
OPEN_S = 5.0
ROUND_TRIP_S = 0.02


@dataclass
class Asked:
    """A request as its caller sees it; -1: not yet."""

    arrival: Arrival
    asked_s: float
    on_grant: Callable[[Asked], None]
    on_refuse: Callable[[Asked, float | None], None]
    granted_s: float = -1.0
    engine: str = ""

    @property
    def waited_s(self) -> float:
        return self.granted_s - self.asked_s


class Engines:
    """The engines of one model, with slots and KV tokens by name, and their reports to the actor."""

    def __init__(self, clock: Clock, actor: VirtualActor, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._clock = clock
        self._actor = actor
        self._sizes = dict(sizes)
        self._reports = {
            name: EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=slots) for name, (slots, _) in sizes.items()
        }
        self.report()
        self.report()
        clock.every(ENGINE_HEARTBEAT_S, self.report)

    def report(self) -> None:
        """Each of them reports."""
        for name in [] if self._actor.away else list(self._reports):
            reply = self._actor.quota.on_engine(self._reports[name], self._clock.now)
            tokens = self._sizes[name][1]
            if reply.holds:
                self._reports[name] = replace(self._reports[name], holds=reply.holds, kv_tokens=tokens, kv_bytes=1000)
        self._actor.moved()


@dataclass
class Router:
    """A router's end and the requests that are asked for there."""

    name: str
    clock: Clock
    actor: VirtualActor
    delay_s: Callable[[], float]  # of a message, one way
    link: RouterLink = field(init=False)
    asked: dict[str, Asked] = field(default_factory=dict)  # who waits
    running: dict[str, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.link = RouterLink(self.name, self.clock, self.actor, self.delay_s, self._carry_out, _no_limits)

    @property
    def queue(self) -> RouterQueue:
        return self.link.queue

    @property
    def incarnations(self) -> set[int]:
        return self.link.incarnations

    def ask(self, arrival: Arrival, on_grant: Callable[[Asked], None], on_refuse: Callable[..., None]) -> Asked:
        """A caller asks for a place."""
        asked = self.asked[arrival.request_id] = Asked(arrival, self.clock.now, on_grant, on_refuse)
        self.after(self.queue.on_arrive(MODEL, arrival, self.clock.now))
        return asked

    def end(self, asked: Asked, output_tokens: int) -> None:
        """A request has been answered."""
        name = asked.arrival.request_id
        prompt = asked.arrival.prompt_tokens
        del self.running[name]
        self.after(self.queue.on_done(name, self.clock.now, prompt, output_tokens))

    def after(self, actions: list[Action]) -> None:
        """What every event ends with."""
        self.link.after(actions)

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            asked = self.asked.pop(action.request_id)
            if isinstance(action, Grant):
                asked.granted_s = self.clock.now
                asked.engine = action.replica_id
                self.running[action.request_id] = asked
                asked.on_grant(asked)
            elif isinstance(action, Refuse):
                asked.on_refuse(asked, action.retry_after_s)


def _no_limits(_: object) -> None:
    """Nobody here is charged to limits."""


class Network:
    """An actor, engines of one model, and routers that reach all of them and have been told so."""

    def __init__(
        self,
        engines: Mapping[str, tuple[int, int]],
        policy: QueuePolicy,
        routers: int = 1,
        delay_s: Callable[[], float] = lambda: ROUND_TRIP_S / 2,
    ) -> None:
        self.clock = Clock()
        devices = [Device("n", at, 1000, 0) for at in range(len(engines))]
        self.actor = VirtualActor(self.clock, lambda: devices)
        self._engines = Engines(self.clock, self.actor, engines)
        self.actor.on_restart = self._engines.report
        self.routers = [Router(f"r{number}", self.clock, self.actor, delay_s) for number in range(routers)]
        self._ids = itertools.count(1)
        for router in self.routers:
            router.queue.serve(MODEL, policy)
            for engine in engines:
                router.after(router.queue.set_reachability(MODEL, engine, True, self.clock.now))
        self.clock.run(1.0)  # accounts are booked, credit has come

    def arrival(self, level: RequestClass, tenant: str, tokens: int, prompt_tokens: int = 1) -> Arrival:
        """A request of one slot, with an id of its own."""
        return Arrival(f"request-{next(self._ids)}", level, tenant, 1, tokens, prompt_tokens=prompt_tokens)

    def open_session(self, tokens: int) -> None:
        """A session has so many KV tokens of an engine from now on.

        Raises:
            LeaseNotFound: it has not been opened in `OPEN_S`.
        """
        quota = self.actor.quota
        now = self.clock.now
        quota.on_open_session(SessionRequest("tenant session", MODEL, tokens, NEVER_S, wait_until=now + OPEN_S), now)
        self.actor.moved()
        self.clock.run(OPEN_S)
        quota.sessions.view("tenant session")
