"""Who waits, in which order, and what is due when.

Order: the higher level first, then whoever entered the level first. A level is the class claimed, or, once a request
has waited its class's bound, the class above; it enters there at the end, since the batch that has aged must not push
in front of people who wait already. It is lifted once: a batch request never reaches the classes of people in a hurry.

Invariant: a request is in every index or in none; what has left leaves nothing behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.events import Arrival
from serve_app.core.heap import KeyedHeap
from serve_app.types import RequestClass

_DOWN = tuple(sorted(RequestClass, reverse=True))

Queue = OrderedDict[str, "Waiting"]  # not a dict: taking the first one out again and again is O(n) each there


@dataclass(slots=True)
class Waiting:
    """A request in the line. `entry` orders a level; `arrived_s` is the moment of arrival."""

    arrival: Arrival
    arrived_s: float
    level: RequestClass
    entry: int

    @property
    def request_id(self) -> str:
        return self.arrival.request_id

    @property
    def slots(self) -> int:
        return self.arrival.slots

    @property
    def lifted(self) -> bool:
        return self.level is not self.arrival.request_class


@dataclass(slots=True)
class _Level:
    fresh: Queue = field(default_factory=OrderedDict)  # claimed this class; by arrival
    lifted: Queue = field(default_factory=OrderedDict)  # claimed the class below; by arrival
    by_slots: dict[int, Queue] = field(default_factory=dict)  # by entry
    slots: int = 0

    def add(self, waiting: Waiting) -> None:
        (self.lifted if waiting.lifted else self.fresh)[waiting.request_id] = waiting
        self.by_slots.setdefault(waiting.slots, OrderedDict())[waiting.request_id] = waiting
        self.slots += waiting.slots

    def remove(self, waiting: Waiting) -> None:
        del (self.lifted if waiting.lifted else self.fresh)[waiting.request_id]
        queue = self.by_slots[waiting.slots]
        del queue[waiting.request_id]
        if not queue:
            del self.by_slots[waiting.slots]
        self.slots -= waiting.slots


class Line:
    """The requests that wait. O(log n) to add and remove; to find one, O(distinct slot counts in its level).

    Args:
        lift_after_s: the wait in seconds after which a request is lifted, for every class but the highest, from the
            lowest class up; not longer for a higher class.
    """

    def __init__(self, lift_after_s: tuple[float, ...]) -> None:
        self._lift_after_s = lift_after_s
        self._levels = [_Level() for _ in RequestClass]
        self._all: dict[str, Waiting] = {}
        self._deadlines = KeyedHeap()
        self._entries = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def add(self, arrival: Arrival, now: float) -> None:
        """Put a request at the end of its class. ValueError: its id waits already."""
        if arrival.request_id in self._all:
            raise ValueError(f"{arrival.request_id!r} waits already")
        self._entries += 1
        waiting = Waiting(arrival, now, arrival.request_class, self._entries)
        self._all[arrival.request_id] = waiting
        self._levels[waiting.level].add(waiting)
        if arrival.deadline is not None:
            self._deadlines.set(arrival.request_id, (arrival.deadline, self._entries))
        self.tokens += arrival.cost_tokens

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out; None if it does not wait."""
        waiting = self._all.pop(request_id, None)
        if waiting is None:
            return None
        self._levels[waiting.level].remove(waiting)
        self._deadlines.discard(request_id)
        self.tokens -= waiting.arrival.cost_tokens
        return waiting

    def levels(self) -> Iterator[RequestClass]:
        """Levels in which somebody waits, the highest first."""
        return (level for level in _DOWN if self._levels[level].slots)

    def first(self, level: RequestClass, max_slots: int) -> Waiting | None:
        """The first of a level among those that want no more than `max_slots`."""
        found: Waiting | None = None
        for slots, queue in self._levels[level].by_slots.items():
            if slots <= max_slots:
                head = next(iter(queue.values()))
                if found is None or head.entry < found.entry:
                    found = head
        return found

    def youngest_below(self, level: RequestClass) -> Waiting | None:
        """The latest arrival of the lowest level in which somebody waits, if that is below `level`.

        Whoever was lifted into a level arrived before all who claimed it, as no class's bound is below the next one's.
        """
        for below in range(level):
            queues = self._levels[below]
            for queue in (queues.fresh, queues.lifted):
                if queue:
                    return next(reversed(queue.values()))
        return None

    def lift(self, now: float) -> bool:
        """Lift everyone whose wait has reached the bound; whether there was anyone."""
        lifted = False
        for level, after_s in enumerate(self._lift_after_s):
            fresh = self._levels[level].fresh
            while fresh:
                head = next(iter(fresh.values()))
                if now < head.arrived_s + after_s:
                    break
                self._levels[level].remove(head)
                self._entries += 1
                head.level, head.entry = RequestClass(level + 1), self._entries
                self._levels[head.level].add(head)
                lifted = True
        return lifted

    def oldest(self) -> Waiting | None:
        """Who has waited longest."""
        heads = (next(iter(q.values())) for level in self._levels for q in (level.fresh, level.lifted) if q)
        return min(heads, key=lambda waiting: waiting.arrived_s, default=None)

    def past_deadline(self, now: float) -> Waiting | None:
        """Somebody whose deadline has passed."""
        top = self._deadlines.peek()
        return None if top is None or now < top[0][0] else self._all[top[1]]

    def next_due(self) -> float | None:
        """When the next deadline passes or the next request is lifted."""
        dues = [] if (top := self._deadlines.peek()) is None else [top[0][0]]
        for level, after_s in enumerate(self._lift_after_s):
            if fresh := self._levels[level].fresh:
                dues.append(next(iter(fresh.values())).arrived_s + after_s)
        return min(dues, default=None)

    def slots_from(self, level: RequestClass) -> int:
        """Slots wanted by all who wait at this level and above."""
        return sum(self._levels[upper].slots for upper in range(level, len(self._levels)))

    def claimed(self) -> dict[RequestClass, int]:
        """How many wait, by the class they claimed."""
        above = [len(level.lifted) for level in self._levels[1:]] + [0]
        return {level: len(self._levels[level].fresh) + above[level] for level in RequestClass}

    def lifted(self) -> int:
        """How many of those who wait have been lifted."""
        return sum(len(level.lifted) for level in self._levels)
