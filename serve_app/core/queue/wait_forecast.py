"""How long a request will wait: the backlog before it divided by the rate at which that drains.

The backlog of a request: all requests of higher classes, the earlier ones of its own tenant, and of each other tenant
in its class those that fair order serves meanwhile: for each slot of its own tenant the slots that the others' weights
give them, at most those that they wait for. So a light tenant's forecast does not grow with a heavy tenant's queue. By
the minimum share of its class the higher classes do not count; the shorter of both waits is the forecast. Guaranteed
shares of tenants and later arrivals are ignored. All figures are None until something is measured.

If KV tokens are scarcer than slots, not all slots can be busy: as many are counted as the KV tokens allow at the
present mean of tokens per slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.drain_rate import DrainRate
from serve_app.core.queue.events import QueueStatus
from serve_app.core.queue.queue import RequestQueue
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.types import RequestClass


class Backlog(NamedTuple):
    """The backlog before an arrival of a class, in slots, and the rate at which it drains.

    Args:
        slots_above: slots that requests of higher classes wait for.
        slots: slots that requests of its own class wait for.
        waiting_weight: sum of the weights of the waiting tenants in its class.
        free_slots: slots that could be granted to its class now.
        slots_per_s: slots that come free for its class while all are busy; None: not measured.
        min_share_slots_per_s: slots per second that the minimum share gives its class.
    """

    slots_above: int
    slots: int
    waiting_weight: float
    free_slots: float
    slots_per_s: float | None
    min_share_slots_per_s: float = 0.0

    def arrival_wait_s(self, slots: int, tenant_slots: int, weight: float) -> float | None:
        """Seconds for a new request of `slots` whose tenant, of this weight, waits for `tenant_slots` already."""
        others = self.waiting_weight - weight if tenant_slots else self.waiting_weight
        return self.tenant_wait_s(tenant_slots + slots, weight, self.slots - tenant_slots, others)

    def tenant_wait_s(self, tenant_slots: int, weight: float, other_slots: int, other_weight: float) -> float | None:
        """Seconds until a tenant is granted `tenant_slots` while the class's other tenants wait for `other_slots`."""
        return self.wait_s(tenant_slots + _served_before(other_slots, tenant_slots * other_weight / weight))

    def wait_behind_class_s(self, slots: int) -> float | None:
        """Seconds for a request of `slots` behind all requests of the class."""
        return self.wait_s(self.slots + slots)

    def wait_s(self, work: float) -> float | None:
        """Seconds until `work` slots have come free for the class."""
        if self.slots_per_s is None:
            return None
        wait_s = max(0.0, self.slots_above + work - self.free_slots) / self.slots_per_s
        return (
            min(wait_s, work / self.min_share_slots_per_s)
            if self.min_share_slots_per_s and self.slots_above
            else wait_s
        )


class WaitForecast:
    """Waits in seconds. O(log n) per method.

    Args:
        min_share: gives the minimum share of a class.
        guard_slots: gives the free slots that a class may not take.
    """

    def __init__(
        self,
        queue: RequestQueue,
        capacity: Capacity,
        drain_rate: DrainRate,
        min_share: Callable[[], float],
        guard_slots: Callable[[RequestClass], int] = lambda _: 0,
    ) -> None:
        self._queue, self._capacity, self._drain_rate, self._min_share, self._guard_slots = (
            queue,
            capacity,
            drain_rate,
            min_share,
            guard_slots,
        )

    def arrival_wait_s(
        self, request_class: RequestClass, slots: int, tenant: str | None, weight: float
    ) -> float | None:
        """The wait of a request that arrives now; without a tenant: behind all requests of its class."""
        class_queue, backlog = self._queue.class_queues[request_class], self.backlog(request_class)
        nobody = not (backlog.slots_above or backlog.slots)
        if (
            nobody
            and slots <= self._capacity.most_free_slots
            and self._capacity.free > self._guard_slots(request_class)
        ):
            return 0.0
        if tenant is None:
            return backlog.wait_behind_class_s(slots)
        tenant_queue = class_queue.tenant_queues.get(tenant)
        return backlog.arrival_wait_s(slots, 0 if tenant_queue is None else tenant_queue.slots, weight)

    def backlog(self, request_class: RequestClass) -> Backlog:
        """The backlog before an arrival of a class."""
        class_queue, capacity, drain = self._queue.class_queues[request_class], self._capacity, self._drain_rate
        slots, kept = self._usable_slots(), self._guard_slots(request_class)
        free: float = max(0, capacity.free - kept)
        if slots < capacity.slots:
            free = min(free, max(0.0, slots - capacity.used))
        rate = drain.slots_per_s_left_to(request_class, max(1.0, slots - kept) if kept else slots)
        least = self._min_share() * (drain.slots_per_s(slots) or 0.0)
        return Backlog(self._slots_above(request_class), class_queue.slots, class_queue.weight, free, rate, least)

    def is_only_candidate(self, waiting: QueuedRequest) -> bool:
        """Whether no other request waits in its class or above, so that it gets the next free slot."""
        return self._queue.class_queues[waiting.queue_class].size == 1 and not self._slots_above(waiting.queue_class)

    def newest_wait_s(self, waiting: QueuedRequest) -> float | None:
        """The wait of a request that has just arrived, and so is the last of its tenant."""
        level = self._queue.class_queues[waiting.queue_class]
        tenant_queue = level.tenant_queues[waiting.arrival.tenant]
        backlog = self.backlog(waiting.queue_class)
        return backlog.tenant_wait_s(
            tenant_queue.slots,
            tenant_queue.weight,
            level.slots - tenant_queue.slots,
            level.weight - tenant_queue.weight,
        )

    def status(self, waiting: QueuedRequest) -> QueueStatus:
        """Position and expected start of a waiting request."""
        level = self._queue.class_queues[waiting.queue_class]
        tenant_queue = level.tenant_queues[waiting.arrival.tenant]
        own = tenant_queue.order.rank(waiting.order_key) + 1
        others = level.size - len(tenant_queue.requests)
        ahead = own - 1 + int(_served_before(others, own * (level.weight - tenant_queue.weight) / tenant_queue.weight))
        start_s = self.backlog(waiting.queue_class).wait_s(ahead * level.slots / level.size + waiting.slots)
        return QueueStatus(
            waiting.request_id, waiting.queue_class, self._requests_above(waiting.queue_class) + ahead + 1, start_s
        )

    def slots_per_s(self, request_class: RequestClass | None = None) -> float | None:
        """Slots per second that come free while all are busy; with a class, those that higher classes leave to it."""
        slots = self._usable_slots()
        return (
            self._drain_rate.slots_per_s(slots)
            if request_class is None
            else self._drain_rate.slots_per_s_left_to(request_class, slots)
        )

    def _usable_slots(self) -> float:
        capacity = self._capacity
        if not capacity.kv_used or math.isinf(capacity.kv_tokens):
            return capacity.slots
        return min(capacity.slots, capacity.kv_tokens * capacity.used / capacity.kv_used)

    def _slots_above(self, request_class: RequestClass) -> int:
        return sum(class_queue.slots for class_queue in self._queue.class_queues[request_class + 1 :])

    def _requests_above(self, request_class: RequestClass) -> int:
        return sum(class_queue.size for class_queue in self._queue.class_queues[request_class + 1 :])


def _served_before(others: int, fair: float) -> float:
    """How much of the other tenants' demand is served before, at fair order."""
    return max(0.0, min(others, fair))
