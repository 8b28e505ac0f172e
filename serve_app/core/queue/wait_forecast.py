"""How long a wait is going to be, from what stands before it and how fast that drains.

Before a request stand all of the classes above, its own tenant's earlier ones, and of every other tenant in its class
as much as fair order lets pass meanwhile: for each slot of its own tenant the slots that the others' weights give them,
and no more than they want. So a light tenant's forecast does not grow with a heavy one's queue. By the minimum share of
its class the classes above do not stand before it; the shorter of the two waits counts. Guaranteed shares of tenants
and whoever arrives later are left out: it is a forecast, and all figures are None until something is measured.

Where KV tokens are what is short, not all slots can be busy: as many are counted as the tokens allow at the present
mean of tokens per slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.drain_rate import DrainRate
from serve_app.core.queue.events import QueueStatus
from serve_app.core.queue.queue import Line
from serve_app.core.queue.tenant_queue import Waiting
from serve_app.types import RequestClass


class Backlog(NamedTuple):
    """What stands before a newcomer of a class, in slots, and how fast that drains.

    Args:
        above: that the classes above want.
        slots: that its own class wants.
        weight: of the tenants who wait in its class.
        free: that could be granted to its class now.
        slots_per_s: that come free for its class while all are busy; None: not measured.
        least_per_s: of the slots that come free, those that the minimum share of its class gives it.
    """

    above: int
    slots: int
    weight: float
    free: float
    slots_per_s: float | None
    least_per_s: float = 0.0

    def newcomer_s(self, slots: int, own: int, weight: float) -> float | None:
        """The wait in seconds of a request of so many slots whose tenant, of this weight, has `own` slots waiting."""
        others = self.weight - weight if own else self.weight
        return self.tenant_s(own + slots, weight, self.slots - own, others)

    def tenant_s(self, own: int, weight: float, others: int, others_weight: float) -> float | None:
        """The wait until a tenant has had so many slots, beside others of the class who want theirs."""
        return self.wait_s(own + _passing(others, own * others_weight / weight))

    def last_s(self, slots: int) -> float | None:
        """The same behind everybody of the class."""
        return self.wait_s(self.slots + slots)

    def wait_s(self, work: float) -> float | None:
        """Seconds until so many slots have come free for its class."""
        if self.slots_per_s is None:
            return None
        wait_s = max(0.0, self.above + work - self.free) / self.slots_per_s
        return min(wait_s, work / self.least_per_s) if self.least_per_s and self.above else wait_s


class Forecast:
    """Waits in seconds. O(log n) per method.

    Args:
        share: the minimum share of a class.
        kept: the free slots that a class may not take.
    """

    def __init__(
        self,
        line: Line,
        capacity: Capacity,
        drain: DrainRate,
        share: Callable[[], float],
        kept: Callable[[RequestClass], int] = lambda _: 0,
    ) -> None:
        self._line, self._capacity, self._drain, self._share, self._kept = line, capacity, drain, share, kept

    def newcomer_s(self, level: RequestClass, slots: int, tenant: str | None, weight: float) -> float | None:
        """The wait of a request that comes now; without a tenant, behind everybody of its class."""
        stage, backlog = self._line.stages[level], self.backlog(level)
        nobody = not (backlog.above or backlog.slots)
        if nobody and slots <= self._capacity.most_free and self._capacity.free > self._kept(level):
            return 0.0
        if tenant is None:
            return backlog.last_s(slots)
        lane = stage.lanes.get(tenant)
        return backlog.newcomer_s(slots, 0 if lane is None else lane.slots, weight)

    def backlog(self, level: RequestClass) -> Backlog:
        """What stands before a newcomer of a class."""
        stage, capacity, drain = self._line.stages[level], self._capacity, self._drain
        slots, kept = self._usable(), self._kept(level)
        free: float = max(0, capacity.free - kept)
        if slots < capacity.slots:
            free = min(free, max(0.0, slots - capacity.used))
        rate = drain.left_slots_per_s(level, max(1.0, slots - kept) if kept else slots)
        least = self._share() * (drain.slots_per_s(slots) or 0.0)
        return Backlog(self._above(level), stage.slots, stage.weight, free, rate, least)

    def is_next(self, waiting: Waiting) -> bool:
        """Whether nobody else waits at its level or above, so that it takes whatever comes free."""
        return self._line.stages[waiting.level].size == 1 and not self._above(waiting.level)

    def last_of_tenant_s(self, waiting: Waiting) -> float | None:
        """The wait of a request that has just come, and so is the last of its tenant."""
        level = self._line.stages[waiting.level]
        lane = level.lanes[waiting.arrival.tenant]
        backlog = self.backlog(waiting.level)
        return backlog.tenant_s(lane.slots, lane.weight, level.slots - lane.slots, level.weight - lane.weight)

    def status(self, waiting: Waiting) -> QueueStatus:
        """Where a request stands among those who wait."""
        level = self._line.stages[waiting.level]
        lane = level.lanes[waiting.arrival.tenant]
        own = lane.ranks.rank(waiting.entry) + 1
        others = level.size - len(lane.waiting)
        ahead = own - 1 + int(_passing(others, own * (level.weight - lane.weight) / lane.weight))
        start_s = self.backlog(waiting.level).wait_s(ahead * level.slots / level.size + waiting.slots)
        return QueueStatus(waiting.request_id, waiting.level, self._count_above(waiting.level) + ahead + 1, start_s)

    def slots_per_s(self, level: RequestClass | None = None) -> float | None:
        """Slots that come free while all are busy; of a level, what the classes above leave to it."""
        slots = self._usable()
        return self._drain.slots_per_s(slots) if level is None else self._drain.left_slots_per_s(level, slots)

    def _usable(self) -> float:
        capacity = self._capacity
        if not capacity.kv_used or math.isinf(capacity.kv_tokens):
            return capacity.slots
        return min(capacity.slots, capacity.kv_tokens * capacity.used / capacity.kv_used)

    def _above(self, level: RequestClass) -> int:
        return sum(stage.slots for stage in self._line.stages[level + 1 :])

    def _count_above(self, level: RequestClass) -> int:
        return sum(stage.size for stage in self._line.stages[level + 1 :])


def _passing(others: int, fair: float) -> float:
    """How much of what other tenants want goes before."""
    return max(0.0, min(others, fair))
