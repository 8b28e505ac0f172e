"""Routers and the quota actor joined by a network, in virtual time; no Ray and nothing that waits.

Both ends are the cores: `core.shared_queue.RouterQueue` and `core.quota.Quota`. What their shells do
(`serve_app.router.queue_client`, `serve_app.quota`) is done here on events of the clock: a turn's events are one
message, at most `MAX_CALLS` are on their way, one question stands, a heartbeat takes the sums along.

Not done here: the check of a router's requests at each heartbeat (`RouterQueue.reconcile`), which repairs what only a
failing process leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoscaling.simulator.clock import Clock
from serve_app.core.limits import LimitDecision
from serve_app.core.memory import CheckpointKey, Device
from serve_app.core.queue import Action
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import BATCH, ActorReply, RouterMessage, RouterQueue
from serve_app.core.times import ACTOR_RETRY_S, ACTOR_TICK_S, ROUTER_HEARTBEAT_S, WATCH_S

# As in `serve_app.router.queue_client`.
REPORT_S = 0.1
CALM_REPORT_S = 0.5
REPORT_EACH_S = 0.0005
MAX_CALLS = 4
NEXT_WATCH_S = 0.02  # until a router that is not booked looks again whether it may watch

Answer = Callable[[ActorReply], None]


class VirtualActor:
    """The quota actor.

    Args:
        devices: all of the cluster, whenever it is asked.
        on_restart: called when a new one has come up.
    """

    def __init__(
        self, clock: Clock, devices: Callable[[], list[Device]], on_restart: Callable[[], None] = lambda: None
    ) -> None:
        self._clock = clock
        self._devices = devices
        self.on_restart = on_restart
        self._watching: dict[str, tuple[RouterMessage, Answer]] = {}
        self._stored: dict[CheckpointKey, object] = {}
        self._due: float | None = None  # when its queues are looked at next
        self.away = False
        self.quota = Quota(1, {}, clock.now)
        self.look_at_devices()
        clock.every(ACTOR_TICK_S, self._tick)

    def look_at_devices(self) -> None:
        """The devices of the cluster may have changed."""
        self.quota.on_devices(self._devices(), self._clock.now)

    def exchange(self, message: RouterMessage, answer: Answer) -> None:
        """A router's message has arrived."""
        answer(self.quota.on_exchange(message, self._clock.now))
        self.moved()

    def watch(self, message: RouterMessage, answer: Answer) -> None:
        """A router's standing question has arrived."""
        reply = self.quota.on_watch(message, self._clock.now, timed_out=False)
        if reply is not None:
            answer(reply)
            return
        entry = self._watching[message.router] = (message._replace(resend=False), answer)
        self._clock.after(WATCH_S, lambda: self._answer_watch(message.router, entry))

    def moved(self) -> None:
        """Something was decided: routers that watch are answered, and the queues are looked at when something comes
        due."""
        for router in self.quota.queue.router_sessions.take_woken():
            self._answer_watch(router, self._watching.get(router))
        changes = self.quota.changes()
        self.quota.checkpoint.stored(changes)
        for key, (keep, value) in changes.items():
            if keep:
                self._stored[key] = value
            else:
                self._stored.pop(key, None)
        due = self.quota.queue.next_due()
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            self._clock.at(due, lambda: self._look(due))

    def restart(self) -> None:
        """It has died, and a new one comes up from what was stored."""
        self._watching.clear()
        self._due = None
        self.quota = Quota(self.quota.epoch + 1, dict(self._stored), self._clock.now)
        self.look_at_devices()
        self.on_restart()
        self.away = False

    def _look(self, due: float) -> None:
        if self._due != due:
            return  # an earlier look has come, or another actor
        self._due = None
        now_due = self.quota.queue.next_due()
        if not self.away and now_due is not None and now_due <= self._clock.now:
            self.quota.queue.on_tick(self._clock.now)
        self.moved()

    def _answer_watch(self, router: str, watch: tuple[RouterMessage, Answer] | None) -> None:
        if watch is None or self._watching.get(router) is not watch:
            return
        del self._watching[router]
        message, answer = watch
        answer(
            self.quota.on_watch(message, self._clock.now, timed_out=True)
            or self.quota.queue.router_sessions.stale_reply(message)
        )

    def _tick(self) -> None:
        if not self.away:
            self.quota.on_tick(self._clock.now)
            self.moved()


@dataclass
class RouterLink:
    """A router's end of the queue, and its messages.

    Args:
        delay_s: of a message, one way.
        turn_s: for so long a router gathers events before it sends them: a turn of its event loop.
        on_actions: carries out what the queue decides.
        on_charged: what the limits decide later.
    """

    name: str
    clock: Clock
    actor: VirtualActor
    delay_s: Callable[[], float]
    on_actions: Callable[[Iterable[Action]], None]
    on_charged: Callable[[LimitDecision], None]
    turn_s: float = 0.0
    queue: RouterQueue = field(init=False)
    incarnations: set[int] = field(default_factory=set)  # that have sent a message
    messages: int = 0
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

    def after(self, actions: Iterable[Action]) -> None:
        """What every event of the queue ends with."""
        decided, self.queue.limits.decided = self.queue.limits.decided, []
        for decision in decided:
            self.on_charged(decision)
        self.on_actions(actions)
        if not self._flushing:
            self._flushing = True
            self.clock.after(self.turn_s, self._flush)
        due = self.queue.pending.next_due()
        if due is not None and (self._due_s is None or due < self._due_s):
            self._due_s = due
            self.clock.at(due, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self._due_s == due:
            self._due_s = None
            self.after(self.queue.on_tick(self.clock.now))

    def _flush(self) -> None:
        self._flushing = False
        self._send()

    def _send(self, *, beat: bool = False) -> None:
        now = self.clock.now
        while now >= self._quiet_until and self._calls < MAX_CALLS:
            message = self.queue.next_message(now, beat=beat)
            if message is None:
                return
            beat = False
            self._sent_s = now
            self._calls += 1
            self.messages += 1
            self.incarnations.add(message.incarnation)
            self._ask(self.actor.exchange, message, self._on_answer)

    def _on_answer(self) -> None:
        self._calls -= 1
        self.clock.after(0.0, self._flush)

    def _ask(
        self, how: Callable[[RouterMessage, Answer], None], message: RouterMessage, then: Callable[[], None]
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
            self.clock.after(NEXT_WATCH_S, self._watch)
            return
        self._ask(
            self.actor.watch, self.queue.router_session.watch_message(), lambda: self.clock.after(0.0, self._watch)
        )

    def _report(self) -> None:
        soonest_s = REPORT_S if self.queue.router_session.state.contended else CALM_REPORT_S
        now = self.clock.now
        report_s = max(soonest_s, REPORT_EACH_S * min(BATCH, len(self.queue.in_flight.running)))
        if now >= self._beat_s + ROUTER_HEARTBEAT_S or (self.queue.has_reports and now >= self._sent_s + report_s):
            self._beat_s = now
            self._send(beat=True)
        left_s = self._sent_s + report_s - now
        self.clock.after(left_s if left_s > 0.0 else report_s, self._report)
