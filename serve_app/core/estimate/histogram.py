"""A quantile of a stream of positive numbers, in fixed memory: the old fades, some values are lower bounds.

Buckets grow geometrically (as in DDSketch, VLDB 2019), so the error is relative and small everywhere. A value that was
cut off (an answer that ended at its bound) says only that the true one is no smaller; Kaplan and Meier's estimator
(1958) uses that without bias while the cut has nothing to do with the value.

Invariant: memory does not depend on how much was added; what is added counts half after `half_life` more additions.
"""

from __future__ import annotations

import math
from array import array

BUCKETS_PER_OCTAVE = 8  # 9% from edge to edge, and a quantile is interpolated inside
RESCALE_ABOVE = 1e12  # of the newest weight; far below what a 32-bit float holds, and old weights are dust by then


class FadingHistogram:
    """Weights by bucket.

    Args:
        octaves: the range is 1 to 2**octaves; what lies outside counts as the nearest end.
        half_life: in additions.
    """

    __slots__ = ("_cuts", "_ends", "_growth", "_unit", "seen")

    def __init__(self, octaves: int, half_life: float) -> None:
        self._ends = array("f", bytes(4 * octaves * BUCKETS_PER_OCTAVE))
        self._cuts: array[float] | None = None  # most streams have none
        self._unit = 1.0  # weight of the next one: the newest grow, which is as good as all others shrinking
        self._growth = 2.0 ** (1.0 / half_life)
        self.seen = 0  # all there ever were

    def add(self, value: float, weight: float = 1.0, *, cut: bool = False) -> None:
        """Count a value; `cut`: the true one is this or more. Amortised O(1)."""
        size = len(self._ends)
        bucket = 0 if value <= 1.0 else min(int(math.log2(value) * BUCKETS_PER_OCTAVE), size - 1)
        if cut:
            if self._cuts is None:
                self._cuts = array("f", bytes(4 * size))
            self._cuts[bucket] += self._unit * weight
        else:
            self._ends[bucket] += self._unit * weight
        self.seen += 1
        self._unit *= self._growth
        if self._unit > RESCALE_ABOVE:
            self._rescale()

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of all do not exceed; None: nothing was added, or too much was cut to know.

        One pass over the buckets, of which there is a fixed number.
        """
        at_risk = math.fsum(self._ends) + (math.fsum(self._cuts) if self._cuts else 0.0)
        alive, wanted = 1.0, 1.0 - share
        for bucket, ended in enumerate(self._ends):
            if ended > 0.0:
                died = alive * min(1.0, ended / at_risk)
                if alive - died <= wanted + 1e-6:  # sums of 32-bit floats
                    inside = (alive - wanted) / died
                    low, high = edge(bucket), edge(bucket + 1)
                    return low + (high - low) * min(1.0, max(0.0, inside))
                alive -= died
            at_risk -= ended + (self._cuts[bucket] if self._cuts else 0.0)
        return None

    def longest_cut(self) -> float:
        """The lower edge of the highest bucket in which something was cut; 0.0: nothing was."""
        cuts = self._cuts or ()
        return next((edge(bucket) for bucket in range(len(cuts) - 1, -1, -1) if cuts[bucket] > 0.0), 0.0)

    def _rescale(self) -> None:
        for weights in (self._ends, self._cuts or ()):
            for bucket, weight in enumerate(weights):
                weights[bucket] = weight / self._unit  # type: ignore[index]
        self._unit = 1.0


def edge(bucket: int) -> float:
    """The lower edge of a bucket."""
    return float(2.0 ** (bucket / BUCKETS_PER_OCTAVE))
