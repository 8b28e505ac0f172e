"""Who waits, in which order, and what is due when: classes, and tenants inside each (`core.waiting.level`).

A level is the class claimed, or, once a request has waited its class's bound, the class above; it enters there at the
end of its tenant's requests, since the batch that has aged must not push in front of people who wait already. It is
lifted once: a batch request never reaches the classes of people in a hurry. Being lifted is about the class above, not
about its own: as long as nobody else waits up there, fair order between its class's tenants holds (`.running`).

Invariant: a request is in every index or in none; what has left leaves nothing behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from serve_app.core.heap import KeyedHeap
from serve_app.core.waiting.events import Arrival
from serve_app.core.waiting.level import Level, Waiting
from serve_app.core.waiting.shedding import Sheddable
from serve_app.types import RequestClass

_DOWN = tuple(sorted(RequestClass, reverse=True))


class Line:
    """The requests that wait. O(log n) to add, remove and find the next.

    Args:
        lift_after_s: the wait in seconds after which a request is lifted, for every class but the highest, from the
            lowest class up; not longer for a higher class.
        weight: of a tenant.
        owed: whether a tenant is below its guaranteed share.
    """

    def __init__(
        self, lift_after_s: tuple[float, ...], weight: Callable[[str], float], owed: Callable[[str], bool]
    ) -> None:
        self._lift_after_s = lift_after_s
        self._weight, self._owed = weight, owed
        self.stages = [Level() for _ in RequestClass]
        self.sheddable = [Sheddable() for _ in RequestClass]
        self._all: OrderedDict[str, Waiting] = OrderedDict()  # by arrival; a dict's first is O(n) after many removals
        self._fresh: list[OrderedDict[str, Waiting]] = [OrderedDict() for _ in self._lift_after_s]  # not lifted yet
        self._deadlines = KeyedHeap()
        self._entries = 0
        self.tokens = 0
        self.lifted = 0  # of those who wait
        self.own = dict.fromkeys(RequestClass, 0)  # how many wait in the level they claimed
        self.claimed = dict.fromkeys(RequestClass, 0)  # how many wait, by the class they claimed
        self.claimed_tokens = dict.fromkeys(RequestClass, 0)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def get(self, request_id: str) -> Waiting | None:
        return self._all.get(request_id)

    def add(self, arrival: Arrival, now: float) -> Waiting:
        """Put a request at the end of its tenant's in its class. ValueError: its id waits already."""
        if arrival.request_id in self._all:
            raise ValueError(f"{arrival.request_id!r} waits already")
        claimed = arrival.request_class
        waiting = Waiting(arrival, now, claimed, 0)
        self._all[arrival.request_id] = waiting
        if claimed < len(self._fresh):
            self._fresh[claimed][arrival.request_id] = waiting
        self._enter(waiting, claimed)
        if arrival.deadline is not None:
            self._deadlines.set(arrival.request_id, (arrival.deadline, waiting.entry))
        self.tokens += arrival.cost
        self.claimed[claimed] += 1
        self.claimed_tokens[claimed] += arrival.cost
        return waiting

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out; None if it does not wait."""
        waiting = self._all.pop(request_id, None)
        if waiting is None:
            return None
        claimed = waiting.arrival.request_class
        if waiting.lifted:
            self.lifted -= 1
        elif claimed < len(self._fresh):
            del self._fresh[claimed][request_id]
        self._leave(waiting)
        self._deadlines.discard(request_id)
        self.tokens -= waiting.cost
        self.claimed[claimed] -= 1
        self.claimed_tokens[claimed] -= waiting.cost
        return waiting

    def levels(self) -> Iterator[RequestClass]:
        """Levels in which somebody waits, the highest first."""
        return (level for level in _DOWN if self.stages[level].size)

    def lift(self, now: float) -> bool:
        """Lift everyone whose wait has reached the bound; whether there was anyone."""
        lifted = False
        for fresh, after_s in zip(self._fresh, self._lift_after_s, strict=True):
            while fresh:
                head = next(iter(fresh.values()))
                if now < head.arrived_s + after_s:
                    break
                del fresh[head.request_id]
                self._leave(head)
                self._enter(head, RequestClass(head.level + 1))
                self.lifted += 1
                lifted = True
        return lifted

    def oldest(self) -> Waiting | None:
        """Who has waited longest."""
        return next(iter(self._all.values()), None)

    def past_deadline(self, now: float) -> Waiting | None:
        """Somebody whose deadline has passed."""
        top = self._deadlines.peek()
        return None if top is None or now < top[0][0] else self._all[top[1]]

    def next_due(self) -> float | None:
        """When the next deadline passes or the next request is lifted."""
        dues = [] if (top := self._deadlines.peek()) is None else [top[0][0]]
        for fresh, after_s in zip(self._fresh, self._lift_after_s, strict=True):
            if fresh:
                dues.append(next(iter(fresh.values())).arrived_s + after_s)
        return min(dues, default=None)

    def set_owed(self, tenant: str, owed: bool) -> None:
        """A tenant has come below its guaranteed share, or has it now."""
        for level in self.stages:
            level.set_owed(tenant, owed)

    def reweigh(self) -> None:
        """Weights have changed. O(tenants)."""
        for level, sheddable in zip(self.stages, self.sheddable, strict=True):
            level.reweigh(self._weight)
            sheddable.reweigh(self._weight)

    def _enter(self, waiting: Waiting, level: RequestClass) -> None:
        self._entries += 1
        waiting.level, waiting.entry = level, self._entries
        tenant = waiting.arrival.tenant
        weight = self._weight(tenant)
        self.own[level] += not waiting.lifted
        self.stages[level].add(waiting, weight, self._owed(tenant))
        self.sheddable[level].add(waiting, weight)

    def _leave(self, waiting: Waiting) -> None:
        self.own[waiting.level] -= not waiting.lifted
        self.sheddable[waiting.level].remove(waiting)
        self.stages[waiting.level].remove(waiting)
