"""Quantiles of durations that can be merged: DDSketch, with counts of bins whose width is a part of their value.

Invariant: a merged sketch is the sketch of all values, whatever the order; a quantile differs from the exact one by
`ACCURACY` of its value at most, and by `SMALLEST_S`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore

ACCURACY = 0.02  # of the value; 58 bins for durations that differ by a factor of ten
SMALLEST_S = 0.0005  # a shorter time counts as none
_MAPPING = LogarithmicMapping(ACCURACY)


class DurationSketch:
    """The sketch of some durations, in seconds."""

    def __init__(self) -> None:
        self._store = DenseStore()
        self._short = 0  # durations below `SMALLEST_S`

    def add(self, seconds: float) -> None:
        """Count a duration."""
        if seconds < SMALLEST_S:
            self._short += 1
        else:
            self._store.add(_MAPPING.key(seconds))

    def merge(self, plain: Sequence[int]) -> None:
        """Add what another sketch has counted, in its plain form."""
        if not plain:
            return
        self._short += plain[0]
        key = 0
        for step, count in zip(plain[1::2], plain[2::2], strict=True):
            key += step
            self._store.add(key, count)

    def plain(self) -> list[int]:
        """The counts: of short durations, then of each bin the step to its number and its count; empty: none."""
        if not self._short and not self._store.count:
            return []
        found = [self._short]
        last = 0
        for index, count in enumerate(self._store.bins):
            if count:
                key = index + self._store.offset
                found += [key - last, int(count)]
                last = key
        return found

    def quantile(self, part: float) -> float | None:
        """The duration that this part of all is not above; None: there are none."""
        sketch = BaseDDSketch(_MAPPING, self._store, DenseStore(), float(self._short))
        found = sketch.get_quantile_value(part)
        return None if found is None else float(found)
