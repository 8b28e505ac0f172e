"""Routers and the quota actor joined by a network with round trips, in virtual time; no Ray and nothing that waits.

Both ends are the cores: `core.shared_queue.router_queue.RemoteLine` and `core.quota.Quota`. What their shells do
(`serve_app.router.queue_client`, `serve_app.quota`) is done here on events of the simulation: a turn's events are one
message, at most `CALLS` are on their way, one question stands, a beat takes the sums along.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.core.limits import LimitDecision, LimitedRequest
from serve_app.core.memory import CheckpointKey, Device, EngineReport, Rank, SessionRequest
from serve_app.core.queue import Action, Arrival, Grant, QueuePolicy, Refuse
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import ActorReply, RouterMessage, RouterQueue
from serve_app.core.times import ACTOR_RETRY_S, ACTOR_TICK_S, ENGINE_HEARTBEAT_S, ROUTER_HEARTBEAT_S, WATCH_S
from serve_app.types import RequestClass

MODEL = "m"
# of a session: its time to live, and until routers have given back the credit it needs
NEVER_S = 1e9
OPEN_S = 5.0
ROUND_TRIP_S = 0.02
# As in `serve_app.router.queue_client`.
REPORT_S = 0.1
CALM_REPORT_S = 0.5
REPORT_EACH_S = 0.0005
CALLS = 4


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


class Clock:
    """Events in order of their moments."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, span_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + span_s, next(self._order), event))

    def every(self, span_s: float, event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self.after(span_s, again)

        self.after(span_s, again)

    def run(self, span_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """So many seconds, or until something holds."""
        end_s = self.now + span_s
        while self._events and self._events[0][0] <= end_s and not until():
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = self.now if until() else end_s


class Actor:
    """The quota actor and its engines: slots and KV tokens by name."""

    def __init__(self, clock: Clock, engines: Mapping[str, tuple[int, int]]) -> None:
        self._clock = clock
        self._sizes = dict(engines)
        self._reports: dict[str, EngineReport] = {}
        self._watching: dict[str, tuple[RouterMessage, Callable[[ActorReply], None]]] = {}
        self._stored: dict[CheckpointKey, object] = {}
        self.away = False
        self.quota = Quota(1, {}, clock.now)
        self._come_up()
        for name, (slots, _) in engines.items():
            self._reports[name] = EngineReport(name, MODEL, (Rank("n"),), 1000, 1000, slots=slots)
        self._engines_speak()
        self._engines_speak()
        clock.every(ACTOR_TICK_S, self._tick)
        clock.every(ENGINE_HEARTBEAT_S, self._engines_speak)

    def exchange(self, message: RouterMessage, answer: Callable[[ActorReply], None]) -> None:
        answer(self.quota.on_exchange(message, self._clock.now))
        self.moved()

    def watch(self, message: RouterMessage, answer: Callable[[ActorReply], None]) -> None:
        reply = self.quota.on_watch(message, self._clock.now, timed_out=False)
        if reply is not None:
            answer(reply)
            return
        entry = self._watching[message.router] = (message._replace(resend=False), answer)
        self._clock.after(WATCH_S, lambda: self._tell(message.router, entry))

    def moved(self) -> None:
        """Something was decided: who watches hears of it, and the lines are looked at when something comes due."""
        for router in self.quota.queue.router_sessions.take_woken():
            self._tell(router, self._watching.get(router))
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self._stored[key] = value
            else:
                self._stored.pop(key, None)
        due = self.quota.queue.next_due()
        if due is not None:
            quota = self.quota
            self._clock.after(max(0.0, due - self._clock.now), lambda: self._due(quota, due))

    def restart(self) -> None:
        """It has died, and a new one comes up from what was stored."""
        self._watching.clear()
        self.quota = Quota(self.quota.epoch + 1, dict(self._stored), self._clock.now)
        self._come_up()
        self._engines_speak()
        self.away = False

    def _due(self, quota: Quota, due: float) -> None:
        if quota is self.quota and not self.away and quota.queue.next_due() == due:
            quota.queue.on_tick(self._clock.now)
            self.moved()

    def _tell(self, router: str, watch: tuple[RouterMessage, Callable[[ActorReply], None]] | None) -> None:
        if watch is None or self._watching.get(router) is not watch:
            return
        del self._watching[router]
        message, answer = watch
        answer(
            self.quota.on_watch(message, self._clock.now, timed_out=True)
            or self.quota.queue.router_sessions.stale_reply(message)
        )

    def _come_up(self) -> None:
        self.quota.on_devices([Device("n", at, 1000, 0) for at in range(len(self._sizes))], self._clock.now)

    def _engines_speak(self) -> None:
        for name in [] if self.away else list(self._reports):
            reply = self.quota.on_engine(self._reports[name], self._clock.now)
            tokens = self._sizes[name][1]
            if reply.holds:
                self._reports[name] = replace(self._reports[name], holds=reply.holds, kv_tokens=tokens, kv_bytes=1000)
        self.moved()

    def _tick(self) -> None:
        if not self.away:
            self.quota.on_tick(self._clock.now)
            self.moved()


@dataclass
class Router:
    """A router's end and the requests that are asked for there."""

    name: str
    clock: Clock
    actor: Actor
    delay_s: Callable[[], float]  # of a message, one way
    queue: RouterQueue = field(init=False)
    incarnations: set[int] = field(default_factory=set)  # that have spoken
    asked: dict[str, Asked] = field(default_factory=dict)  # who waits
    charges: dict[str, Callable[[LimitDecision], None]] = field(default_factory=dict)  # who waits to be charged
    running: dict[str, Asked] = field(default_factory=dict)
    _calls: int = 0
    _flushing: bool = False
    _quiet_until: float = 0.0
    _sent_s: float = 0.0
    _beat_s: float = 0.0
    _due_s: float | None = None

    def __post_init__(self) -> None:
        self.queue = RouterQueue(self.name)
        self._report()
        self._watch()

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

    def charge(self, request: LimitedRequest, then: Callable[[LimitDecision], None]) -> None:
        """A caller asks to be charged against its limits."""
        decision = self.queue.charge(request, self.clock.now)
        if decision is None:
            self.charges[request.request_id] = then
        self.after([])
        if decision is not None:
            then(decision)

    def end_charge(self, request_id: str, tokens: int | None) -> None:
        """A charged request has ended; None: it failed."""
        self.queue.limits.on_end(request_id, tokens, 0, self.clock.now)
        self.after([])

    def after(self, actions: list[Action]) -> None:
        """What every event ends with."""
        decided, self.queue.limits.decided = self.queue.limits.decided, []
        for decision in decided:
            self.charges.pop(decision.request_id)(decision)
        for action in actions:
            asked = self.asked.pop(action.request_id)
            if isinstance(action, Grant):
                asked.granted_s = self.clock.now
                asked.engine = action.replica_id
                self.running[action.request_id] = asked
                asked.on_grant(asked)
            elif isinstance(action, Refuse):
                asked.on_refuse(asked, action.retry_after_s)
        if not self._flushing:
            self._flushing = True
            self.clock.after(0.0, self._flush)
        due = self.queue.pending.next_due()
        if due is not None and (self._due_s is None or due < self._due_s):
            self._due_s = due
            self.clock.after(max(0.0, due - self.clock.now), self._tick)

    def _tick(self) -> None:
        self._due_s = None
        self.after(self.queue.on_tick(self.clock.now))

    def _flush(self) -> None:
        self._flushing = False
        self._send()

    def _send(self, *, beat: bool = False) -> None:
        now = self.clock.now
        while now >= self._quiet_until and self._calls < CALLS:
            message = self.queue.next_message(now, beat=beat)
            if message is None:
                return
            beat = False
            self._sent_s = now
            self._calls += 1
            self.incarnations.add(message.incarnation)
            self._ask(self.actor.exchange, message, self._on_answer)

    def _on_answer(self) -> None:
        self._calls -= 1
        self.clock.after(0.0, self._flush)

    def _ask(
        self, how: Callable[[RouterMessage, Callable[[ActorReply], None]], None], message: RouterMessage, then: Any
    ) -> None:
        """One question, half a round trip to the actor and half back; an actor that is away is noticed as soon."""
        sent_s = self.clock.now
        known = self.queue.router_session.epoch
        half_s = self.delay_s()

        def arrive() -> None:
            if self.actor.away:
                self.clock.after(half_s, lost)
            else:
                how(message, lambda reply: self.clock.after(self.delay_s(), lambda: back(reply)))

        def lost() -> None:
            self._quiet_until = self.clock.now + ACTOR_RETRY_S
            self.after(self.queue.on_lost(self.clock.now))
            then()

        def back(reply: ActorReply) -> None:
            if reply.is_stale and reply.epoch == known:
                self._quiet_until = self.clock.now + ACTOR_RETRY_S
            self.after(self.queue.on_reply(reply, sent_s, self.clock.now))
            then()

        self.clock.after(half_s, arrive)

    def _watch(self) -> None:
        if not self.queue.router_session.is_booked:
            self.clock.after(ROUND_TRIP_S, self._watch)
            return
        self._ask(
            self.actor.watch, self.queue.router_session.watch_message(), lambda: self.clock.after(0.0, self._watch)
        )

    def _report(self) -> None:
        soonest_s = REPORT_S if self.queue.router_session.state.contended else CALM_REPORT_S
        now = self.clock.now
        report_s = max(soonest_s, REPORT_EACH_S * len(self.queue.in_flight.running))
        if now >= self._beat_s + ROUTER_HEARTBEAT_S or (self.queue.has_reports and now >= self._sent_s + report_s):
            self._beat_s = now
            self._send(beat=True)
        left_s = self._sent_s + report_s - now
        self.clock.after(left_s if left_s > 0.0 else report_s, self._report)


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
        self.actor = Actor(self.clock, engines)
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
