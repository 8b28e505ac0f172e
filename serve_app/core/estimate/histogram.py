"""Quantiles of a stream of positive numbers in fixed memory: old values fade, some values are lower bounds (censored).

Buckets grow geometrically (as in DDSketch, VLDB 2019), so the relative error is small everywhere. A censored value (an
answer cut off at its bound) is a lower bound of the true one; the estimator of Kaplan and Meier (1958) uses it without
bias if the cut does not depend on the value.

Invariant: memory does not depend on the number of additions; a value counts half after `half_life` more additions.
"""

from __future__ import annotations

import math
from array import array

BUCKETS_PER_OCTAVE = 8  # 9% from edge to edge; a quantile is interpolated inside a bucket
RESCALE_ABOVE = 1e12  # of the newest weight; far below the largest 32-bit float, and old weights are negligible by then


class FadingHistogram:
    """Weights by bucket.

    Args:
        octaves: the range is 1 to 2**octaves; a value outside counts as the nearest end.
        half_life: in additions.
    """

    __slots__ = ("_censored", "_growth", "_highest", "_lowest", "_observed", "_unit", "seen")

    def __init__(self, octaves: int, half_life: float) -> None:
        self._observed = array("f", bytes(4 * octaves * BUCKETS_PER_OCTAVE))
        self._censored: array[float] | None = None  # None until a censored value is added: most streams have none
        self._lowest = len(self._observed)  # the buckets that were ever added to: few, and all others are empty
        self._highest = -1
        self._unit = 1.0  # weight of the next value: new weights grow instead of all old ones shrinking
        self._growth = 2.0 ** (1.0 / half_life)
        self.seen = 0  # values ever added

    def add(self, value: float, weight: float = 1.0, *, is_cut_off: bool = False) -> None:
        """Add a value; `is_cut_off`: the true value is this or more. Amortised O(1)."""
        size = len(self._observed)
        bucket = 0 if value <= 1.0 else min(int(math.log2(value) * BUCKETS_PER_OCTAVE), size - 1)
        if bucket < self._lowest:
            self._lowest = bucket
        if bucket > self._highest:
            self._highest = bucket
        if is_cut_off:
            if self._censored is None:
                self._censored = array("f", bytes(4 * size))
            self._censored[bucket] += self._unit * weight
        else:
            self._observed[bucket] += self._unit * weight
        self.seen += 1
        self._unit *= self._growth
        if self._unit > RESCALE_ABOVE:
            self._observed = array("f", [weight / self._unit for weight in self._observed])
            if self._censored is not None:
                self._censored = array("f", [weight / self._unit for weight in self._censored])
            self._unit = 1.0

    def quantile(self, share: float) -> float | None:
        """The value that `share` (0 to 1) of all do not exceed; None: no value, or too many are censored.

        One pass over the buckets that were added to, whose number is bounded.
        """
        used = slice(self._lowest, self._highest + 1)
        observed = self._observed[used]
        censored = None if self._censored is None else self._censored[used]
        at_risk = math.fsum(observed) + (math.fsum(censored) if censored else 0.0)
        alive = 1.0
        wanted = 1.0 - share
        for bucket, ended in enumerate(observed, self._lowest):
            if ended > 0.0:
                died = alive * min(1.0, ended / at_risk)
                if alive - died <= wanted + 1e-6:  # sums of 32-bit floats
                    inside = (alive - wanted) / died
                    low = bucket_edge(bucket)
                    high = bucket_edge(bucket + 1)
                    return low + (high - low) * min(1.0, max(0.0, inside))
                alive -= died
            at_risk -= ended + (censored[bucket - self._lowest] if censored else 0.0)
        return None

    def longest_censored(self) -> float:
        """The lower edge of the highest bucket with a censored value; 0.0: there is none."""
        cuts = self._censored
        if cuts is None:
            return 0.0
        used = range(self._highest, self._lowest - 1, -1)
        return next((bucket_edge(bucket) for bucket in used if cuts[bucket] > 0.0), 0.0)


def bucket_edge(bucket: int) -> float:
    """The lower edge of a bucket."""
    return float(2.0 ** (bucket / BUCKETS_PER_OCTAVE))
