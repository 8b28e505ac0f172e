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
from bisect import bisect_left
from typing import NamedTuple

from serve_app.core.messages import message
from serve_app.core.queue.events import QueueStatus
from serve_app.core.queue.scheduler import Scheduler
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.types import RequestClass


@message
class Backlog(NamedTuple):
    """The backlog before an arrival of a class, in slots, and the rate at which it drains.

    Args:
        slots_above: slots that requests of higher classes wait for.
        slots: slots that requests of its own class wait for.
        waiting_weight: sum of the weights of the waiting tenants in its class.
        free_slots: slots that could be granted to its class now, or come free for it by preemption.
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

    def wait_s(self, work: float) -> float | None:
        """Seconds until `work` slots have come free for the class."""
        if not self.slots_per_s:  # not measured, or faded to nothing
            return None
        wait_s = max(0.0, self.slots_above + work - self.free_slots) / self.slots_per_s
        if self.min_share_slots_per_s and self.slots_above:
            wait_s = min(wait_s, work / self.min_share_slots_per_s)
        return wait_s


class WaitForecast:
    """Waits in seconds. O(log n) per method."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._class_queues = scheduler.queue.class_queues
        self._capacity = scheduler.capacity

    def arrival_wait_s(self, request_class: RequestClass, slots: int, tenant: str) -> float | None:
        """The wait of a request that arrives now; None: nothing measured yet."""
        backlog = self.backlog(request_class)
        capacity = self._capacity
        is_next = not (backlog.slots_above or backlog.slots)
        if is_next and slots <= capacity.most_free_slots and capacity.free > self._scheduler.guard_slots(request_class):
            return 0.0
        tenant_queue = self._class_queues[request_class].tenant_queues.get(tenant)
        own_slots = 0 if tenant_queue is None else tenant_queue.slots
        return backlog.arrival_wait_s(slots, own_slots, self._scheduler.policy.weight(tenant))

    def backlog(self, request_class: RequestClass) -> Backlog:
        """The backlog before an arrival of a class; while requests wait, its waits equal `arrival_wait_s`."""
        class_queue = self._class_queues[request_class]
        capacity = self._capacity
        drain = self._scheduler.drain_rate
        slots = self._usable_slots()
        kept = self._scheduler.guard_slots(request_class)
        free: float = max(0, capacity.free - kept)
        if slots < capacity.slots:
            free = min(free, max(0.0, slots - capacity.used))
        free += self._scheduler.preemption.slots_below(request_class)
        rate = drain.slots_per_s_left_to(request_class, max(1.0, slots - kept) if kept else slots)
        least = self._scheduler.policy.min_share * (drain.slots_per_s(slots) or 0.0)
        above = sum(higher.slots for higher in self._class_queues[request_class + 1 :])
        return Backlog(above, class_queue.slots, class_queue.weight, free, rate, least)

    def newest_wait_s(self, waiting: QueuedRequest) -> float | None:
        """The wait of a request that has just arrived, and so is the last of its tenant."""
        class_queue = self._class_queues[waiting.arrival.request_class]
        tenant_queue = class_queue.tenant_queues[waiting.arrival.tenant]
        other_slots = class_queue.slots - tenant_queue.slots
        other_weight = class_queue.weight - tenant_queue.weight
        backlog = self.backlog(waiting.arrival.request_class)
        return backlog.tenant_wait_s(tenant_queue.slots, tenant_queue.weight, other_slots, other_weight)

    def status(self, waiting: QueuedRequest) -> QueueStatus:
        """Position and expected start of a waiting request."""
        level = waiting.arrival.request_class
        class_queue = self._class_queues[level]
        tenant_queue = class_queue.tenant_queues[waiting.arrival.tenant]
        own = bisect_left(tenant_queue.order, waiting.order_key) + 1
        others = class_queue.size - len(tenant_queue.order)
        other_weight = class_queue.weight - tenant_queue.weight
        ahead = own - 1 + int(_served_before(others, own * other_weight / tenant_queue.weight))
        start_s = self.backlog(level).wait_s(ahead * class_queue.slots / class_queue.size + waiting.slots)
        above = sum(higher.size for higher in self._class_queues[level + 1 :])
        return QueueStatus(waiting.arrival.request_id, level, above + ahead + 1, start_s)

    def slots_per_s(self, request_class: RequestClass) -> float | None:
        """Slots per second that come free while all are busy and that the classes above leave to this one."""
        return self._scheduler.drain_rate.slots_per_s_left_to(request_class, self._usable_slots())

    def _usable_slots(self) -> float:
        capacity = self._capacity
        if not capacity.kv_used or math.isinf(capacity.kv_tokens):
            return capacity.slots
        return min(capacity.slots, capacity.kv_tokens * capacity.used / capacity.kv_used)


def _served_before(others: int, fair: float) -> float:
    """How much of the other tenants' demand is served before, at fair order."""
    return max(0.0, min(others, fair))
