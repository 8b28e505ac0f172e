"""The plot of a batch curve: throughput and latency as factors over one client, measured and published, knees marked.

Invariant: both panels have the same batches on the same scale, and a curve has one colour in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common.batch_curve import PUBLISHED, factors, points_of
from benchmarks.common.figure import save

COLOURS = ("#2c6fbb", "#1e8449", "#c0392b")  # of the arms
PUBLISHED_COLOUR = "#7f8c8d"
SIZE_INCHES = (9.5, 4.0)


def plot(curve: Mapping[str, Any], file: Path) -> None:
    """Write the plot of what `batch_curve.build` gave; its format is the file's suffix."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    batches: set[int] = set()
    colours = [*COLOURS[: len(curve["curves"])], PUBLISHED_COLOUR]
    for (name, points), colour in zip(points_of(curve).items(), colours, strict=True):
        over_one = factors(points)
        batches |= set(over_one)
        knee = curve["knee"][name]
        label = "published, 70B on four A100" if name == PUBLISHED else name
        for number, axes in enumerate((throughput, latency)):
            values = [pair[number] for pair in over_one.values()]
            axes.plot(list(over_one), values, "o--" if name == PUBLISHED else "o-", color=colour, label=label)
            if knee in over_one:
                mark = {"markersize": 15, "markerfacecolor": "none", "markeredgewidth": 1.8}
                axes.plot([knee], [over_one[knee][number]], "o", color=colour, label=f"knee: {knee}", **mark)
    for axes, quantity in ((throughput, "throughput"), (latency, "latency of an answer, p50")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sorted(batches), [str(batch) for batch in sorted(batches)])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("clients, or batch")
        axes.set_ylabel(f"{quantity}, over one client")
        axes.grid(True, alpha=0.3)
    throughput.legend(fontsize=8)
    save(figure, file)
