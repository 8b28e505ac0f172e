"""What is drawn of a comparison, however it is drawn: a panel for each question. Pure.

Invariant: an arm has the same number, and so the same colour, in every panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serve_app.cli.simulate.figures import ArmResult, Comparison

COLOURS = 6  # of lines; further ones have the same colours and are dashed
TICKS_S = (1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800)
MOST_TICKS = 6
CLASS_NUMBERS = {"critical": 0, "high": 1, "normal": 2, "low": 3}


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a panel: a value for each step. `is_class`: `number` is that of a class, not of an arm."""

    name: str
    number: int
    values: Sequence[float | None]
    is_class: bool = False

    @property
    def is_dashed(self) -> bool:
        return self.number >= COLOURS


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart over time. `span_s`: of its axis, the same in all panels. `levels`: of first tokens, in seconds."""

    title: str
    unit: str
    step_s: float
    span_s: float
    lines: tuple[ChartLine, ...]
    levels: tuple[float, ...] = ()
    is_log: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value of the axis. A logarithmic one ends at whole decades."""
        values = [value for line in self.lines for value in line.values if value is not None]
        values += self.levels
        if not self.is_log:
            return 0.0, 1.05 * max(values, default=0.0) or 1.0
        shown = [value for value in values if value > 0] or [1.0]
        low = 10.0 ** math.floor(math.log10(min(shown)))
        high = 10.0 ** math.ceil(math.log10(max(shown)))
        return low, max(high, 10 * low)


@dataclass(frozen=True, slots=True)
class Bar:
    """What one arm costs. `text`: with its unit."""

    name: str
    number: int
    value: float
    text: str
    meets: bool | None


def panels(found: Comparison) -> list[Panel]:
    """The charts over time, in the order in which they are read."""
    return [_arrivals(found), *_replicas(found), *_first_tokens(found)]


def bars(found: Comparison) -> tuple[str, list[Bar]]:
    """What each arm costs, and of what: money, or GPU hours where the profiles have no price."""
    has_price = any(arm.cost for arm in found.arms)
    title = "Cost" if has_price else "GPU hours"
    return title, [
        Bar(
            arm.name,
            number,
            arm.cost if has_price else arm.gpu_hours,
            f"${arm.cost:,.2f}" if has_price else f"{arm.gpu_hours:.1f} h",
            arm.meets,
        )
        for number, arm in enumerate(found.arms)
    ]


def time_ticks(span_s: float) -> list[tuple[float, str]]:
    """Moments of an axis of time, with their names."""
    tick = next((one for one in TICKS_S if span_s / one <= MOST_TICKS), TICKS_S[-1])
    return [(at * tick, _moment(at * tick)) for at in range(int(span_s // tick) + 1)]


def value_ticks(panel: Panel) -> list[float]:
    """Values of a panel's axis."""
    low, high = panel.bounds
    if panel.is_log:
        decades = round(math.log10(high / low))
        each = max(1, math.ceil(decades / 4))
        return [low * 10.0**power for power in range(0, decades + 1, each)]
    raw = high / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * number for number in range(int(high / step) + 1)]


def _moment(at_s: float) -> str:
    if not at_s:
        return "0"
    if at_s % 60:
        return f"{at_s:g} s"
    if at_s % 3600:
        hours = f"{int(at_s // 3600)} h " if at_s >= 3600 else ""
        return f"{hours}{int(at_s % 3600 // 60)} min"
    return f"{int(at_s // 3600)} h" if at_s % 86_400 else f"{int(at_s // 86_400)} d"


def _arrivals(found: Comparison) -> Panel:
    by_class = found.arms[0].series.arrivals_per_minute
    lines = (ChartLine(name, CLASS_NUMBERS[name], values, is_class=True) for name, values in by_class.items())
    return Panel("Arrivals", "requests a minute", *_axis(found), tuple(lines))


def _replicas(found: Comparison) -> Iterator[Panel]:
    models = [each.model for each in found.arms[0].models]
    for model in models:
        lines = (ChartLine(arm.name, number, arm.series.running[model]) for number, arm in enumerate(found.arms))
        title = f"Running replicas of {model}" if len(models) > 1 else "Running replicas"
        yield Panel(title, "mean of a step", *_axis(found), tuple(lines))


def _first_tokens(found: Comparison) -> Iterator[Panel]:
    for name in found.arms[0].series.ttft_p99_s:
        lines = (ChartLine(arm.name, number, arm.series.ttft_p99_s[name]) for number, arm in enumerate(found.arms))
        title = f"First token of {name} requests, 99th percentile"
        yield Panel(title, "seconds", *_axis(found), tuple(lines), _levels(found.arms, name), is_log=True)


def _axis(found: Comparison) -> tuple[float, float]:
    """The step, and the span until the last request of the last arm has ended."""
    step_s = found.arms[0].series.step_s
    return step_s, step_s * max(len(values) for arm in found.arms for values in arm.series.running.values())


def _levels(arms: Sequence[ArmResult], name: str) -> tuple[float, ...]:
    found = {each.level_s for arm in arms for each in arm.classes if each.request_class == name}
    return tuple(sorted(level for level in found if level is not None))
