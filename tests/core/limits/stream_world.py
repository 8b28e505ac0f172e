"""Routers and the quota actor in virtual time, with their real stream, over a network that loses, repeats and reorders.

`RouterQueue`, `Quota` and the limits between them are the real ones. What the shells add (one message per turn, four
at a time, a long poll, heartbeats, ticks) is done here.
"""

from __future__ import annotations

import heapq
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.core.limits import Charged, LimitAction, LimitDecision, LimitedRequest, LimitGrant, Limits
from serve_app.core.limits.policy import Kind
from serve_app.core.memory import CheckpointKey, Device
from serve_app.core.quota import Quota
from serve_app.core.shared_queue.messages import ActorReply, RouterMessage
from serve_app.core.shared_queue.router_queue import RouterQueue
from serve_app.core.times import ACTOR_RETRY_S, FENCE_S, WATCH_S
from tests.core.limits.charge_log import ChargeLog

ONE_WAY_S = 0.001  # mean of a message's time on its way
MAX_CALLS = 4  # messages under way at once, as in the shell
WALL_S = 1_700_000_000.0  # of the clock on the wall, when the virtual time is 0


@dataclass(eq=False)
class Call:
    """A request of a client, from its arrival to its end."""

    request: LimitedRequest
    router: str
    done: Callable[[LimitDecision], None]
    state: str = "pending"  # running, refused, over


@dataclass(eq=False)
class Router:
    """A router process."""

    name: str
    core: RouterQueue
    is_alive: bool = True
    calls: int = 0  # messages under way
    is_flushing: bool = False
    retry_at: float = 0.0


