"""The measured rate at which slots come free (drain rate); waits and guard slots are computed from it.

Little's law on slots: slots released per busy slot-second, times all slots, is the release rate while all slots are
busy. So a quiet hour does not make the queue look slow, and a new replica counts at once.

Older measurements fade with `FADE_S`. All figures are None until as many slots were released as were busy at once: when
the first of many equal answers ends, the busy time of all of them is counted, but only one release. The queue would
look slower by a factor of the number of slots, and requests that would soon run would be refused.

Guard slots are kept free for interactive classes, so that their requests start under overload without a wait. Priority
alone decides which request gets the next slot, not when: with all slots busy, one comes free every 1/capacity seconds,
several times an unloaded first token. So a class below `GUARDED_FROM` is granted nothing while no more than the guard
slots are free. If the guarded classes take the part p of the drain, n free slots are used up with probability p^n (n
arrivals of theirs before the next release), so n = log(`BLOCKING_PROBABILITY`) / log(p): eight slots if they are four
tenths of the load, three for one tenth, none if they do not arrive, whatever the engine's size. At most the policy's
share of all slots. The minimum share is exempt: it holds however many guarded requests arrive. These are the guard
channels of telephone exchanges (Hong and Rappaport, 1986).

Invariant: with nothing running every class can start; guard slots only delay a lower class until a request ends.
"""

from __future__ import annotations

import math

from serve_app.types import RequestClass

FADE_S = 60.0  # long enough to hold whole answers of tens of seconds, short enough to follow a change of load
MAX_SHARE_ABOVE = 0.95  # of the drain rate, for higher classes: their part is measured, not certain
GUARDED_FROM = RequestClass.HIGH  # the lowest guarded class: from here on a person waits for the answer
# Part of the guarded requests that find no free slot: their p99 is promised, and 0.01 would make it the blocked ones.
BLOCKING_PROBABILITY = 0.001


class DrainRate:
    """Slots released and granted, with fading weights. O(1) per call."""

    def __init__(self) -> None:
        self._advanced_at = math.inf  # not advanced yet
        self._most_busy = 0  # slots at once
        self._released_count = 0
        self._is_measured = False  # whether `_released_count` has once been as high as `_most_busy`
        self._released = 0.0
        self._busy_slot_s = 0.0
        self._all_slot_s = 0.0
        self.granted = [0.0] * len(RequestClass)  # slots by class: the caller adds each grant

    def advance(self, now: float, busy: int, slots: int) -> None:
        """Count the time since the last call, in which `busy` of `slots` slots were busy."""
        elapsed, self._advanced_at = now - self._advanced_at, now
        if elapsed <= 0.0:
            return
        keep = math.exp(-elapsed / FADE_S)
        weight_s = FADE_S * (1.0 - keep)
        self._all_slot_s = self._all_slot_s * keep + slots * weight_s
        self.granted = [granted * keep for granted in self.granted]
        self._most_busy = max(self._most_busy, busy)
        if busy:  # idle time does not measure how long a slot is held, so it does not fade the measurement
            self._released *= keep
            self._busy_slot_s = self._busy_slot_s * keep + busy * weight_s

    def on_released(self, slots: int) -> None:
        self._released += slots
        self._released_count += slots
        self._is_measured = self._is_measured or 0 < self._most_busy <= self._released_count

    def drain_part(self, request_class: int) -> float:
        """The part of the drain of all slots that was recently granted to this class and above."""
        possible = (self._releases_per_slot_s() or 0.0) * self._all_slot_s
        return sum(self.granted[request_class:]) / possible if possible > 0.0 else 0.0

    def slots_per_s(self, slots: float) -> float | None:
        """Slots released per second while all of `slots` slots are busy; None: not measured, or no slots."""
        rate = self._releases_per_slot_s()
        return None if rate is None or slots <= 0 else slots * rate

    def slots_per_s_left_to(self, request_class: RequestClass, slots: float) -> float | None:
        """`slots_per_s` without the part that the classes above have recently been granted.

        work / rate is then the wait in a queue with strict priorities (Cobham, 1954).
        """
        rate = self.slots_per_s(slots)
        return None if rate is None else rate * (1.0 - min(self.drain_part(request_class + 1), MAX_SHARE_ABOVE))

    def _releases_per_slot_s(self) -> float | None:
        """Releases per second of a busy slot; None: not measured."""
        if not self._is_measured or self._released <= 0.0 or self._busy_slot_s <= 0.0:
            return None
        return self._released / self._busy_slot_s


def guard_slots(share: float, slots: int, drain_part: float) -> int:
    """How many of `slots` are kept free; `drain_part`: the part of the drain that the guarded classes take."""
    if drain_part <= 0.0:
        return 0
    wanted = round(math.log(BLOCKING_PROBABILITY) / math.log(drain_part)) if drain_part < 1.0 else slots
    return min(math.floor(share * slots), wanted)
