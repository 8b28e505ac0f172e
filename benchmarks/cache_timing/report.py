"""What the probes tell: two-sample tests of times and places, the power of those that must find nothing, and tables.

Invariant: a test that found nothing is reported with what it would have found, or it would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.cache_timing.probes import Cell, Probe
from benchmarks.common.stats import shorten
from benchmarks.common.two_samples import Comparison, compare, power

ALPHA = 0.01  # of each test: five tests between tenants in two runs, a false alarm in 20
EFFECT_SHARES = (0.01, 0.02, 0.05, 0.1)  # of the time that a cached prompt saves within a tenant
CLOCKS = ("client_ms", "receipt_ms")


def times(probes: Sequence[Probe], clock: str) -> list[float]:
    return [getattr(one, clock) for one in probes]


def verdict(found: dict[Cell, list[Probe]], rng: np.random.Generator) -> dict[str, Any]:
    """The figures of a run, as plain data."""
    clocks = {clock: _judge(found, clock, rng) for clock in CLOCKS}
    followed = {cell: [float(one.followed) for one in probes] for cell, probes in found.items()}
    place: dict[str, Any] = {
        "replicas": len({one.replica for probes in found.values() for one in probes}),
        "followed": {cell.value: shorten(fmean(values)) for cell, values in followed.items()},
        "p_within": shorten(compare(followed[Cell.WITHIN_OTHER], followed[Cell.WITHIN_SAME]).p),
        "p_between": shorten(compare(followed[Cell.BETWEEN_OTHER], followed[Cell.BETWEEN_SAME]).p),
    }
    cached = {cell: [one.cached for one in probes] for cell, probes in found.items()}
    hidden = all(one["between"]["p"] >= ALPHA for one in clocks.values()) and place["p_between"] >= ALPHA
    seen = all(one["within"]["p"] < ALPHA for one in clocks.values())
    if place["replicas"] > 1:
        seen = seen and place["p_within"] < ALPHA
    return {
        "rounds": len(cached[Cell.BETWEEN_SAME]),
        "alpha": ALPHA,
        "clocks": clocks,
        "place": place,
        "cached_tokens": {cell.value: [min(counts), max(counts)] for cell, counts in cached.items()},
        "between_tells": not hidden or max(cached[Cell.BETWEEN_SAME]) > 0,
        "within_tells": seen and median(cached[Cell.WITHIN_SAME]) > 0,  # a probe may be routed elsewhere
    }


def _judge(found: dict[Cell, list[Probe]], clock: str, rng: np.random.Generator) -> dict[str, Any]:
    """Both comparisons by one clock, and the power of the one between tenants for shares of the effect within one."""
    within = compare(times(found[Cell.WITHIN_OTHER], clock), times(found[Cell.WITHIN_SAME], clock))
    other = times(found[Cell.BETWEEN_OTHER], clock)
    between = compare(other, times(found[Cell.BETWEEN_SAME], clock))
    powers = {f"{share:g}": power(other, share * within.shift, len(other), ALPHA, rng) for share in EFFECT_SHARES}
    medians = {cell.value: shorten(float(np.median(times(found[cell], clock)))) for cell in Cell}
    return {"median_ms": medians, "within": _plain(within), "between": _plain(between), "power": powers}


def _plain(comparison: Comparison) -> dict[str, float]:
    return {name: shorten(value) for name, value in asdict(comparison).items()}


def print_tables(console: Console, title: str, result: dict[str, Any]) -> None:
    columns = ("clock", "who", "other prompt ms", "same prompt ms", "shift ms [95%]", "AUC", "p")
    table = Table(*columns, title=f"{title}: time to the first token, {result['rounds']} probes a cell")
    for clock, figures in result["clocks"].items():
        for pairing in ("within", "between"):
            comparison = figures[pairing]
            medians = figures["median_ms"]
            table.add_row(
                clock.removesuffix("_ms"),
                f"{pairing} tenants" if pairing == "between" else "within one tenant",
                f"{medians[f'{pairing}, other prompt']:.2f}",
                f"{medians[f'{pairing}, same prompt']:.2f}",
                f"{comparison['shift']:+.2f} [{comparison['low']:+.2f}, {comparison['high']:+.2f}]",
                f"{comparison['auc']:.3f}",
                f"{comparison['p']:.2g}",
            )
    console.print(table)
    for clock, figures in result["clocks"].items():
        effect = abs(figures["within"]["shift"])
        shown = ", ".join(f"{float(s):.0%} ({float(s) * effect:.2f} ms): {p:.3f}" for s, p in figures["power"].items())
        console.print(f"  power of the test between tenants, {clock.removesuffix('_ms')}, for a share of {shown}")
    console.print(f"  cached tokens, least and most: {result['cached_tokens']}")
    console.print(f"  place: {result['place']}")
    console.print(f"  within one tenant it tells: {result['within_tells']}; between tenants: {result['between_tells']}")
