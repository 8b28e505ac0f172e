"""A router's end of `core.shared_queue.delivery`: incarnations, unsent events and the actor's last state.

Usage and progress are sums. A message takes as many as fit, in turn, so messages and memory are bounded for any number
of requests. They cause no message of their own: they are sent with other events, at the latest with a heartbeat.

Invariant: a reply of another epoch or incarnation changes nothing; it can only cause a new incarnation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.delivery import (
    BATCH,
    ActorReply,
    ActorState,
    QueueFigures,
    ReceiveBuffer,
    RouterMessage,
    SendBuffer,
)
from serve_app.core.shared_queue.messages import ActorAction, Amount, RouterEvent
from serve_app.types import RequestClass

MAX_UNACKED_EVENTS = 8192  # unacknowledged events: bounds memory; a report of the full state has fewer
ARRIVAL_WINDOW = 1024  # of these, before submitting requests pauses: a few full messages in transit
UNKNOWN_STATE = ActorState(-1, frozenset(), frozenset(), {})  # before the first reply


class RouterSession:
    """Events to the actor and actions from it, for one router.

    Args:
        router: its name.
        incarnation: the last one used under this name.
    """

    def __init__(self, router: str, incarnation: int) -> None:
        self.router = router
        self.incarnation = incarnation
        self.epoch = 0
        # sums by model, class and tenant
        self._usage: defaultdict[tuple[str, RequestClass, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        self.ledger_accounts: dict[str, Amount] = {}  # this router's in the ledger, as last reported
        self.begin(0, ())

    def begin(self, epoch: int, events: Iterable[RouterEvent]) -> None:
        """Begin an incarnation with these events, the first of them a `Hello`."""
        self.epoch = epoch
        self.incarnation += 1
        self.sending: SendBuffer[RouterEvent] = SendBuffer(deque(events))
        self._receiving: ReceiveBuffer[ActorAction] = ReceiveBuffer()
        self.progress: defaultdict[str, int] = defaultdict(int)  # by ticket, which belong to an incarnation
        self._resend_wanted = self._has_more = False
        self._account_report_number = 0  # the event number of the last `AccountReport`
        self.is_booked = False  # the actor has booked the accounts
        self.state = UNKNOWN_STATE
        self.figures: dict[str, QueueFigures] = {}

    @property
    def arrivals_left(self) -> int:
        """Requests that can be submitted before more events are acknowledged."""
        return max(0, ARRIVAL_WINDOW - len(self.sending))

    @property
    def is_urgent(self) -> bool:
        """Whether there is something to send or receive before the next heartbeat."""
        return bool(self._resend_wanted or self._has_more or self.sending.unsent)

    @property
    def has_sums(self) -> bool:
        """Whether a heartbeat would carry usage or progress."""
        return bool(self.progress or (self.is_booked and self._usage))

    def put(self, event: RouterEvent) -> int:
        """Add an event; returns its number, which the actor acknowledges (`ActorReply.last_taken_event`)."""
        self.sending.put(event)
        return self.sending.last

    def report_accounts(self, in_use: tuple[Amount, ...], accounts: tuple[Amount, ...]) -> None:
        """Report the router's accounts, unless the last report is not acknowledged yet."""
        if self.is_booked and self._account_report_number <= self.sending.last_acked:
            self._account_report_number = self.put(messages.AccountReport(in_use, accounts, self._receiving.last_taken))

    def end_request(self, event: messages.Done) -> None:
        """A submitted request has ended; `event` has all its tokens, so unsent progress is dropped."""
        self.progress.pop(event.ticket, None)
        self.sending.put(event)

    def add_usage(self, model: str, arrival: Arrival, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Add use of requests granted on credit."""
        sums = self._usage[model, arrival.request_class, arrival.tenant]
        for index, amount in enumerate((requests, prompt_tokens, output_tokens)):
            sums[index] += amount

    def next_message(self, *, beat: bool = False) -> RouterMessage | None:
        """The next message; None: nothing to send before the next heartbeat."""
        if not (beat or self.is_urgent):
            return None
        while self.sending.unsent < BATCH and self.is_booked and self._usage:
            of = next(iter(self._usage))
            self.sending.put(messages.CreditUsage(*of, *self._usage.pop(of)))
        while self.sending.unsent < BATCH and self.progress:
            ticket = next(iter(self.progress))  # the one reported longest ago; new progress is added at the end
            self.sending.put(messages.TokenProgress(ticket, self.progress.pop(ticket)))
        return self._message(*self.sending.next_batch())

    def watch_message(self) -> RouterMessage:
        """A message without events, which the actor answers once it has something to send."""
        return self._message(self.sending.last_acked + 1, ())

    def on_lost(self) -> None:
        """A message or its reply may be lost: send again."""
        self.sending.resend_unacked()
        self._resend_wanted = True

    def is_outdated(self, reply: ActorReply) -> bool:
        """Whether a reply is from an older actor epoch, or to an older incarnation."""
        return reply.epoch < self.epoch or (reply.epoch == self.epoch and reply.incarnation != self.incarnation)

    def needs_new_incarnation(self, reply: ActorReply) -> bool:
        """Whether a reply that is not outdated requires a new incarnation."""
        return reply.is_stale or reply.epoch > self.epoch

    def on_reply(self, reply: ActorReply) -> Sequence[ActorAction]:
        """Take a reply's state, if it is newer, and return its actions in order."""
        self.sending.on_ack(reply.last_taken_event)
        self._has_more = reply.has_more
        actions = self._receiving.accept(reply.seq, reply.actions)
        if reply.seq > self._receiving.last_taken + 1:  # the missing reply may have gone to a call that was given up
            self._resend_wanted = True
        self.is_booked = self.is_booked or any(isinstance(action, messages.Booked) for action in actions)
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
        taken, last = self.sending.last_acked, self._receiving.last_taken
        return RouterMessage(self.router, self.incarnation, self.epoch, seq, events, taken, last, again)
