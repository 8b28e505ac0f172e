"""The second admission's memory of what happened to the slots, and the waits that it foresees from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.core.queue.reference_admission import Reference
    from tests.core.queue.reference_request import Request

FADE_S = 60.0
CLASSES = 4
MOST_ABOVE = 0.95


@dataclass
class History:
    """All that ever happened to the slots; the fading sums are taken over all of it each time."""

    segments: list[tuple[float, float, int, int]] = field(default_factory=list)  # from, to, busy, slots
    releases: list[tuple[float, int]] = field(default_factory=list)
    grants: list[tuple[float, int, int]] = field(default_factory=list)  # when, level, slots

    def busy_time(self, since: float) -> float:
        return sum(end - max(start, since) for start, end, busy, _ in self.segments if busy and end > since)

    def measured(self) -> bool:
        """Whether by some release as many slots had been released as were busy at once until then."""
        ended = 0
        for at, n in self.releases:
            ended += n
            most = max((busy for start, end, busy, _ in self.segments if start < end <= at), default=0)
            if most and ended >= most:
                return True
        return False

    def rate(self, now: float, level: int, slots: float) -> float | None:
        released = sum(n * math.exp(-self.busy_time(at) / FADE_S) for at, n in self.releases)
        busy_slot_s = sum(
            busy * FADE_S * (math.exp(-self.busy_time(end) / FADE_S) - math.exp(-self.busy_time(start) / FADE_S))
            for start, end, busy, _ in self.segments
            if busy
        )
        if not self.measured() or released <= 0 or busy_slot_s <= 0 or slots == 0:
            return None
        all_slot_s = sum(
            n * FADE_S * (math.exp((end - now) / FADE_S) - math.exp((start - now) / FADE_S))
            for start, end, _, n in self.segments
        )
        above = sum(n * math.exp((at - now) / FADE_S) for at, of, n in self.grants if of > level)
        possible = released / busy_slot_s * all_slot_s
        share = min(MOST_ABOVE, above / possible) if possible > 0 else 0.0
        return slots * released / busy_slot_s * (1 - share)

    def wait(self, queue: Reference, level: int, work: float) -> float | None:
        """Until so many slots have come free for a level, beside those that the ones above want."""
        above = sum(r.slots for r in queue.waiting() if r.level > level)
        slots: float = sum(queue.slots.values())
        free: float = sum(queue.free(replica) for replica in queue.slots)
        kv = sum(queue.tokens[replica] for replica, count in queue.slots.items() if count)
        running = queue.running()
        if running and not math.isinf(kv):
            room = kv * sum(r.slots for r in running) / sum(r.cost for r in running)
            if room < slots:
                slots = room
                free = min(free, max(0.0, room - sum(r.slots for r in running)))
        rate = self.rate(queue.now, level, slots)
        whole = self.rate(queue.now, CLASSES, slots)
        if rate is None or whole is None:
            return None
        wait = max(0.0, above + work - free) / rate
        least = queue.policy.min_share * whole
        return min(wait, work / least) if above and least else wait

    def ahead(self, queue: Reference, level: int, tenant: str, own: int, in_slots: bool) -> float:
        """What stands before and with a tenant's `own` first ones in its level, in slots or in requests."""
        waits = queue.waiting(level)
        others = [r for r in waits if r.tenant != tenant]
        weights = sum(queue.policy.weight(name) for name in {r.tenant for r in others})
        wanted = sum(r.slots if in_slots else 1 for r in others)
        return own + min(wanted, own * weights / queue.policy.weight(tenant))

    def wait_behind(self, queue: Reference, request: Request) -> float | None:
        """Of a request that has just come, itself with it."""
        own = sum(r.slots for r in queue.waiting(request.level) if r.tenant == request.tenant)
        return self.wait(queue, request.level, self.ahead(queue, request.level, request.tenant, own, True))

    def wait_of_newcomer(self, queue: Reference, level: int, tenant: str) -> float | None:
        """Of a request for one slot that is not there yet."""
        own = sum(r.slots for r in queue.waiting(level) if r.tenant == tenant)
        work = self.ahead(queue, level, tenant, own + 1, True)
        nobody = not any(r.level > level for r in queue.waiting())
        if work == 1 and nobody and any(queue.free(replica) and queue.free_tokens(replica) for replica in queue.slots):
            return 0.0
        return self.wait(queue, level, work)

    def position(self, queue: Reference, request: Request) -> int:
        of_tenant = [r for r in queue.waiting(request.level) if r.tenant == request.tenant]
        own = sum((r.arrived, r.number) <= (request.arrived, request.number) for r in of_tenant)
        above = sum(r.level > request.level for r in queue.waiting())
        return above + math.floor(self.ahead(queue, request.level, request.tenant, own, False))
