"""Routers and a quota actor that charge the same limits, in virtual time, over a network that delays."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.core.limits import ActorLimits, Charged, LimitedRequest, Limits, RouterLimits
from serve_app.core.limits.policy import NOTHING, Amounts, Kind
from serve_app.core.limits.router_limits import Refusal

ROUND_TRIP_S = 0.002
HEARTBEAT_S = 1.0
RECOVERY_S = 10.0
CHECK_EVERY = 16  # events: the check costs more than they do
SCOPE = "key:k"


@dataclass
class Client:
    """One request, from its arrival at a router to its end."""

    request: LimitedRequest
    router: str
    done: Callable[[Charged | Refusal], None]


@dataclass
class World:
    """See the module.

    Args:
        routers: how many.
        delay_s: of each message, one way, on average.
        heartbeat_s: between a router's heartbeats.
    """

    routers: int = 3
    seed: int = 1
    delay_s: float = ROUND_TRIP_S / 2
    heartbeat_s: float = HEARTBEAT_S
    now: float = 1000.0
    charged: list[tuple[float, LimitedRequest]] = field(default_factory=list)
    refunded: list[tuple[float, LimitedRequest, Amounts]] = field(default_factory=list)  # what came back
    used: list[tuple[float, LimitedRequest, float]] = field(default_factory=list)  # tokens beyond the estimate
    running: Counter[str] = field(default_factory=Counter)  # by scope
    most: Counter[str] = field(default_factory=Counter)
    to_actor: int = 0  # messages

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._clients: dict[str, Client] = {}
        self.epoch = self._steps = 0
        self.sessions: dict[str, int] = {}
        self.unsent: dict[str, list[Any]] = {}
        self.actions: defaultdict[str, list[Any]] = defaultdict(list)
        self._links: dict[tuple[str, str], float] = {}  # when the last message of a link arrives: it keeps the order
        self.cores: dict[str, RouterLimits] = {}
        self.remembered: set[str] = set()  # routers that the actor remembers over its restart
        self._tick_at = float("inf")
        self.start_actor()
        for number in range(self.routers):
            self.add_router(f"r{number}")

    # Time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay_s, act)

    def run(self, seconds: float) -> None:
        """Let this time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._steps += 1
            if self._steps % CHECK_EVERY == 0:
                self.check()
        self.now = end
        self.check()

    # Processes

    def start_actor(self) -> None:
        """Start the actor, anew after a crash: then no router has a session with it."""
        self.epoch += 1
        self.waited_for = set(self.remembered)
        self.sessions.clear()
        self.actor = ActorLimits(
            self.epoch, self._from_actor, lambda: len(self.cores), self.now, is_recovering=bool(self.remembered)
        )
        epoch = self.epoch
        self.after(RECOVERY_S, lambda: self._end_recovery(epoch))
        self.actor.set_clock(1_700_000_000.0 + self.now, self.now)
        for name in self.cores:
            self.begin_session(name)

    def _end_recovery(self, epoch: int) -> None:
        """Routers that have not reported by now are lost."""
        if epoch == self.epoch and self.actor.is_recovering:
            self.remembered -= self.waited_for
            self.actor.on_recovered(self.now, is_complete=False)
            self._after_actor()

    def add_router(self, name: str) -> None:
        self.remembered.add(name)
        self.unsent[name] = []
        self.cores[name] = RouterLimits(name, lambda event: self._put(name, event))
        self.begin_session(name)
        self.after(self.heartbeat_s, lambda: self._beat(name))

    def begin_session(self, name: str) -> None:
        """A router begins another session: what is under way in either direction is lost."""
        self.sessions[name] = next(self._numbers)
        self.unsent[name] = []
        self.actions.pop(name, None)
        self.actor.end_router_session(name, self.now)
        self._put(name, self.cores[name].begin_incarnation(self.now))

    def kill_router(self, name: str) -> None:
        """A router dies with its requests; the actor notices later."""
        del self.cores[name]
        self.sessions.pop(name, None)
        for request_id, client in list(self._clients.items()):
            if client.router == name:
                del self._clients[request_id]
                self._leave(client.request)
        epoch = self.epoch
        self.after(4.0, lambda: self._remove(name, epoch))

    def _remove(self, name: str, epoch: int) -> None:
        if epoch == self.epoch:
            self.remembered.discard(name)
            self.actor.remove_router(name, self.now)
            self._after_actor()

    # Requests

    def ask(
        self,
        router: str,
        limits: Limits | dict[str, Limits],
        tokens: int = 1,
        done: Callable[[Charged | Refusal], None] = lambda _: None,
        **more: Any,
    ) -> str:
        """A request comes to a router."""
        scopes = tuple(limits.items()) if isinstance(limits, dict) else ((SCOPE, limits),)
        request_id = f"q{next(self._numbers)}"
        request = LimitedRequest(request_id, scopes, tokens, 0, **more)
        self._clients[request_id] = Client(request, router, done)
        is_alone = router not in self.sessions
        decision = self.cores[router].on_arrive(request, self.now, is_fenced=is_alone, may_ask=not is_alone)
        if decision is not None:
            self._decide(router, decision)
        return request_id

    def end(self, request_id: str, tokens: int | None) -> None:
        """A charged request ends; None: it failed."""
        client = self._clients.pop(request_id, None)
        if client is None:
            return
        self._leave(client.request)
        used = NOTHING if tokens is None else client.request._replace(tokens=tokens).need
        back = tuple(max(0.0, had - was) for had, was in zip(client.request.need, used, strict=True))
        self.refunded.append((self.now, client.request, back))
        if tokens is not None and tokens > client.request.tokens:
            self.used.append((self.now, client.request, tokens - client.request.tokens))
        self.cores[client.router].on_end(request_id, tokens, 0, self.now)

    def leave(self, request_id: str) -> None:
        """The client of a pending request leaves."""
        client = self._clients.pop(request_id)
        self.cores[client.router].on_cancel(request_id)

    def cores_pending(self) -> set[str]:
        """The requests that wait to be charged."""
        return {one for core in self.cores.values() for one in core.pending if one in self._clients}

    def _decide(self, router: str, decision: Charged | Refusal) -> None:
        client = self._clients.get(decision.request_id)
        if client is None:
            return
        if isinstance(decision, Charged):
            self.charged.append((self.now, client.request))
            for scope, _ in client.request.scopes:
                self.running[scope] += 1
                self.most[scope] = max(self.most[scope], self.running[scope])
        else:
            del self._clients[decision.request_id]
        client.done(decision)

    def _leave(self, request: LimitedRequest) -> None:
        for scope, _ in request.scopes:
            self.running[scope] -= 1

    # Messages

    def _put(self, name: str, event: Any) -> None:
        """As in the shell: the events of one turn are one message."""
        if not self.unsent[name]:
            self.after(0.0, lambda: self._flush(name))
        self.unsent[name].append(event)

    def _flush(self, name: str) -> None:
        events = self.unsent.get(name, [])
        self.unsent[name] = []
        session = self.sessions.get(name)
        if session is None or not events or name not in self.cores:
            return
        self.to_actor += 1
        self.at(self._arrival(name, "actor"), lambda: self._to_actor(name, session, events))

    def _to_actor(self, name: str, session: int, events: list[Any]) -> None:
        if self.sessions.get(name) != session:
            return
        for event in events:
            self.actor.on_event(name, event, self.now)
        self.waited_for.discard(name)
        if self.actor.is_recovering and not self.waited_for:
            self.actor.on_recovered(self.now, is_complete=True)
        self._after_actor()

    def _after_actor(self) -> None:
        self.actor.after_event(self.now)
        for name, actions in list(self.actions.items()):
            del self.actions[name]
            session = self.sessions.get(name)
            if session is not None:
                self._send(name, session, actions)
        due = self.actor.next_due()
        if due is not None and due < self._tick_at:
            self._tick_at = due
            self.at(max(due, self.now), self._tick)

    def _send(self, name: str, session: int, actions: list[Any]) -> None:
        self.at(self._arrival("actor", name), lambda: self._to_router(name, session, actions))

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self.actor.set_clock(1_700_000_000.0 + self.now, self.now)
        self.actor.on_tick(self.now)
        self._after_actor()

    def _from_actor(self, router: str, action: Any) -> None:
        self.actions[router].append(action)

    def _to_router(self, name: str, session: int, actions: list[Any]) -> None:
        if self.sessions.get(name) != session or name not in self.cores:
            return
        core = self.cores[name]
        for action in actions:
            core.on_action(action, self.now)
        core.ask_pending(1000)
        decided, core.decided = core.decided, []
        for decision in decided:
            self._decide(name, decision)

    def _beat(self, name: str) -> None:
        if name in self.cores:
            if name in self.sessions:
                self.cores[name].on_heartbeat(self.now)
                self.cores[name].ask_pending(1000)  # as with every reply, also one without actions
            self.after(self.heartbeat_s, lambda: self._beat(name))

    def _arrival(self, source: str, target: str) -> float:
        at = max(self.now + self.draw.expovariate(1 / self.delay_s), self._links.get((source, target), 0.0))
        self._links[source, target] = at
        return at

    # Checks

    def check(self) -> None:
        """The invariants of the pools."""
        for scope in self.actor.scopes.values():
            for kind, pool in scope.pools.items():
                assert pool.balance <= pool.capacity + 1e-6, (scope.name, kind, pool.balance)
                assert pool.spare >= -1e-6
                assert pool.reserved >= -1e-6
                if kind is Kind.CONCURRENT:
                    assert pool.level >= -1e-6, (scope.name, pool.level, pool.credit)

    def excess(self, scope: str, limits: Limits, kind: Kind) -> float:
        """By how much any window had more charged, less what came back, than burst + rate x t: what an ideal bucket
        would lack at most."""
        burst = limits.capacities()[kind]
        rate = limits.rate(kind)
        level = burst
        at = None
        worst = 0.0
        took = [(when, request, request.need[kind]) for when, request in self.charged]
        took += [(when, request, -back[kind]) for when, request, back in self.refunded]
        for when, request, amount in sorted(took, key=lambda charge: charge[0]):
            if scope not in dict(request.scopes):
                continue
            level = min(burst, level + rate * (0.0 if at is None else when - at) - amount)
            at = when
            worst = max(worst, -level)
        return worst

    def is_at_rest(self) -> bool:
        return not self._clients and not any(core.pending or core.running for core in self.cores.values())
