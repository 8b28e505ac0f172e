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

Sequence numbers per session, replies kept until acknowledged: as in NFSv4.1 sessions and TCP.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from serve_app.core.queue import Backlog
from serve_app.core.shared_queue.messages import ActorAction, Amount, RouterEvent

BATCH = 256  # items per message: about 1 ms of the actor's time, so that no router waits long for another
MAX_TENANTS_REPORTED = 32  # tenants of a class in the figures, which are sent with every answer to an arrival
WINDOW = 4096  # items in transit: bounds the early items that the receiver keeps

T = TypeVar("T")


class ClassQueueFigures(NamedTuple):
    """One class of a queue with waiting requests.

    Args:
        waiting: requests that claimed this class.
        is_full: whether an arrival would be refused because the queue is full.
        backlog: the work ahead of an arrival.
        tenant_slots: slots that each tenant waits for; None: more than `MAX_TENANTS_REPORTED` tenants wait.
    """

    waiting: int
    is_full: bool
    backlog: Backlog
    tenant_slots: Mapping[str, int] | None


class QueueFigures(NamedTuple):
    """A model's queue with waiting requests.

    Args:
        version: rises with each update of any queue's figures, in an epoch.
        model: the model's name.
        classes: from the lowest.
    """

    version: int
    model: str
    classes: tuple[ClassQueueFigures, ...]


class ActorState(NamedTuple):
    """The actor's state for all routers; part of every reply, so that no reply's actions are newer than its state.

    Args:
        version: rises with every change, in an epoch.
        contended: models with waiting requests, and engines with KV debt: no credit there.
        recovering: models whose queue grants nothing yet: the routers' holdings on their engines are unknown.
        blocked: number of engines that wait for memory, by model, for models with any.
    """

    version: int
    contended: frozenset[str]
    recovering: frozenset[str]
    blocked: Mapping[str, int]


class RouterMessage(NamedTuple):
    """A router's message.

    Args:
        router: its name.
        incarnation: rises with every new session of the router.
        epoch: the actor's, as far as the router knows.
        seq: the number of the first event.
        events: in order.
        last_acked_event: the last event acknowledged by the actor.
        last_taken_action: the last action the router has taken.
        resend: replies may have been lost; send unacknowledged actions again.
    """

    router: str
    incarnation: int
    epoch: int
    seq: int
    events: tuple[RouterEvent, ...]
    last_acked_event: int
    last_taken_action: int
    resend: bool = False


class ActorReply(NamedTuple):
    """The actor's message.

    Args:
        epoch: the actor's.
        incarnation: the router's, as in the message this answers.
        last_taken_event: the last event taken.
        seq: the number of the first action.
        actions: in order.
        state: None only in a stale reply.
        figures: of contended models, those newer than the ones sent before.
        is_stale: the router must begin another incarnation, in this epoch.
        has_more: some actions did not fit.
        ledger_accounts: the router's accounts in the ledger, in the answer to an `AccountReport`.
    """

    epoch: int
    incarnation: int
    last_taken_event: int
    seq: int
    actions: tuple[ActorAction, ...]
    state: ActorState | None
    figures: tuple[QueueFigures, ...] = ()
    is_stale: bool = False
    has_more: bool = False
    ledger_accounts: tuple[Amount, ...] | None = None


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
        first, last = self._sent + 1, min(self._sent + BATCH, self.last, self.last_acked + WINDOW)
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
