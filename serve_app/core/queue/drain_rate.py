"""The measured rate at which slots come free (drain rate); waits are predicted from it.

Little's law on slots: slots released per busy slot-second, times all slots, is the release rate while all slots are
busy. So a quiet hour does not make the queue look slow, and a new replica counts at once.

Older measurements fade with `FADE_S`. All figures are None until as many slots were released as were busy at once: when
the first of many equal answers ends, the busy time of all of them is counted, but only one release. The queue would
look slower by a factor of the number of slots, and requests that would soon run would be refused.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

FADE_S = 60.0  # long enough to hold whole answers of tens of seconds, short enough to follow a change of load
MAX_SHARE_ABOVE = 0.95  # of the drain rate, for higher classes: their part is measured, not certain


class DrainRate:
    """Slots released and granted, with fading weights. O(1) per call."""

    def __init__(self) -> None:
        self._advanced_at: float | None = None
        # The most slots that were busy at once; None: as many have been released since, and figures are valid.
        self._first_round_slots: int | None = 0
        self._first_round_released = 0  # slots released in this first round
        self._released = 0.0
        self._busy_slot_s = 0.0
        self._all_slot_s = 0.0
        self._granted = [0.0] * len(RequestClass)  # by class

    def advance(self, now: float, busy: int, slots: int) -> None:
        """Count the time since the last call, in which `busy` of `slots` slots were busy."""
        elapsed, self._advanced_at = (0.0 if self._advanced_at is None else now - self._advanced_at), now
        if elapsed <= 0.0:
            return
        keep = math.exp(-elapsed / FADE_S)
        weight_s = FADE_S * (1.0 - keep)
        self._all_slot_s = self._all_slot_s * keep + slots * weight_s
        self._granted = [granted * keep for granted in self._granted]
        if self._first_round_slots is not None:
            self._first_round_slots = max(self._first_round_slots, busy)
        if busy:  # idle time does not measure how long a slot is held, so it does not fade the measurement
            self._released *= keep
            self._busy_slot_s = self._busy_slot_s * keep + busy * weight_s

    def on_released(self, slots: int) -> None:
        self._released += slots
        if self._first_round_slots is not None:
            self._first_round_released += slots
            if self._first_round_slots and self._first_round_released >= self._first_round_slots:
                self._first_round_slots = None

    def on_granted(self, request_class: RequestClass, slots: int) -> None:
        self._granted[request_class] += slots

    def drain_part(self, request_class: int) -> float:
        """The part of the drain of all slots that was recently granted to this class and above."""
        possible = (self._releases_per_slot_s() or 0.0) * self._all_slot_s
        return sum(self._granted[request_class:]) / possible if possible > 0.0 else 0.0

    def slots_per_s(self, slots: float) -> float | None:
        """Slots released per second while all of `slots` slots are busy; None: not measured, or no slots."""
        rate = self._releases_per_slot_s()
        return None if rate is None or slots <= 0 else slots * rate

    def slots_per_s_left_to(self, request_class: RequestClass, slots: float) -> float | None:
        """`slots_per_s` without the part that the classes above have recently been granted.

        work / rate is then the wait in a queue with strict priorities (Cobham, 1954).
        """
        rate = self.slots_per_s(slots)
        if rate is None:
            return None
        return rate * (1.0 - min(self.drain_part(request_class + 1), MAX_SHARE_ABOVE))

    def _releases_per_slot_s(self) -> float | None:
        """Releases per second of a busy slot; None: not measured."""
        if self._first_round_slots is not None or self._released <= 0.0 or self._busy_slot_s <= 0.0:
            return None
        return self._released / self._busy_slot_s
