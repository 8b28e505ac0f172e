"""Who waits, in which order, and what is due when: classes, and tenants inside each (`core.queue.class_queue`).

Invariant: a request is in every index or in none; what has left leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.class_queue import Level
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.evictable import Sheddable
from serve_app.core.queue.tenant_queue import Waiting
from serve_app.types import RequestClass

_DOWN = tuple(sorted(RequestClass, reverse=True))


class Line:
    """The requests that wait. O(log n) to add, remove and find the next.

    Args:
        weight: of a tenant.
        owed: whether a tenant is below its guaranteed share.
    """

    def __init__(self, weight: Callable[[str], float], owed: Callable[[str], bool]) -> None:
        self._weight, self._owed = weight, owed
        self.stages = [Level() for _ in RequestClass]
        self.sheddable = [Sheddable() for _ in RequestClass]
        self._all: dict[str, Waiting] = {}
        self._ages = KeyedHeap()
        self._deadlines = KeyedHeap()
        self._arrivals = 0
        self.tokens = 0
        self.claimed = dict.fromkeys(RequestClass, 0)  # how many wait, by class
        self.claimed_tokens = dict.fromkeys(RequestClass, 0)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def get(self, request_id: str) -> Waiting | None:
        return self._all.get(request_id)

    def add(self, arrival: Arrival, arrived_s: float) -> Waiting:
        """Put a request, whose id does not wait already, among its tenant's in its class, by its age."""
        claimed, tenant = arrival.request_class, arrival.tenant
        self._arrivals += 1
        waiting = Waiting(arrival, arrived_s, self._arrivals)
        self._all[arrival.request_id] = waiting
        self._ages.set(arrival.request_id, waiting.entry)
        weight = self._weight(tenant)
        self.stages[claimed].add(waiting, weight, self._owed(tenant))
        self.sheddable[claimed].add(waiting, weight)
        if arrival.deadline is not None:
            self._deadlines.set(arrival.request_id, (arrival.deadline, waiting.number))
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
        self._ages.discard(request_id)
        self.sheddable[claimed].remove(waiting)
        self.stages[claimed].remove(waiting)
        self._deadlines.discard(request_id)
        self.tokens -= waiting.cost
        self.claimed[claimed] -= 1
        self.claimed_tokens[claimed] -= waiting.cost
        return waiting

    def levels(self) -> Iterator[RequestClass]:
        """Levels in which somebody waits, the highest first."""
        return (level for level in _DOWN if self.stages[level].size)

    def oldest(self) -> Waiting | None:
        """Who has waited longest."""
        top = self._ages.peek()
        return None if top is None else self._all[top[1]]

    def past_deadline(self, now: float) -> Waiting | None:
        """Somebody whose deadline has passed."""
        top = self._deadlines.peek()
        return None if top is None or now < top[0][0] else self._all[top[1]]

    def next_deadline(self) -> float | None:
        """When the next deadline passes."""
        top = self._deadlines.peek()
        return None if top is None else top[0][0]

    def set_owed(self, tenant: str, owed: bool) -> None:
        """A tenant has come below its guaranteed share, or has it now."""
        for level in self.stages:
            level.set_owed(tenant, owed)

    def reweigh(self) -> None:
        """Weights have changed. O(tenants)."""
        for level, sheddable in zip(self.stages, self.sheddable, strict=True):
            level.reweigh(self._weight)
            sheddable.reweigh(self._weight)
