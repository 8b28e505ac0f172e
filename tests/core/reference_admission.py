"""Admission written a second time, as plainly as possible: lists, full scans, everything computed anew at every step.

It shares no code with `serve_app.core` beyond the event values. Slow on purpose; the property tests compare against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from serve_app.core.admission import Arrival, Policy

FADE_S = 60.0
MOST_ABOVE = 0.95
CLASSES = 4


@dataclass
class Request:
    arrival: Arrival
    arrived: float
    number: int
    level: int
    entered: int
    status: str = "waiting"  # or "granted", "refused", "cancelled"
    replica: str = ""  # set while it runs

    @property
    def slots(self) -> int:
        return self.arrival.slots


@dataclass
class History:
    """All that ever happened to the slots; the fading sums are taken over all of it each time."""

    segments: list[tuple[float, float, int, int]] = field(default_factory=list)  # from, to, busy, slots
    releases: list[tuple[float, int]] = field(default_factory=list)
    grants: list[tuple[float, int, int]] = field(default_factory=list)  # when, level, slots

    def busy_time(self, since: float) -> float:
        return sum(end - max(start, since) for start, end, busy, _ in self.segments if busy and end > since)

    def wait(self, now: float, level: int, work: int, slots: int) -> float | None:
        released = sum(n * math.exp(-self.busy_time(at) / FADE_S) for at, n in self.releases)
        busy_slot_s = sum(
            busy * FADE_S * (math.exp(-self.busy_time(end) / FADE_S) - math.exp(-self.busy_time(start) / FADE_S))
            for start, end, busy, _ in self.segments
            if busy
        )
        if released <= 0 or busy_slot_s <= 0 or slots == 0:
            return None
        all_slot_s = sum(
            n * FADE_S * (math.exp((end - now) / FADE_S) - math.exp((start - now) / FADE_S))
            for start, end, _, n in self.segments
        )
        above = sum(n * math.exp((at - now) / FADE_S) for at, of, n in self.grants if of > level)
        possible = released / busy_slot_s * all_slot_s
        share = min(MOST_ABOVE, above / possible) if possible > 0 else 0.0
        return max(0, work) / (slots * released / busy_slot_s) / (1 - share)


class Reference:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.slots: dict[str, int] = {}
        self.last_grant: dict[str, int] = {}
        self.counter = 0
        self.empty_since = -math.inf
        self.history = History()
        self.grants: list[tuple[str, str, float]] = []
        self.refusals: list[tuple[str, str]] = []

    # What can be asked.

    def waiting(self) -> list[Request]:
        """Everyone who waits, in order."""
        return sorted((r for r in self.requests.values() if r.status == "waiting"), key=lambda r: (-r.level, r.entered))

    def used(self, replica: str) -> int:
        return sum(r.slots for r in self.requests.values() if r.replica == replica)

    def free(self, replica: str) -> int:
        return max(0, self.slots[replica] - self.used(replica))

    def empty(self) -> bool:
        return not any(self.slots.values())

    def wait_ends(self, request: Request) -> float:
        end = request.arrived + self.policy.max_wait_s
        if self.empty():
            end = min(end, max(request.arrived, self.empty_since) + self.policy.no_replica_wait_s)
        return end

    def next_due(self) -> float | None:
        dues = []
        for request in self.waiting():
            dues.append(self.wait_ends(request))
            if request.arrival.deadline is not None:
                dues.append(request.arrival.deadline)
            if request.level == request.arrival.request_class and request.level < CLASSES - 1:
                dues.append(request.arrived + self.policy.lift_after_s[request.level])
        return min(dues, default=None)

    def predicted_wait(self, level: int) -> float | None:
        ahead = sum(r.slots for r in self.waiting() if r.level >= level)
        if not ahead and any(self.free(replica) for replica in self.slots):
            return 0.0
        return self.wait_for(level, ahead + 1)

    def wait_for(self, level: int, work: int) -> float | None:
        free = sum(self.free(replica) for replica in self.slots)
        return self.history.wait(self.now, level, work - free, sum(self.slots.values()))

    # What can happen.

    def pass_time(self, now: float) -> None:
        busy = sum(r.slots for r in self.requests.values() if r.replica)
        self.history.segments.append((self.now, now, busy, sum(self.slots.values())))
        self.now = now
        for request in self.waiting():
            if request.arrival.deadline is not None and request.arrival.deadline <= now:
                self.refuse(request, "deadline")
            elif self.wait_ends(request) <= now:
                large = request.slots > max(self.slots.values(), default=0)
                self.refuse(request, "no_replica" if self.empty() else "too_large" if large else "timeout")
        for request in sorted(self.waiting(), key=lambda r: r.number):
            claimed = request.arrival.request_class
            if (
                request.level == claimed < CLASSES - 1
                and request.arrived + self.policy.lift_after_s[request.level] <= now
            ):
                request.level += 1
                request.entered = self.tick()
        self.decide()

    def arrive(self, arrival: Arrival) -> None:
        number = self.tick()
        request = Request(arrival, self.now, number, int(arrival.request_class), number)
        self.requests[arrival.request_id] = request
        if arrival.deadline is not None and arrival.deadline <= self.now:
            return self.refuse(request, "deadline")
        if not self.empty() and arrival.slots > max(self.slots.values()):
            return self.refuse(request, "too_large")
        self.decide()
        if request.status != "waiting":
            return None
        if arrival.deadline is not None:
            ahead = sum(r.slots for r in self.waiting() if r.level >= arrival.request_class)
            wait = self.wait_for(arrival.request_class, ahead)
            if wait is not None and self.now + wait > arrival.deadline:
                return self.refuse(request, "deadline")
        if len(self.waiting()) > self.policy.max_queued:
            lowest = min(r.level for r in self.waiting())
            if lowest < arrival.request_class:
                self.refuse(max((r for r in self.waiting() if r.level == lowest), key=lambda r: r.number), "shed")
                self.decide()
            else:
                self.refuse(request, "queue_full")
        return None

    def end(self, request_id: str, cancel: bool) -> None:
        request = self.requests.get(request_id)
        if request is not None and request.replica:
            request.replica = ""
            self.history.releases.append((self.now, request.slots))
        elif request is not None and request.status == "waiting" and cancel:
            request.status = "cancelled"
        self.decide()

    def replica(self, replica: str, slots: int | None) -> None:
        """Another number of slots; None: gone."""
        was_empty = self.empty()
        if slots is None:
            self.slots.pop(replica, None)
            self.last_grant.pop(replica, None)
            for request in self.requests.values():
                if request.replica == replica:
                    request.replica = ""
        else:
            self.slots[replica] = slots
        if self.empty() and not was_empty:
            self.empty_since = self.now
        self.decide()

    # How it is decided.

    def tick(self) -> int:
        self.counter += 1
        return self.counter

    def refuse(self, request: Request, reason: str) -> None:
        request.status = "refused"
        self.refusals.append((request.arrival.request_id, reason))

    def decide(self) -> None:
        while self.grant_one():
            pass

    def best(self, candidates: set[str]) -> str:
        return min(candidates, key=lambda replica: (-self.free(replica), self.last_grant.get(replica, 0), replica))

    def grant_one(self) -> bool:
        kept: dict[int, str | None] = {}  # level -> the replica its first one keeps
        for request in self.waiting():
            could = {r for r, slots in self.slots.items() if slots >= request.slots} - set(kept.values())
            fits = {r for r in could if self.free(r) >= request.slots}
            if fits:
                wish = request.arrival.affinity
                self.give(request, wish if wish in fits else self.best(fits))
                return True
            if request.level not in kept and request.slots <= max(self.slots.values(), default=0):
                partly = {r for r in could if self.free(r)}
                kept[request.level] = self.best(partly) if partly else None
        return False

    def give(self, request: Request, replica: str) -> None:
        request.status, request.replica = "granted", replica
        self.last_grant[replica] = self.tick()
        self.history.grants.append((self.now, request.level, request.slots))
        self.grants.append((request.arrival.request_id, replica, self.now - request.arrived))
