"""Simulated figures against those of several real runs of the same load. Pure.

A simulated figure is right when it differs from the median of the real runs by at most the larger of `TOLERANCE` and
their own spread, which is the greatest less the least of them, both as parts of that median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.common.stats import lower_quantile, shorten
from benchmarks.overload.answers import Window
from benchmarks.overload.offered_load import GROUPS

TOLERANCE = 0.15  # of the median: as far as two runs of the same load on a machine of its own differ
GOODPUT = "goodput_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure. `real`: of the runs that have it, of `runs` in all; `simulated` None: it has none."""

    real: Sequence[float]
    runs: int
    simulated: float | None

    @property
    def middle(self) -> float | None:
        return median(self.real) if self.real else None

    @property
    def spread(self) -> float | None:
        """Of the real runs, as a part of their median; None: they have no figure, or it is zero."""
        return (max(self.real) - min(self.real)) / self.middle if self.middle else None

    @property
    def allowed(self) -> float | None:
        return None if self.spread is None else max(TOLERANCE, self.spread)

    @property
    def difference(self) -> float | None:
        """Of the simulated figure, as a part of the real median."""
        if self.simulated is None or not self.middle:
            return None
        return self.simulated / self.middle - 1.0

    @property
    def is_right(self) -> bool:
        """Neither side having a figure is right, too; one side alone is wrong."""
        if self.middle is None:
            return self.simulated is None
        if not self.middle:
            return self.simulated == 0.0
        return self.difference is not None and self.allowed is not None and abs(self.difference) <= self.allowed

    def as_json(self) -> dict[str, Any]:
        def short(value: float | None) -> float | None:
            return None if value is None else shorten(value)

        return {
            "real": [shorten(one) for one in self.real],
            "runs": self.runs,
            "real_median": short(self.middle),
            "simulated": short(self.simulated),
            "difference": short(self.difference),
            "spread": short(self.spread),
            "allowed": short(self.allowed),
            "ok": self.is_right,
        }


def figures_of(window: Window) -> dict[str, float | None]:
    """First tokens by class over those who got one, in ms, and the goodput."""
    found: dict[str, float | None] = {}
    for group in GROUPS:
        first_ms = [one.first_s * 1e3 for one in window.of_group(group) if one.first_s is not None]
        found[f"{group}_ttft_p50_ms"] = lower_quantile(first_ms, 0.5)
        found[f"{group}_ttft_p99_ms"] = lower_quantile(first_ms, 0.99)
    return found | {GOODPUT: window.goodput}


def compared(real: Sequence[Window], simulated: Sequence[Window]) -> dict[str, Compared]:
    """Every figure of the real runs of one load, and the median of it over their simulations."""
    reals = [figures_of(window) for window in real]
    virtual = [figures_of(window) for window in simulated]

    def values(some: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
        return [value for one in some if (value := one[name]) is not None]

    found = {}
    for name in reals[0]:
        made = values(virtual, name)
        found[name] = Compared(values(reals, name), len(reals), median(made) if made else None)
    return found
