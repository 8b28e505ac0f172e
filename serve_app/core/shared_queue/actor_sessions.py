"""The quota actor's end of `core.shared_queue.delivery`: a session per router, with its unacknowledged actions.

Invariant: an action sent to an incarnation is received by that one only, by no later one of the same router.
Invariant: an ended incarnation stays ended: a late copy of its first message does not begin it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.core.shared_queue.delivery import (
    ActorReply,
    ActorState,
    ClassQueueFigures,
    QueueFigures,
    ReceiveBuffer,
    RouterMessage,
    SendBuffer,
)
from serve_app.core.shared_queue.messages import ActorAction, Amount, RouterEvent

MAX_ENDED_SESSIONS = 1024  # routers remembered: more than a cluster starts while a message is in transit
UNRESPONSIVE_S = 1.0  # a watching router acknowledges within a round trip; this allows for a very busy machine


@dataclass(slots=True)
class ActorSession:
    """A router's session."""

    name: str
    incarnation: int
    sending: SendBuffer[ActorAction] = field(default_factory=SendBuffer)
    receiving: ReceiveBuffer[RouterEvent] = field(default_factory=ReceiveBuffer)
    sent_state_version: int = -1  # versions
    sent_figures_version: int = -1
    acked_at_check: int = 0  # the last acknowledged action at the last check
    unacked_since: float | None = None  # since when no action was acknowledged; None: none is pending


class ActorSessions:
    """The sessions of all routers, and the state sent to all of them. O(1) per message and item."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.sessions: dict[str, ActorSession] = {}
        self._ended_incarnations: dict[str, int] = {}  # of routers without a session, ended last at the end
        self._woken: set[str] = set()
        self.state = ActorState(0, frozenset(), frozenset(), {})
        self.figures_by_model: dict[str, QueueFigures] = {}  # by model, updated last at the end
        self._figures_version = 0

    def is_stale(self, message: RouterMessage) -> bool:
        """Whether a message belongs to no session and begins none."""
        session = self.sessions.get(message.router)
        if message.epoch != self._epoch:
            return True
        if session is None or message.incarnation > session.incarnation:
            over = message.incarnation <= self._ended_incarnations.get(message.router, -1)
            return over or message.seq != 1 or message.last_acked_event != 0 or not message.events
        return message.incarnation < session.incarnation or message.last_acked_event > session.receiving.last_taken

    def stale_reply(self, message: RouterMessage) -> ActorReply:
        """The reply that makes a router begin a new incarnation."""
        return ActorReply(self._epoch, message.incarnation, 0, 1, (), None, is_stale=True)

    def begin(self, message: RouterMessage) -> ActorSession:
        """Begin a session for a new incarnation of a router; pending actions of the last one are dropped."""
        session = self.sessions[message.router] = ActorSession(message.router, message.incarnation)
        self._ended_incarnations.pop(message.router, None)
        return session

    def end(self, router: str) -> None:
        """End a router's session: its next message is answered as stale."""
        session = self.sessions.pop(router, None)
        if session is not None:
            self._ended_incarnations[router] = session.incarnation
            if len(self._ended_incarnations) > MAX_ENDED_SESSIONS:
                del self._ended_incarnations[next(iter(self._ended_incarnations))]
        self._woken.discard(router)

    def end_all(self) -> None:
        """End all sessions; watching routers are woken to begin a new incarnation."""
        watching = list(self.sessions)
        for router in watching:
            self.end(router)
        self._woken.update(watching)

    def send(self, router: str, action: ActorAction) -> None:
        """Send an action to a router, if it has a session."""
        session = self.sessions.get(router)
        if session is not None:
            session.sending.put(action)
            self._woken.add(router)

    def acknowledgement_check(self) -> Callable[[], bool]:
        """Returns a check whether all actions sent until now are acknowledged, ended sessions excepted."""
        marks = [(session, session.sending.last) for session in self.sessions.values()]
        return lambda: all(
            self.sessions.get(session.name) is not session or session.sending.last_acked >= last
            for session, last in marks
        )

    def receive(self, session: ActorSession, message: RouterMessage) -> Sequence[RouterEvent]:
        """Take a message; returns the events to process now."""
        session.sending.on_ack(message.last_taken_action)
        if message.resend:
            session.sending.resend_unacked()
            session.sent_state_version = session.sent_figures_version = -1
        return session.receiving.accept(message.seq, message.events)

    def reply(self, session: ActorSession, ledger_accounts: tuple[Amount, ...] | None = None) -> ActorReply:
        """The next reply for a router."""
        seq, actions = session.sending.next_batch()
        last_sent, newest_first = session.sent_figures_version, reversed(self.figures_by_model.values())
        figures = tuple(itertools.takewhile(lambda one: one.version > last_sent, newest_first))
        session.sent_state_version, session.sent_figures_version = self.state.version, self._figures_version
        return ActorReply(
            self._epoch,
            session.incarnation,
            session.receiving.last_taken,
            seq,
            actions,
            self.state,
            figures,
            has_more=session.sending.unsent > 0,
            ledger_accounts=ledger_accounts,
        )

    def on_watch(self, message: RouterMessage, *, timed_out: bool) -> ActorReply | None:
        """Answer a router's watch message, which is not stale; None: nothing new yet. `timed_out`: answer anyway."""
        session = self.sessions.get(message.router)
        if session is None or session.incarnation != message.incarnation:
            return self.stale_reply(message)
        self.receive(session, message)
        has_news = session.sending.unsent > 0 or session.sent_state_version < self.state.version
        return self.reply(session) if timed_out or has_news else None

    def unresponsive(self, now: float) -> list[str]:
        """Routers with pending actions that have acknowledged none for `UNRESPONSIVE_S`. O(routers)."""
        found = []
        for session in self.sessions.values():
            if not len(session.sending):
                session.unacked_since = None
            elif session.unacked_since is None or session.acked_at_check != session.sending.last_acked:
                session.unacked_since, session.acked_at_check = now, session.sending.last_acked
            elif now - session.unacked_since >= UNRESPONSIVE_S:
                found.append(session.name)
        return found

    def extend(self) -> None:
        """Restart the unresponsive timers: this process stood still, and unread messages are waiting."""
        for session in self.sessions.values():
            session.unacked_since = None

    def set_figures(self, model: str, classes: tuple[ClassQueueFigures, ...]) -> None:
        """Set the figures of a model's queue; each router receives them with its next reply."""
        self._figures_version += 1
        self.figures_by_model.pop(model, None)
        self.figures_by_model[model] = QueueFigures(self._figures_version, model, classes)

    def set_state(self, state: ActorState) -> None:
        """Set the state, except its version; a change is sent to all routers at once."""
        if state != self.state:
            self.state = state._replace(version=self.state.version + 1)
            figures = self.figures_by_model.items()
            self.figures_by_model = {model: one for model, one in figures if model in state.contended}
            self._woken.update(self.sessions)

    def take_woken(self) -> list[str]:
        """Routers with something new since the last call."""
        woken, self._woken = sorted(self._woken), set()
        return woken
