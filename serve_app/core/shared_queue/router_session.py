"""A router's end of `core.shared_queue.delivery`: incarnations, what is yet to be said, the actor's last word.

Usage and progress are sums, of which a message takes as many as it has room for, in turn: however many requests run,
messages and what is kept are bounded. They ask for no message of their own: they ride along, at the latest with a beat.

Invariant: what is heard of another epoch or incarnation than the present one changes nothing but that a new one begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.delivery import BATCH, Exchange, Figures, Receiving, Reply, Sending
from serve_app.core.shared_queue.messages import Action, Amount, Booked, Done, Event, Held, Progress, Usage
from serve_app.types import RequestClass

BEHIND = 8192  # events nobody has taken: to say everything anew is less than that, and memory is bounded
AHEAD = 1024  # of these, when no more requests are handed in: what a few messages on their way have room for


class Link:
    """Events to the actor and actions from it, for one router.

    Args:
        router: its name.
        incarnation: the last one this name has had.
    """

    def __init__(self, router: str, incarnation: int) -> None:
        self._router = router
        self._incarnation = incarnation
        self.epoch = 0
        self._usage: dict[tuple[str, RequestClass, str], list[int]] = {}
        self.accounts: dict[str, Amount] = {}  # ours in the ledger, by the actor's last word
        self.begin(0, ())

    def begin(self, epoch: int, events: Iterable[Event]) -> None:
        """Begin an incarnation with these events, the first of them a `Hello`."""
        self.epoch = epoch
        self._incarnation += 1
        self._sending: Sending[Event] = Sending()
        self._receiving: Receiving[Action] = Receiving()
        self._progress: dict[str, int] = {}  # tickets are of an incarnation, usage is not
        self._again = self._more = False
        self._version = -1
        self._held = 0  # the number of the last `Held`
        self.booked = False  # the actor has said what the accounts are
        self.recovering: frozenset[str] = frozenset()
        self.contended: frozenset[str] = frozenset()
        self.blocked: Mapping[str, int] = {}  # engines that wait for memory, by model
        self.figures: dict[str, Figures] = {}
        for event in events:
            self._sending.put(event)

    @property
    def too_far_behind(self) -> bool:
        return len(self._sending) > BEHIND

    @property
    def room(self) -> int:
        """Requests that can be handed in before more of what was said is acknowledged."""
        return max(0, AHEAD - len(self._sending))

    @property
    def urgent(self) -> bool:
        """Whether there is something to say, or to hear again, that waits for no beat."""
        return bool(self._again or self._more or self._sending.unsent)

    @property
    def has_sums(self) -> bool:
        """Whether a beat would have usage or progress to tell."""
        return bool(self._progress or (self.booked and self._usage))

    def put(self, event: Event) -> int:
        """Something to say; its number, which the actor acknowledges (see `Reply.ack`)."""
        self._sending.put(event)
        return self._sending.last

    def held(self, holds: tuple[Amount, ...], accounts: tuple[Amount, ...]) -> None:
        """What the router goes by; nothing is said while the last word of it is not acknowledged."""
        if self.booked and self._held <= self._sending.taken:
            self._held = self.put(Held(holds, accounts, self._receiving.last))

    def done(self, event: Done) -> None:
        """A handed-in request has ended; its last word has all its tokens."""
        self._progress.pop(event.ticket, None)
        self._sending.put(event)

    def progress(self, ticket: str, output_tokens: int) -> None:
        """A handed-in request goes on."""
        self._progress[ticket] = self._progress.get(ticket, 0) + output_tokens

    def used(self, model: str, arrival: Arrival, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Somebody was served without the actor."""
        sums = self._usage.setdefault((model, arrival.request_class, arrival.tenant), [0, 0, 0])
        for index, amount in enumerate((requests, prompt_tokens, output_tokens)):
            sums[index] += amount

    def next_exchange(self, *, beat: bool = False) -> Exchange | None:
        """The next message; None: there is nothing to say that waits for no beat."""
        if not (beat or self.urgent):
            return None
        while self._sending.unsent < BATCH and self.booked and self._usage:
            of = next(iter(self._usage))
            self._sending.put(Usage(*of, *self._usage.pop(of)))
        while self._sending.unsent < BATCH and self._progress:
            ticket = next(iter(self._progress))  # who was told of longest ago: whoever goes on comes in behind
            self._sending.put(Progress(ticket, self._progress.pop(ticket)))
        return self._message(*self._sending.batch())

    def watch(self) -> Exchange:
        """A message that says nothing, for the actor to answer once it has something to say."""
        return self._message(self._sending.taken + 1, ())

    def lost(self) -> None:
        """A message or its answer may be lost."""
        self._sending.again()
        self._again = True

    def outdated(self, reply: Reply) -> bool:
        """Whether an answer is of an older actor, or to an older incarnation of ours."""
        return reply.epoch < self.epoch or (reply.epoch == self.epoch and reply.incarnation != self._incarnation)

    def begins(self, reply: Reply) -> bool:
        """Whether an answer that is not outdated asks for a new incarnation."""
        return reply.stale or reply.epoch > self.epoch

    def heard(self, reply: Reply) -> Sequence[Action]:
        """What an answer tells us to do, in order; and its word, if that is newer."""
        self._sending.acked(reply.ack)
        self._more = reply.more
        actions = self._receiving.accept(reply.seq, reply.actions)
        if reply.seq > self._receiving.last + 1:  # what is missing may have gone to a question that was given up
            self._again = True
        self.booked = self.booked or any(isinstance(action, Booked) for action in actions)
        word = reply.word
        if word is not None and word.version > self._version:
            self._version, self.contended, self.recovering = word.version, word.contended, word.recovering
            self.blocked = dict(word.blocked)
            self.figures = {name: one for name, one in self.figures.items() if name in word.contended}
        if reply.booked is not None:
            self.accounts = {one.engine: one for one in reply.booked}
        for figures in reply.figures:
            known = self.figures.get(figures.model)
            if known is None or known.version < figures.version:
                self.figures[figures.model] = figures
        return actions

    def _message(self, seq: int, events: tuple[Event, ...]) -> Exchange:
        again, self._again, self._more = self._again, False, False
        taken, last = self._sending.taken, self._receiving.last
        return Exchange(self._router, self._incarnation, self.epoch, seq, events, taken, last, again)
