"""The PNG of a comparison, by matplotlib: the one module of the command that imports it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from serve_app.cli.simulate.figures import Comparison
from serve_app.cli.simulate.panels import COLOURS, Bar, ChartLine, Panel, bars, panels, time_ticks, value_ticks

ARM_COLOURS = ("#2563eb", "#d97706", "#059669", "#c026d3", "#475569", "#dc2626")
CLASS_COLOURS = ("#0f172a", "#334155", "#64748b", "#94a3b8")
GRID = "#e2e8f0"
WIDTH_IN = 9.0
PANEL_IN = 2.1
BAR_IN = 0.42
DPI = 120


def draw(found: Comparison, file: Path) -> None:
    """Write the picture; its format is the file's suffix.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib does not know the format.
    """
    charts = panels(found)
    title, costs = bars(found)
    heights = [PANEL_IN] * len(charts) + [0.7 + BAR_IN * len(costs)]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, place in zip(charts, axes, strict=False):
        _chart(place, panel)
    _bars(axes[-1], title, costs)
    if len(found.arms) > 1:
        handles = axes[1].get_lines()[: len(found.arms)]
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(file, dpi=DPI)


def _chart(axes: Axes, panel: Panel) -> None:
    _style(axes, panel.title)
    for line in panel.lines:
        at = [(step + 0.5) * panel.step_s for step in range(len(line.values))]
        values = [float("nan") if value is None else value for value in line.values]
        dash = "--" if line.is_dashed else "-"
        axes.plot(at, values, dash, color=_colour(line), linewidth=1.4, label=line.name)
    for level in panel.levels:
        axes.axhline(level, color="#0f172a", linewidth=0.9, linestyle=":")
        axes.annotate(
            f"level {level:g} s", (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7
        )
    if panel.is_log:
        axes.set_yscale("log")
    axes.set_ylim(*panel.bounds)
    axes.set_yticks(value_ticks(panel))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ticks = time_ticks(panel.span_s)
    axes.set_xlim(0, panel.span_s)
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set_ylabel(panel.unit, fontsize=8)
    if panel.lines[0].is_class and len(panel.lines) > 1:
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")


def _bars(axes: Axes, title: str, costs: list[Bar]) -> None:
    _style(axes, title)
    places = range(len(costs))
    colours = [ARM_COLOURS[bar.number % COLOURS] for bar in costs]
    axes.barh(places, [bar.value for bar in costs], height=0.45, color=colours)
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.set_ylim(len(costs) - 0.6, -0.7)
    axes.set_xlim(0, 1.35 * max(bar.value for bar in costs) or 1.0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    for place, bar in zip(places, costs, strict=True):
        verdict = {True: ", meets every level", False: ", misses a level", None: ""}[bar.meets]
        axes.annotate(f" {bar.text}{verdict}", (bar.value, place), va="center", fontsize=8)
        if len(costs) > 1:
            axes.annotate(bar.name, (0, place - 0.28), fontsize=7, va="bottom")


def _colour(line: ChartLine) -> str:
    return CLASS_COLOURS[line.number] if line.is_class else ARM_COLOURS[line.number % COLOURS]


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
