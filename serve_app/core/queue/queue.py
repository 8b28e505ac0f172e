"""The waiting requests of one model, indexed by id, class and tenant (`core.queue.class_queue`), age and deadline.

Invariant: a request is in every index or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.evictable import EvictableRequests
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.types import RequestClass

_HIGHEST_FIRST = tuple(sorted(RequestClass, reverse=True))


class RequestQueue:
    """The waiting requests. O(log n) to add, remove and find the next.

    Args:
        weight: gives the weight of a tenant.
        below_share: tells whether a tenant is below its guaranteed share.
    """

    def __init__(self, weight: Callable[[str], float], below_share: Callable[[str], bool]) -> None:
        self._weight, self._below_share = weight, below_share
        self.class_queues = [ClassQueue() for _ in RequestClass]
        self.evictable = [EvictableRequests() for _ in RequestClass]
        self._by_id: dict[str, QueuedRequest] = {}
        self._by_age = KeyedHeap()
        self._by_deadline = KeyedHeap()
        self._arrival_count = 0
        self.tokens = 0
        self.count_by_class = dict.fromkeys(RequestClass, 0)  # waiting requests by class
        self.tokens_by_class = dict.fromkeys(RequestClass, 0)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> QueuedRequest | None:
        return self._by_id.get(request_id)

    def add(self, arrival: Arrival, arrived_s: float) -> QueuedRequest:
        """Add a request whose id does not wait yet to its tenant queue, ordered by age."""
        claimed, tenant = arrival.request_class, arrival.tenant
        self._arrival_count += 1
        waiting = QueuedRequest(arrival, arrived_s, self._arrival_count)
        self._by_id[arrival.request_id] = waiting
        self._by_age.set(arrival.request_id, waiting.order_key)
        weight = self._weight(tenant)
        self.class_queues[claimed].add(waiting, weight, self._below_share(tenant))
        self.evictable[claimed].add(waiting, weight)
        if arrival.deadline is not None:
            self._by_deadline.set(arrival.request_id, (arrival.deadline, waiting.arrival_number))
        self.tokens += arrival.cost
        self.count_by_class[claimed] += 1
        self.tokens_by_class[claimed] += arrival.cost
        return waiting

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Remove a request; None if it does not wait."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is None:
            return None
        claimed = waiting.arrival.request_class
        self._by_age.discard(request_id)
        self.evictable[claimed].remove(waiting)
        self.class_queues[claimed].remove(waiting)
        self._by_deadline.discard(request_id)
        self.tokens -= waiting.cost
        self.count_by_class[claimed] -= 1
        self.tokens_by_class[claimed] -= waiting.cost
        return waiting

    def waiting_classes(self) -> Iterator[RequestClass]:
        """The classes with waiting requests, the highest first."""
        return (level for level in _HIGHEST_FIRST if self.class_queues[level].size)

    def oldest(self) -> QueuedRequest | None:
        """The request that has waited longest."""
        top = self._by_age.peek()
        return None if top is None else self._by_id[top[1]]

    def first_past_deadline(self, now: float) -> QueuedRequest | None:
        """The request with the earliest deadline, if that has passed."""
        top = self._by_deadline.peek()
        return None if top is None or now < top[0][0] else self._by_id[top[1]]

    def next_deadline(self) -> float | None:
        """The earliest deadline; None if no request has one."""
        top = self._by_deadline.peek()
        return None if top is None else top[0][0]

    def set_below_share(self, tenant: str, below_share: bool) -> None:
        """Set whether a tenant is below its guaranteed share."""
        for level in self.class_queues:
            level.set_below_share(tenant, below_share)

    def refresh_weights(self) -> None:
        """Read all weights again. O(tenants)."""
        for level, sheddable in zip(self.class_queues, self.evictable, strict=True):
            level.set_weights(self._weight)
            sheddable.set_weights(self._weight)
