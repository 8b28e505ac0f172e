"""Batches between a router and the quota actor that take effect once and in order, whatever the network does.

    exchange(router, incarnation, epoch, seq, ack, events) -> reply(epoch, incarnation, ack, seq, actions, state)

Rules
- Events and actions are numbered from 1 in each incarnation. Each side keeps unacknowledged items and sends them again
  after a reported loss; items already taken are skipped, early items are kept.
- A router reports a loss after a failed call, and when a reply arrives before an earlier one: the earlier reply may
  have gone to a call that the router has given up, which only the router can notice.
- An incarnation begins with its first event. A batch of an unknown incarnation, or with a higher acknowledgement than
  the receiver has sent, is answered as stale: the router begins a new incarnation. So it does in a new actor epoch.
- `ActorState` is not part of the stream: it has a version, and the newest one counts.

Invariant: `ReceiveBuffer.accept` returns over time every item put into the other side's `SendBuffer`, once, in order.
Invariant: an action sent to an incarnation is received by that one only, by no later one of the same router.
Invariant: an ended incarnation stays ended: a late copy of its first message does not begin it again.
Invariant: a reply of another epoch or incarnation changes nothing; it can only cause a new incarnation.

Sequence numbers per session, replies kept until acknowledged: as in NFSv4.1 sessions and TCP.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.messages import ActorAction, ActorReply, ActorState, Amount, RouterEvent, RouterMessage
from serve_app.core.shared_queue.states import ROUTER_SESSION, RouterSessionReply, RouterSessionState, RouterSessionStep
from serve_app.core.times import UNRESPONSIVE_S
from serve_app.types import RequestClass

BATCH = 256  # items per message: about 1 ms of the actor's time, so that no router waits long for another
WINDOW = 4096  # items in transit: bounds the early items that the receiver keeps
MAX_UNACKED_EVENTS = 8192  # unacknowledged events: bounds memory; a report of the full state has fewer
ARRIVAL_WINDOW = 1024  # of these, before submitting requests pauses: a few full messages in transit
UNKNOWN_STATE = ActorState(-1, frozenset(), frozenset(), {})  # before the first reply
MAX_ENDED_ROUTER_SESSIONS = 1024  # routers remembered: more than a cluster starts while a message is in transit

T = TypeVar("T")


@dataclass(slots=True)
class SendBuffer(Generic[T]):
    """Numbered items, kept until they are acknowledged. O(1) per item."""

    _items: deque[T] = field(default_factory=deque)
    _sent: int = 0
    last_acked: int = 0  # the last number acknowledged by the other side

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last(self) -> int:
        """The number of the last item put in."""
        return self.last_acked + len(self._items)

    @property
    def unsent(self) -> int:
        """Items in no batch since `put` or `resend_unacked`."""
        return self.last - self._sent

    def put(self, item: T) -> None:
        self._items.append(item)

    def on_ack(self, number: int) -> None:
        """The other side has taken all items up to this number; an older number, or one never sent, changes
        nothing."""
        if number > self.last:
            return
        while self.last_acked < number:
            self._items.popleft()
            self.last_acked += 1
        self._sent = max(self._sent, self.last_acked)

    def resend_unacked(self) -> None:
        """Unacknowledged items may be lost: send them again in the next batches."""
        self._sent = self.last_acked

    def items_after(self, number: int) -> tuple[T, ...]:
        """The unacknowledged items after this number. O(items)."""
        return tuple(itertools.islice(self._items, max(0, number - self.last_acked), None))

    def next_batch(self) -> tuple[int, tuple[T, ...]]:
        """The number of the first next item, and the items; empty if there are none, or `WINDOW` are in transit."""
        first = self._sent + 1
        last = min(self._sent + BATCH, self.last, self.last_acked + WINDOW)
        self._sent = max(self._sent, last)
        start = first - 1 - self.last_acked
        return first, tuple(itertools.islice(self._items, start, last - self.last_acked))


@dataclass(slots=True)
class ReceiveBuffer(Generic[T]):
    """The receiving end of a `SendBuffer`."""

    early: dict[int, T] = field(default_factory=dict)
    last_taken: int = 0  # the last number taken

    def accept(self, seq: int, items: Sequence[T]) -> Sequence[T]:
        """The items that can be taken now; duplicates are skipped, early items are kept."""
        if seq == self.last_taken + 1 and not self.early:
            self.last_taken += len(items)
            return items
        for number, item in enumerate(items, seq):
            if self.last_taken < number <= self.last_taken + WINDOW:
                self.early[number] = item
        taken: list[T] = []
        while (found := self.early.pop(self.last_taken + 1, None)) is not None:
            self.last_taken += 1
            taken.append(found)
        return taken


class RouterSession:
    """The router's end: events to the actor and actions from it.

    Reports are what no decision waits for: ends that return nothing, what has begun, usage and progress as sums. They
    cause no message of their own: a message takes as many as fit, in turn, at the latest a heartbeat. So messages and
    memory are bounded for any number of requests.

    Args:
        router: its name.
        incarnation: the last one used under this name.
    """

    def __init__(self, router: str, incarnation: int) -> None:
        self.router = router
        self.incarnation = incarnation
        self.epoch = 0
        self.standing = RouterSessionState.NEW
        # sums by model, class and tenant
        self._usage: defaultdict[tuple[str, RequestClass, str], list[int]] = defaultdict(lambda: [0, 0])
        self.ledger_accounts: dict[str, Amount] = {}  # this router's at the actor, as last reported
        self.takes_begun = False  # whether the actor's release knows `Began`
        self._ticket_numbers = itertools.count(1)
        self.begin(0, ())

    def begin(self, epoch: int, events: Iterable[RouterEvent]) -> None:
        """Begin an incarnation with these events, the first of them a `Hello`."""
        self.epoch = epoch
        self.incarnation += 1
        self.sending: SendBuffer[RouterEvent] = SendBuffer(deque(events))
        self._receiving: ReceiveBuffer[ActorAction] = ReceiveBuffer()
        # output and prompt tokens by ticket, which belong to an incarnation
        self.progress: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._ended: deque[messages.Done] = deque()  # that return nothing
        self.reports_wanted = False  # whether the next reports go in a message of their own
        self._first_events = len(self.sending)
        self._resend_wanted = self._has_more = False
        self._account_report_number = 0  # the event number of the last `AccountReport`
        self.advance(RouterSessionStep.RENEWED)
        self.state = UNKNOWN_STATE
        self.figures: dict[str, messages.QueueFigures] = {}

    def advance(self, event: RouterSessionStep | RouterSessionReply) -> None:
        """An event of the session (`core.shared_queue.states`)."""
        self.standing = ROUTER_SESSION.after(self.standing, event)

    @property
    def is_booked(self) -> bool:
        """Whether the actor has booked the accounts."""
        return self.standing is not RouterSessionState.NEW

    @property
    def is_overfull(self) -> bool:
        """Whether so many events are not acknowledged, besides those with which this incarnation has begun, that a new
        one says the same in fewer."""
        return len(self.sending) > self._first_events + MAX_UNACKED_EVENTS

    @property
    def arrivals_left(self) -> int:
        """Requests that can be submitted before more events are acknowledged."""
        return max(0, ARRIVAL_WINDOW - len(self.sending))

    @property
    def is_urgent(self) -> bool:
        """Whether there is something to send or receive before the next heartbeat."""
        return bool(self._resend_wanted or self._has_more or self.reports_wanted or self.sending.unsent)

    @property
    def has_reports(self) -> bool:
        """Whether a heartbeat would carry ends, usage or progress."""
        return bool(self._ended or self.progress or (self.is_booked and self._usage))

    def new_ticket(self) -> str:
        """A ticket that this router has not used yet."""
        return f"{self.router}:{next(self._ticket_numbers)}"

    def put(self, event: RouterEvent) -> int:
        """Add an event; returns its number, which the actor acknowledges (`ActorReply.last_taken_event`)."""
        self.sending.put(event)
        return self.sending.last

    def report_accounts(self, in_use: tuple[Amount, ...], accounts: tuple[Amount, ...]) -> None:
        """Report the router's accounts, unless the last report is not acknowledged yet."""
        if self.is_booked and self._account_report_number <= self.sending.last_acked:
            self._account_report_number = self.put(messages.AccountReport(in_use, accounts, self._receiving.last_taken))

    def end_request(self, event: messages.Done) -> None:
        """A request that the actor knows has ended; `event` has all its tokens, so unsent progress is dropped."""
        self.progress.pop(event.ticket, None)
        if event.slots or event.tokens:
            self.sending.put(event)
        else:
            self._ended.append(event)

    def add_progress(self, ticket: str, output_tokens: int, prompt_tokens: int) -> None:
        """Add what a request that the actor knows has used since."""
        sums = self.progress[ticket]
        sums[0] += output_tokens
        sums[1] += prompt_tokens

    def add_usage(self, model: str, arrival: Arrival, prompt_tokens: int, output_tokens: int) -> None:
        """Add use of a request that the actor does not know; one that had begun before has paid for its prompt."""
        sums = self._usage[model, arrival.request_class, arrival.tenant]
        sums[0] += 0 if arrival.has_begun else prompt_tokens
        sums[1] += output_tokens

    def next_message(self, begun: Iterable[messages.Began] = (), *, beat: bool = False) -> RouterMessage | None:
        """The next message; None: nothing to send before the next heartbeat. `begun`: what is to be announced, taken as
        far as there is room."""
        if not (beat or self.is_urgent):
            return None
        self.reports_wanted = False
        reports = itertools.chain(self._take_ended(), begun, self._take_usage(), self._take_progress())
        for event in itertools.islice(reports, max(0, BATCH - self.sending.unsent)):
            self.sending.put(event)
        return self._message(*self.sending.next_batch())

    def _take_ended(self) -> Iterator[RouterEvent]:
        while self._ended:
            yield self._ended.popleft()

    def _take_usage(self) -> Iterator[RouterEvent]:
        while self.is_booked and self._usage:
            of = next(iter(self._usage))
            yield messages.CreditUsage(*of, *self._usage.pop(of))

    def _take_progress(self) -> Iterator[RouterEvent]:
        while self.progress:
            ticket = next(iter(self.progress))  # the one reported longest ago; new progress is added at the end
            yield messages.TokenProgress(ticket, *self.progress.pop(ticket))

    def watch_message(self) -> RouterMessage:
        """A message without events, which the actor answers once it has something to send."""
        return self._message(self.sending.last_acked + 1, ())

    def on_lost(self) -> None:
        """A message or its reply may be lost: send again."""
        self.sending.resend_unacked()
        self._resend_wanted = True
        self.advance(RouterSessionStep.LOST)

    def on_reply(self, reply: ActorReply) -> Sequence[ActorAction]:
        """Take a reply's state, if it is newer, and return its actions in order."""
        self.sending.on_ack(reply.last_taken_event)
        self._has_more = reply.has_more
        actions = self._receiving.accept(reply.seq, reply.actions)
        if reply.seq > self._receiving.last_taken + 1:  # the missing reply may have gone to a call that was given up
            self._resend_wanted = True
        if reply.state is not None and reply.state.version > self.state.version:
            self.state = reply.state
            self.figures = {name: one for name, one in self.figures.items() if name in self.state.contended}
        if reply.ledger_accounts is not None:
            self.ledger_accounts = {one.engine: one for one in reply.ledger_accounts}
        for figures in reply.figures:
            known = self.figures.get(figures.model)
            if known is None or known.version < figures.version:
                self.figures[figures.model] = figures
        return actions

    def _message(self, seq: int, events: tuple[RouterEvent, ...]) -> RouterMessage:
        again, self._resend_wanted, self._has_more = self._resend_wanted, False, False
        taken = self.sending.last_acked
        last = self._receiving.last_taken
        return RouterMessage(self.router, self.incarnation, self.epoch, seq, events, taken, last, again, True)


