"""The plot of an overload run: first tokens by class and goodput over load, one column an arm.

Dotted lines are the classes' levels; a cross, at the patience of a class, says that all of it left without a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.arms import OURS, VLLM
from benchmarks.common.figure import save
from benchmarks.overload.offered_load import GROUPS
from benchmarks.overload.plan import FIFO

TITLES = {OURS: "ours", FIFO: "ours, first come first served", VLLM: "vLLM's own server"}
COLOURS = {"high": "#c0392b", "normal": "#2c6fbb", "low": "#7f8c8d"}
SIZE_INCHES = (10.5, 6.0)


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Write the plot; its format is the file's suffix."""
    arms = [arm for arm in TITLES if arm in result["windows"]] or list(result["windows"])
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.subplots(2, len(arms), sharey="row", squeeze=False)
    for column, arm in enumerate(arms):
        _column(axes[0][column], axes[1][column], result["windows"][arm], result["levels"])
        axes[0][column].set_title(TITLES.get(arm, arm))
    axes[1][0].set_ylim(bottom=0)  # of all columns, once they are drawn
    axes[0][0].set_ylabel("TTFT p99, ms (of those who got one)")
    axes[1][0].set_ylabel("output tokens/s")
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8)
    save(figure, file)


def _column(above: Axes, below: Axes, windows: Mapping[str, Any], levels: Mapping[str, Any]) -> None:
    loads = sorted(windows, key=float)
    at = [float(load) for load in loads]
    for group in GROUPS:
        above.plot(at, [windows[m]["ttft_ms"][group]["p99"] for m in loads], "o-", color=COLOURS[group], label=group)
        nobody = [float(load) for load in loads if windows[load]["ttft_ms"][group]["p99"] is None]
        above.plot(nobody, [levels["patience_ms"][group]] * len(nobody), "x", color=COLOURS[group], markersize=9)
        above.axhline(levels["ttft_level_ms"][group], color=COLOURS[group], linestyle=":", linewidth=1)
    above.set_yscale("log")
    below.plot(
        at, [windows[m]["goodput_tokens_per_s"] for m in loads], "o-", color="#1e8449", label="within both levels"
    )
    below.plot(at, [windows[m]["tokens_per_s"] for m in loads], "o--", color="#aaaaaa", label="finished")
    below.set_xlabel("offered load / capacity")
    for axis in (above, below):
        axis.grid(True, alpha=0.3)
