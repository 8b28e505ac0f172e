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

    def wait(self, line: Reference, level: int, work: float) -> float | None:
        """Until so many slots have come free for a level, beside those that the ones above want."""
        above = sum(r.slots for r in line.waiting() if r.level > level)
        slots: float = sum(line.slots.values())
        free: float = sum(line.free(replica) for replica in line.slots)
        kv = sum(line.tokens[replica] for replica, count in line.slots.items() if count)
        running = line.running()
        if running and not math.isinf(kv):
            room = kv * sum(r.slots for r in running) / sum(r.cost for r in running)
            if room < slots:
                slots = room
                free = min(free, max(0.0, room - sum(r.slots for r in running)))
        rate = self.rate(line.now, level, slots)
        whole = self.rate(line.now, CLASSES, slots)
        if rate is None or whole is None:
            return None
        wait = max(0.0, above + work - free) / rate
        least = line.policy.min_share * whole
        return min(wait, work / least) if above and least else wait

    def ahead(self, line: Reference, level: int, tenant: str, own: int, in_slots: bool) -> float:
        """What stands before and with a tenant's `own` first ones in its level, in slots or in requests."""
        waits = line.waiting(level)
        others = [r for r in waits if r.tenant != tenant]
        weights = sum(line.policy.weight(name) for name in {r.tenant for r in others})
        wanted = sum(r.slots if in_slots else 1 for r in others)
        return own + min(wanted, own * weights / line.policy.weight(tenant))

    def wait_behind(self, line: Reference, request: Request) -> float | None:
        """Of a request that has just come, itself with it."""
        own = sum(r.slots for r in line.waiting(request.level) if r.tenant == request.tenant)
        return self.wait(line, request.level, self.ahead(line, request.level, request.tenant, own, True))

    def wait_of_newcomer(self, line: Reference, level: int, tenant: str) -> float | None:
        """Of a request for one slot that is not there yet."""
        own = sum(r.slots for r in line.waiting(level) if r.tenant == tenant)
        work = self.ahead(line, level, tenant, own + 1, True)
        nobody = not any(r.level > level for r in line.waiting())
        if work == 1 and nobody and any(line.free(replica) and line.free_tokens(replica) for replica in line.slots):
            return 0.0
        return self.wait(line, level, work)

    def position(self, line: Reference, request: Request) -> int:
        mine = [r for r in line.waiting(request.level) if r.tenant == request.tenant]
        own = sum((r.arrived, r.number) <= (request.arrived, request.number) for r in mine)
        above = sum(r.level > request.level for r in line.waiting())
        return above + math.floor(self.ahead(line, request.level, request.tenant, own, False))
