"""Batches between a router and the quota actor that take effect once and in order, whatever the network does.

    router: exchange(router, incarnation, epoch, seq, ack, events) -> reply(epoch, incarnation, ack, seq, actions, word)

Rules
- Events and actions are numbered from 1 in each incarnation. Each side keeps what the other has not acknowledged and
  says it again once it is told that something was lost; what has been taken is skipped, what comes early is kept.
- A router says that something was lost when a call of its has failed, and when an answer comes before an earlier one:
  that one may have gone to a question which the router has given up, and nobody else would notice.
- An incarnation begins with its first event; a batch of one that is not known, or that knows more than the receiver,
  is answered `stale`: the router begins another. So does a new epoch of the actor.
- The `Word` is no part of the stream: it says what is, with a version, and the newest counts.

Invariant: what `Receiving.accept` returns over time is what was put into the other `Sending`, each once, in order.

Sequence numbers per session, answers kept until they are acknowledged: as NFSv4.1's sessions and TCP do it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from serve_app.core.queue import Backlog
from serve_app.core.shared_queue.messages import Action, Amount, Event

BATCH = 256  # items of a message: about 1 ms of the actor's time, so that nobody's word waits for another's for long
LANES = 32  # tenants of a class in the figures; these are told with every answer to an arrival
WINDOW = 4096  # items that may be on their way: bounds what the receiver keeps of what came early

T = TypeVar("T")


class Queued(NamedTuple):
    """One class of a line in which somebody waits.

    Args:
        waiting: requests that claimed it.
        full: whether an arrival would be refused for want of room.
        backlog: what stands before an arrival.
        lanes: the slots that each tenant waits for; None: more than `LANES` tenants wait.
    """

    waiting: int
    full: bool
    backlog: Backlog
    lanes: Mapping[str, int] | None


class Figures(NamedTuple):
    """The line of a model in which somebody waits.

    Args:
        version: rises with each look at any line, in an epoch.
        model: whose.
        classes: from the lowest.
    """

    version: int
    model: str
    classes: tuple[Queued, ...]


class Word(NamedTuple):
    """What is, by the actor's word; in every reply, so that none of them is older than what it tells.

    Args:
        version: rises with every change, in an epoch.
        contended: models in whose line somebody waits, and engines on which somebody is owed tokens: no credit there.
        recovering: models of which the line grants nothing yet: what routers hold on their engines is not known.
        blocked: how many engines of each model wait for memory, for those of which any does.
    """

    version: int
    contended: frozenset[str]
    recovering: frozenset[str]
    blocked: tuple[tuple[str, int], ...] = ()


class Exchange(NamedTuple):
    """A router's message.

    Args:
        router: its name.
        incarnation: rises with every new beginning.
        epoch: the actor's, as far as the router knows.
        seq: the number of the first event.
        events: in order.
        taken: the last event the router knows to be taken.
        ack: the last action it has taken.
        again: answers may have been lost; actions that are not acknowledged are to be said again.
    """

    router: str
    incarnation: int
    epoch: int
    seq: int
    events: tuple[Event, ...]
    taken: int
    ack: int
    again: bool = False


class Reply(NamedTuple):
    """The actor's message.

    Args:
        epoch: the actor's.
        incarnation: the router's, as in the message this answers.
        ack: the last event taken.
        seq: the number of the first action.
        actions: in order.
        word: None only of a stale reply.
        figures: of contended models, where they are others than were told before.
        stale: the router is to begin another incarnation, in this epoch.
        more: there are actions that did not fit.
        booked: the router's accounts in the ledger, in the answer to a message with `Held`.
    """

    epoch: int
    incarnation: int
    ack: int
    seq: int
    actions: tuple[Action, ...]
    word: Word | None
    figures: tuple[Figures, ...] = ()
    stale: bool = False
    more: bool = False
    booked: tuple[Amount, ...] | None = None


class Sending(Generic[T]):
    """Items that are numbered and kept until they are acknowledged. All O(1) per item."""

    __slots__ = ("_items", "_sent", "taken")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._sent = 0
        self.taken = 0  # the last number that the other side has acknowledged

    def __len__(self) -> int:
        return len(self._items)

    @property
    def last(self) -> int:
        """The number of the last item put in."""
        return self.taken + len(self._items)

    @property
    def unsent(self) -> int:
        """Items that no batch has had since they were put in or `again` was called."""
        return self.last - self._sent

    def put(self, item: T) -> None:
        self._items.append(item)

    def acked(self, number: int) -> None:
        """The other side has taken all up to this number; an older word, or one of what was never sent, changes
        nothing."""
        if number > self.last:
            return
        while self.taken < number:
            self._items.popleft()
            self.taken += 1
        self._sent = max(self._sent, self.taken)

    def again(self) -> None:
        """What is not acknowledged may be lost, and goes into the next batches once more."""
        self._sent = self.taken

    def after(self, number: int) -> tuple[T, ...]:
        """The items after this one; none may have been acknowledged. O(items)."""
        return tuple(itertools.islice(self._items, max(0, number - self.taken), None))

    def batch(self) -> tuple[int, tuple[T, ...]]:
        """The next items and the number of the first; none when there are none, or too many on their way."""
        first, last = self._sent + 1, min(self._sent + BATCH, self.last, self.taken + WINDOW)
        self._sent = max(self._sent, last)
        start = first - 1 - self.taken
        return first, tuple(itertools.islice(self._items, start, last - self.taken))


class Receiving(Generic[T]):
    """The other end of a `Sending`."""

    __slots__ = ("_early", "last")

    def __init__(self) -> None:
        self._early: dict[int, T] = {}
        self.last = 0  # the last number taken

    def accept(self, seq: int, items: Sequence[T]) -> Sequence[T]:
        """What can be taken now; what came before is skipped, what comes too early is kept for later."""
        if seq == self.last + 1 and not self._early:
            self.last += len(items)
            return items
        for number, item in enumerate(items, seq):
            if self.last < number <= self.last + WINDOW:
                self._early[number] = item
        taken: list[T] = []
        while (found := self._early.pop(self.last + 1, None)) is not None:
            self.last += 1
            taken.append(found)
        return taken
