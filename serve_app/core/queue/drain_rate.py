"""How fast slots come free, measured, and what that means for a wait.

Little's law on slots: slots released per busy slot-second, times the slots there are, is what the replicas release in a
second when all are busy. Measured so, a quiet hour does not make the line look slow, and a new replica counts at once.

Older measurements fade with `FADE_S`. All figures are None until as many slots have been released as were busy at once:
when the first of a round of equal answers ends, the others' time is counted and none of their ends. The line would look
slower by as many times as there are slots, and refuse who would soon have run.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

FADE_S = 60.0  # long enough to hold whole answers of tens of seconds, short enough to follow a change of load
MAX_SHARE_ABOVE = 0.95  # of the drain, taken by higher classes: what they take is measured, not certain


class DrainRate:
    """Slots released and granted, fading. O(1) per call."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._round: int | None = 0  # the most slots that were busy at once; None: as many have been released
        self._ended = 0  # slots, in this first round
        self._released = 0.0
        self._busy_slot_s = 0.0
        self._all_slot_s = 0.0
        self._granted = [0.0] * len(RequestClass)  # by class

    def advance(self, now: float, busy: int, slots: int) -> None:
        """Account for the time since the last call, in which `busy` of `slots` slots were busy."""
        elapsed, self._at = (0.0 if self._at is None else now - self._at), now
        if elapsed <= 0.0:
            return
        keep = math.exp(-elapsed / FADE_S)
        weight_s = FADE_S * (1.0 - keep)
        self._all_slot_s = self._all_slot_s * keep + slots * weight_s
        self._granted = [granted * keep for granted in self._granted]
        if self._round is not None:
            self._round = max(self._round, busy)
        if busy:  # idle time says nothing about how long a slot is held, so it does not fade what was measured
            self._released *= keep
            self._busy_slot_s = self._busy_slot_s * keep + busy * weight_s

    def released(self, slots: int) -> None:
        self._released += slots
        if self._round is not None:
            self._ended += slots
            if self._round and self._ended >= self._round:
                self._round = None

    def granted(self, level: RequestClass, slots: int) -> None:
        self._granted[level] += slots

    def part(self, level: int) -> float:
        """The part of what the replicas could release that was granted to this class and above of late."""
        possible = (self._per_slot_s() or 0.0) * self._all_slot_s
        return sum(self._granted[level:]) / possible if possible > 0.0 else 0.0

    def slots_per_s(self, slots: float) -> float | None:
        """Slots released per second when `slots` slots are all busy; None: not measured, or there are none."""
        rate = self._per_slot_s()
        return None if rate is None or slots <= 0 else slots * rate

    def left_slots_per_s(self, level: RequestClass, slots: float) -> float | None:
        """Of them, what a class gets: all but what the classes above have been taking of late.

        work / rate is then the wait of a queue with strict priorities (Cobham, 1954).
        """
        rate = self.slots_per_s(slots)
        if rate is None:
            return None
        return rate * (1.0 - min(self.part(level + 1), MAX_SHARE_ABOVE))

    def _per_slot_s(self) -> float | None:
        """Releases of a busy slot in a second; None: not measured."""
        if self._round is not None or self._released <= 0.0 or self._busy_slot_s <= 0.0:
            return None
        return self._released / self._busy_slot_s