class StreamWorld:
    """See the module.

    Args:
        lost, repeated: parts of all messages.
        slow: part of the messages that take up to `FENCE_S`.
    """

    def __init__(
        self, routers: int = 3, seed: int = 1, *, lost: float = 0.0, repeated: float = 0.0, slow: float = 0.0
    ) -> None:
        self.now = 100.0
        self.draw = random.Random(seed)
        self.lost = lost
        self.repeated = repeated
        self.slow = slow
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.calls: dict[str, Call] = {}
        self.logs: dict[tuple[str, Kind], ChargeLog] = {}
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.messages = 0
        self.wall_step_s = 0.0
        self._granted_at: dict[str, float] = {}  # by ticket: the moment at the actor, which is when it is charged
        self._charged_at: dict[str, float] = {}  # the same by request, until its client is told
        self.watching: dict[str, tuple[RouterMessage, Callable[[ActorReply], None]]] = {}
        self._due_at = float("inf")
        self._stored: dict[CheckpointKey, object] = {}
        self.epoch = 0
        self.routers: dict[str, Router] = {}
        self._names = itertools.count()
        self.start_actor()
        for _ in range(routers):
            self.add_router()
        self.after(0.5, self._tick)

    # Time

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay_s, act)

    def run(self, seconds: float, check: Callable[[], None] | None = None) -> None:
        """Let this time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            act()
            if check is not None:
                check()
        self.now = end

    # Processes

    def start_actor(self) -> None:
        """The actor dies, if there is one, and another begins with what was stored."""
        self.epoch += 1
        self.watching.clear()
        self.actor = Quota(self.epoch, dict(self._stored), self.now)
        self.actor.queue.limits.set_clock(WALL_S + self.now + self.wall_step_s, self.now)
        self.actor.on_devices([Device("n", 0, 1000, 0)], self.now)
        self._after_actor()

    def add_router(self) -> str:
        name = f"r{next(self._names)}"
        router = self.routers[name] = Router(name, RouterQueue(name))
        limits = router.core.limits
        on_action = limits.on_action

        def note(action: LimitAction, now: float) -> None:
            if isinstance(action, LimitGrant):
                asked = limits.tickets.get(action.ticket)
                granted_at = self._granted_at.pop(action.ticket, now)
                if asked is not None:
                    self._charged_at[asked.request.request_id] = granted_at
            on_action(action, now)

        limits.on_action = note  # type: ignore[method-assign]
        self._beat(router)
        self._watch(router)
        return name

    def kill_router(self, name: str) -> None:
        """A router dies, and its requests with it."""
        self.routers.pop(name).is_alive = False
        for call in [one for one in self.calls.values() if one.router == name]:
            if call.state == "running":
                self._count_end(call)
            call.state = "over"
            del self.calls[call.request.request_id]

    # Requests

    def ask(
        self,
        router: str,
        scopes: dict[str, Limits],
        tokens: int = 1,
        done: Callable[[LimitDecision], None] = lambda _: None,
        *,
        fingerprint: bytes = b"",
        may_wait: bool = False,
        is_repeat: bool | None = None,
    ) -> str:
        """A request comes to a router; `done` is told the decision."""
        request_id = f"q{next(self._numbers)}"
        request = LimitedRequest(request_id, tuple(scopes.items()), tokens, 0, fingerprint, may_wait, is_repeat)
        call = self.calls[request_id] = Call(request, router, done)
        process = self.routers[router]
        decision = process.core.charge(request, self.now)
        if decision is not None:
            self._decide(process, decision, self.now)
        self._flush_soon(process)
        return call.request.request_id

    def end(self, request_id: str, tokens: int | None) -> None:
        """A charged request ends after so many tokens; None: it failed, and is refunded. Unknown ones change nothing"""
        call = self.calls.pop(request_id, None)
        if call is None:
            return
        assert call.state == "running"
        call.state = "over"
        self._count_end(call)
        request = call.request
        used = (0.0,) * len(Kind) if tokens is None else request._replace(tokens=tokens).need
        for scope, limits in request.scopes:
            for kind in limits.capacities():
                if kind is not Kind.CONCURRENT and request.need[kind] > used[kind]:
                    self.logs[scope, kind].entries.append((self.now, used[kind] - request.need[kind]))
        process = self.routers[call.router]
        process.core.limits.on_end(request_id, tokens, 0, self.now)
        self._flush_soon(process)

    def leave(self, request_id: str) -> None:
        """The client of a pending request is gone."""
        call = self.calls.get(request_id)
        if call is not None and call.state == "pending":
            del self.calls[request_id]
            call.state = "over"
            process = self.routers[call.router]
            process.core.limits.on_cancel(request_id)
            self._flush_soon(process)

    def _decide(self, router: Router, decision: LimitDecision, charged_at: float) -> None:
        call = self.calls[decision.request_id]
        assert call.state == "pending", "one decision for each request"
        if not isinstance(decision, Charged):
            call.state = "refused"
            del self.calls[decision.request_id]
            call.done(decision)
            return
        call.state = "running"
        for scope, limits in call.request.scopes:
            self.running[scope] += 1
            self.most[scope] = max(self.most[scope], self.running[scope])
            for kind, capacity in limits.capacities().items():
                if kind is not Kind.CONCURRENT:
                    log = self.logs.setdefault((scope, kind), ChargeLog(capacity, limits.rate(kind)))
                    log.entries.append((charged_at, call.request.need[kind]))
        call.done(decision)

    def _count_end(self, call: Call) -> None:
        for scope, _ in call.request.scopes:
            self.running[scope] -= 1

    # The router's shell

    def _flush_soon(self, router: Router) -> None:
        if not router.is_flushing:
            router.is_flushing = True
            self.after(0.0, lambda: self._flush(router))

    def _flush(self, router: Router, *, beat: bool = False) -> None:
        router.is_flushing = False
        while router.is_alive and self.now >= router.retry_at and router.calls < MAX_CALLS:
            message = router.core.next_message(self.now, beat=beat)
            if message is None:
                return
            beat = False
            router.calls += 1
            self.messages += 1
            self._exchange(router, message)

    def _exchange(self, router: Router, message: RouterMessage) -> None:
        """One call: its message or its answer may be lost, or be slow; a message may come twice."""
        sent_at = self.now
        epoch = self.epoch
        is_over = [False]
        packed = pickle.dumps(message)

        def ended(reply: ActorReply | None) -> None:
            if is_over[0] or not router.is_alive:
                return
            is_over[0] = True
            router.calls -= 1
            self._take_reply(router, reply, sent_at)

        def arrives() -> None:
            if epoch != self.epoch:
                self._carry(lambda: ended(None))
                return
            answer = self._packed(self.actor.on_exchange(pickle.loads(packed), self.now))
            self._after_actor()
            self._carry(lambda: ended(pickle.loads(answer)))

        for _ in range(1 + (self.draw.random() < self.repeated)):
            self._carry(arrives)
        self.after(FENCE_S, lambda: ended(None))

    def _packed(self, reply: ActorReply) -> bytes:
        """An answer on its way; a request is charged once the actor grants it."""
        for action in reply.actions:
            if isinstance(action, LimitGrant):
                self._granted_at.setdefault(action.ticket, self.now)
        return pickle.dumps(reply)

    def _carry(self, then: Callable[[], None]) -> None:
        if self.draw.random() >= self.lost:
            delay_s = self.draw.expovariate(1 / ONE_WAY_S)
            if self.draw.random() < self.slow:
                delay_s = self.draw.uniform(0.0, FENCE_S)
            self.after(delay_s, then)

    def _take_reply(self, router: Router, reply: ActorReply | None, sent_at: float) -> None:
        if reply is None:
            router.retry_at = self.now + ACTOR_RETRY_S
            router.core.on_lost(self.now)
            self.after(ACTOR_RETRY_S, lambda: self._flush_soon(router))
        else:
            router.core.on_reply(reply, sent_at, self.now)
            if reply.is_stale:
                router.retry_at = self.now + ACTOR_RETRY_S
                self.after(ACTOR_RETRY_S, lambda: self._flush_soon(router))
        self._deliver(router)
        self._flush_soon(router)

    def _deliver(self, router: Router) -> None:
        limits = router.core.limits
        decided, limits.decided = limits.decided, []
        for decision in decided:
            charged_at = self._charged_at.pop(decision.request_id, self.now)
            if decision.request_id in self.calls:
                self._decide(router, decision, charged_at)

    def _watch(self, router: Router) -> None:
        """The long poll."""
        if not router.is_alive:
            return
        if not router.core.router_session.is_booked:
            self.after(0.05, lambda: self._watch(router))
            return
        message = router.core.router_session.watch_message()
        sent_at = self.now
        epoch = self.epoch
        is_over = [False]

        def ended(reply: ActorReply | None) -> None:
            if is_over[0] or not router.is_alive:
                return
            is_over[0] = True
            self._take_reply(router, reply, sent_at)
            self.after(0.0 if reply is not None else ACTOR_RETRY_S, lambda: self._watch(router))

        def answer(reply: ActorReply) -> None:
            packed = self._packed(reply)
            self._carry(lambda: ended(pickle.loads(packed)))

        def arrives() -> None:
            if epoch != self.epoch:
                self._carry(lambda: ended(None))
                return
            reply = self.actor.on_watch(message, self.now, timed_out=False)
            if reply is not None:
                answer(reply)
                return
            again = message._replace(resend=False)
            self.watching[router.name] = again, answer
            self.after(WATCH_S, lambda: self._answer_watch(router.name, again))

        self._carry(arrives)
        self.after(FENCE_S, lambda: ended(None))

    def _answer_watch(self, name: str, message: RouterMessage) -> None:
        known = self.watching.get(name)
        if known is not None and known[0] is message:
            del self.watching[name]
            reply = self.actor.on_watch(message, self.now, timed_out=True)
            assert reply is not None
            known[1](reply)

    def _beat(self, router: Router) -> None:
        if not router.is_alive:
            return
        router.core.reconcile({}, self.now)
        router.core.on_tick(self.now)
        self._deliver(router)
        self._flush(router, beat=True)
        self.after(1.0, lambda: self._beat(router))

    # The actor's shell

    def _after_actor(self) -> None:
        changes = self.actor.changes()
        self.actor.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self._stored[key] = value
            else:
                self._stored.pop(key, None)
        for name in self.actor.queue.router_sessions.take_woken():
            if name in self.watching:
                self._answer_watch(name, self.watching[name][0])
        due = self.actor.queue.next_due()
        if due is not None and due < self._due_at:
            self._due_at = due
            self.at(max(due, self.now), self._on_due)

    def _on_due(self) -> None:
        self._due_at = float("inf")
        self.actor.queue.on_tick(self.now)
        self._after_actor()

    def _tick(self) -> None:
        self.actor.queue.limits.set_clock(WALL_S + self.now + self.wall_step_s, self.now)
        self.actor.on_tick(self.now)
        self._after_actor()
        self.after(0.5, self._tick)

    # Checks

    def check_pools(self) -> None:
        """No pool has more than its capacity, in all hands together; no concurrency is lent twice."""
        for scope in self.actor.queue.limits.scopes.values():
            for kind, pool in scope.pools.items():
                assert pool.balance <= pool.capacity + 1e-6, (scope.name, kind, pool.balance)
                assert pool.spare >= -1e-6
                assert pool.reserved >= -1e-6