@dataclass(slots=True)
class ActorRouterSession:
    """The actor's end for one router."""

    name: str
    incarnation: int
    takes_lease: bool  # whether its release knows a session's place by the grant
    sending: SendBuffer[ActorAction] = field(default_factory=SendBuffer)
    receiving: ReceiveBuffer[RouterEvent] = field(default_factory=ReceiveBuffer)
    sent_state_version: int = -1  # versions
    sent_figures_version: int = -1
    acked_at_check: int = 0  # the last acknowledged action at the last check
    unacked_since: float | None = None  # since when no action was acknowledged; None: none is pending


class ActorRouterSessions:
    """The sessions of all routers, and the state sent to all of them. O(1) per message and item."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.by_router: dict[str, ActorRouterSession] = {}
        self._ended_incarnations: dict[str, int] = {}  # of routers without a session, ended last at the end
        self._woken: set[str] = set()
        self.state = ActorState(0, frozenset(), frozenset(), {})
        self.figures_by_model: dict[str, messages.QueueFigures] = {}  # by model, updated last at the end
        self._figures_version = 0

    def is_stale(self, message: RouterMessage) -> bool:
        """Whether a message belongs to no session and begins none."""
        router_session = self.by_router.get(message.router)
        if message.epoch != self._epoch:
            return True
        if router_session is None or message.incarnation > router_session.incarnation:
            over = message.incarnation <= self._ended_incarnations.get(message.router, -1)
            return over or message.seq != 1 or message.last_acked_event != 0 or not message.events
        return (
            message.incarnation < router_session.incarnation
            or message.last_acked_event > router_session.receiving.last_taken
        )

    def stale_reply(self, message: RouterMessage) -> ActorReply:
        """The reply that makes a router begin a new incarnation."""
        return ActorReply(self._epoch, message.incarnation, 0, 1, (), None, is_stale=True, takes_begun=True)

    def begin(self, message: RouterMessage) -> ActorRouterSession:
        """Begin a session for a new incarnation of a router; pending actions of the last one are dropped."""
        router_session = self.by_router[message.router] = ActorRouterSession(
            message.router, message.incarnation, message.takes_lease
        )
        self._ended_incarnations.pop(message.router, None)
        return router_session

    def end(self, router: str) -> None:
        """End a router's session: its next message is answered as stale."""
        router_session = self.by_router.pop(router, None)
        if router_session is not None:
            self._ended_incarnations[router] = router_session.incarnation
            if len(self._ended_incarnations) > MAX_ENDED_ROUTER_SESSIONS:
                del self._ended_incarnations[next(iter(self._ended_incarnations))]
        self._woken.discard(router)

    def end_all(self) -> None:
        """End all sessions; watching routers are woken to begin a new incarnation."""
        watching = list(self.by_router)
        for router in watching:
            self.end(router)
        self._woken.update(watching)

    def send(self, router: str, action: ActorAction) -> None:
        """Send an action to a router, if it has a session, and its release does not know the same by another one."""
        router_session = self.by_router.get(router)
        if router_session is not None and not (router_session.takes_lease and isinstance(action, messages.SessionDraw)):
            router_session.sending.put(action)
            self._woken.add(router)

    def acknowledgement_check(self) -> Callable[[], bool]:
        """Returns a check whether all actions sent until now are acknowledged, ended sessions excepted."""
        marks = [(router_session, router_session.sending.last) for router_session in self.by_router.values()]
        return lambda: all(
            self.by_router.get(router_session.name) is not router_session or router_session.sending.last_acked >= last
            for router_session, last in marks
        )

    def receive(self, router_session: ActorRouterSession, message: RouterMessage) -> Sequence[RouterEvent]:
        """Take a message; returns the events to process now."""
        router_session.sending.on_ack(message.last_taken_action)
        if message.resend:
            router_session.sending.resend_unacked()
            router_session.sent_state_version = router_session.sent_figures_version = -1
        return router_session.receiving.accept(message.seq, message.events)

    def reply(
        self, router_session: ActorRouterSession, ledger_accounts: tuple[Amount, ...] | None = None
    ) -> ActorReply:
        """The next reply for a router."""
        seq, actions = router_session.sending.next_batch()
        last_sent = router_session.sent_figures_version
        newest_first = reversed(self.figures_by_model.values())
        figures = tuple(itertools.takewhile(lambda model_figures: model_figures.version > last_sent, newest_first))
        router_session.sent_state_version = self.state.version
        router_session.sent_figures_version = self._figures_version
        return ActorReply(
            self._epoch,
            router_session.incarnation,
            router_session.receiving.last_taken,
            seq,
            actions,
            self.state,
            figures,
            has_more=router_session.sending.unsent > 0,
            ledger_accounts=ledger_accounts,
            takes_begun=True,
        )

    def on_watch(self, message: RouterMessage, *, timed_out: bool) -> ActorReply | None:
        """Answer a router's watch message, which is not stale; None: nothing new yet. `timed_out`: answer anyway."""
        router_session = self.by_router.get(message.router)
        if router_session is None or router_session.incarnation != message.incarnation:
            return self.stale_reply(message)
        self.receive(router_session, message)
        has_news = router_session.sending.unsent > 0 or router_session.sent_state_version < self.state.version
        return self.reply(router_session) if timed_out or has_news else None

    def unresponsive(self, now: float) -> list[str]:
        """Routers with pending actions that have acknowledged none for `UNRESPONSIVE_S`. O(routers)."""
        found = []
        for router_session in self.by_router.values():
            if not len(router_session.sending):
                router_session.unacked_since = None
            elif (
                router_session.unacked_since is None
                or router_session.acked_at_check != router_session.sending.last_acked
            ):
                router_session.unacked_since = now
                router_session.acked_at_check = router_session.sending.last_acked
            elif now - router_session.unacked_since >= UNRESPONSIVE_S:
                found.append(router_session.name)
        return found

    def extend(self) -> None:
        """Restart the unresponsive timers: this process stood still, and unread messages are waiting."""
        for router_session in self.by_router.values():
            router_session.unacked_since = None

    def set_figures(self, model: str, classes: tuple[messages.ClassQueueFigures, ...]) -> None:
        """Set the figures of a model's queue; each router receives them with its next reply."""
        self._figures_version += 1
        self.figures_by_model.pop(model, None)
        self.figures_by_model[model] = messages.QueueFigures(self._figures_version, model, classes)

    def set_state(self, state: ActorState) -> None:
        """Set the state, except its version; a change is sent to all routers at once."""
        if state != self.state:
            self.state = state._replace(version=self.state.version + 1)
            figures = self.figures_by_model.items()
            self.figures_by_model = {model: one for model, one in figures if model in state.contended}
            self._woken.update(self.by_router)

    def take_woken(self) -> list[str]:
        """Routers with something new since the last call."""
        woken, self._woken = sorted(self._woken), set()
        return woken
