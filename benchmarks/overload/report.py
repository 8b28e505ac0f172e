"""From the windows of an overload run to its result object, and its tables. Pure but for the printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.arms import OURS, VLLM
from benchmarks.common.stats import interval, lower_quantile, shorten
from benchmarks.overload.answers import Answer, Answers, Decision, Window, quantiles
from benchmarks.overload.offered_load import GROUPS, HIGH, LOW
from benchmarks.overload.plan import BASE, ENOUGH_P90, ENOUGH_P99, FIFO, PEAK, Levels

BARS = {
    "high_ttft_p99_ratio_4x": 1.5,  # at most
    "goodput_4x_over_peak": 0.95,  # at least
    "refusal_p99_ms": 10.0,  # at most
    "abandoned_token_share": 0.02,  # at most
    "low_granted_share_4x": 0.05,  # at least
}
AT_LEAST = ("goodput_4x_over_peak", "low_granted_share_4x")
OTHER_CORE_BAR = 0.5
RESAMPLES = 1000
TOO_FEW = "too_few"  # in place of a ratio of quantiles beyond which there is next to nobody


def build(windows: Sequence[Window], levels: Levels, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The result object; the same keys whatever the length of the run, None where an arm was not run."""
    by_arm = {arm: {w.multiple: w for w in windows if w.arm == arm} for arm in dict.fromkeys(w.arm for w in windows)}
    ours = by_arm.get(OURS, {})
    figures = {arm: {f"{m:g}": w.figures() for m, w in ones.items()} for arm, ones in by_arm.items()}
    peak = ours.get(PEAK)
    ratio, spread = high_ratio(ours)
    refusals = quantiles([one.total_s * 1e3 for one in _at_once(ours.values())])
    return {
        "high_ttft_p99_ratio_4x": ratio,
        "goodput_4x_over_peak": over_peak(ours),
        "refusal_p99_ms": refusals["p99"],
        "abandoned_token_share": None if peak is None else peak.abandoned()["token_share"],
        "low_granted_share_4x": None if peak is None else (peak.granted_share() or {}).get(LOW),
        "attainment": {m: one["attainment"] for m, one in figures.get(OURS, {}).items()},
        "cpu": {m: one["cpu"] for m, one in figures.get(OURS, {}).items()},
        "fifo": summary(by_arm.get(FIFO, {}), figures.get(FIFO, {})),
        "vllm": summary(by_arm.get(VLLM, {}), figures.get(VLLM, {})),
        "high_ttft_p90_ratio_4x": high_ratio(ours, 0.9)[0],
        "high_4x": None if peak is None else summary_of(peak, HIGH),
        "bars": BARS,
        "high_ttft_p99_ratio_interval": spread,
        "refusal_ms": refusals,
        "other_core_at_peak": max((w.cpu()["other_core"] for w in ours.values()), default=None),
        "levels": levels.as_json(),
        "windows": figures,
        "conditions": dict(conditions),
    }


def _at_once(windows: Sequence[Window] | Any) -> list[Decision]:
    return [one for w in windows for one in w.decisions if one.refused is not None and one.on_arrival]


def summary_of(window: Window, group: str) -> dict[str, Any]:
    """What can be told of a group however few it are: how many asked, how many were answered, and the median."""
    first_ms = _firsts(window.of_group(group))
    p50 = lower_quantile(first_ms, 0.5)
    return {"offered": len(window.of_group(group)), "answered": len(first_ms), "p50_ms": _short(p50)}


def high_ratio(ours: Mapping[float, Window], q: float = 0.99) -> tuple[float | str | None, list[float] | None]:
    """p99, or p90, of the first token of `high` at the peak over that at `BASE`, over all offered; with a bootstrap
    interval. `TOO_FEW`: of either there are fewer than that takes."""
    if PEAK not in ours or BASE not in ours:
        return None, None
    top, base = (np.asarray(ours[m].firsts_ms(HIGH)) for m in (PEAK, BASE))
    if min(len(top), len(base)) < (ENOUGH_P99 if q > 0.9 else ENOUGH_P90):
        return TOO_FEW, None
    rng = np.random.default_rng(1)

    def ratio(a: Any, b: Any) -> float:
        over = lower_quantile(a, q)
        under = lower_quantile(b, q)
        return np.inf if over is None or not under or not np.isfinite(over) else over / under

    drawn = [ratio(rng.choice(top, len(top)), rng.choice(base, len(base))) for _ in range(RESAMPLES)]
    found = ratio(top, base)
    ends = interval(drawn) if np.isfinite(drawn).all() else None
    return (shorten(found) if np.isfinite(found) else None), ends and [shorten(end) for end in ends]


def over_peak(windows: Mapping[float, Window]) -> float | None:
    """Goodput at the last multiple over the best of any."""
    best = max((w.goodput for w in windows.values()), default=0.0)
    return shorten(windows[PEAK].goodput / best) if PEAK in windows and best else None


def summary(windows: Mapping[float, Window], figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """The headline figures of another arm; None: it was not run."""
    if not windows:
        return None
    top = windows.get(PEAK)
    return {
        "high_ttft_p99_ratio_4x": high_ratio(windows)[0],
        "high_ttft_p90_ratio_4x": high_ratio(windows, 0.9)[0],
        "high_4x": None if top is None else summary_of(top, HIGH),
        "goodput_4x_over_peak": over_peak(windows),
        "abandoned_token_share": None if top is None else top.abandoned()["token_share"],
        "low_granted_share_4x": None if top is None else (top.granted_share() or {}).get(LOW),
        "attainment": {m: one["attainment"] for m, one in figures.items()},
        "goodput_tokens_per_s": {m: one["goodput_tokens_per_s"] for m, one in figures.items()},
        "high_ttft_ms": {m: one["ttft_ms"][HIGH] for m, one in figures.items()},
        "cpu": {m: one["cpu"] for m, one in figures.items()},
    }


def _firsts(some: Answers | list[Answer]) -> list[float]:
    return [one.first_s * 1e3 for one in some if one.first_s is not None]


def _short(value: float | None) -> float | None:
    return None if value is None else shorten(value)


def progress_line(window: Window) -> str:
    """One line about a window that has just been measured."""
    figures = window.figures()
    high = figures["ttft_ms"][HIGH]
    met = figures["attainment"]
    cpu = figures["cpu"]
    left = f", LEFT {figures['left_afterwards']}" if figures["left_afterwards"] else ""
    return (
        f"{window.arm:>7} {window.multiple:g}x: {figures['goodput_tokens_per_s']:.0f} of "
        f"{figures['tokens_per_s']:.0f} tokens a second good; high TTFT p50 {high['p50']} p99 "
        f"{high['p99']} ms (n {high['n']} of {high['offered']}); met {met[HIGH]} / {met['normal']} / {met[LOW]}; cores "
        f"{cpu['engine_core']:.2f} + {cpu['other_core']:.2f}, others "
        f"{cpu['foreign']:.2f}; failed {figures['failed']}{left}"
    )


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Every window, and the bars."""
    table = Table(title="open loop: first token, attainment (of all offered), goodput, cores")
    columns = ("arm", "load", "high p50 ms", "high p99 ms", "n", "normal p99", "low p99", "met high/normal/low")
    for column in (*columns, "good tokens/s", "tokens/s", "refused", "left", "engine", "other"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, by_multiple in result["windows"].items():
        for multiple, figures in by_multiple.items():
            ttft = figures["ttft_ms"]
            met = figures["attainment"]
            ends = [sum(by.get(how, 0) for by in figures["outcomes"].values()) for how in ("refused", "abandoned")]
            cells = [_cell(ttft[HIGH]["p50"]), _cell(ttft[HIGH]["p99"]), str(ttft[HIGH]["n"])]
            cells += [_cell(ttft[group]["p99"]) for group in GROUPS[1:]]
            cells.append(" ".join(_cell(met[group]) for group in GROUPS))
            cells += [f"{figures['goodput_tokens_per_s']:.0f}", f"{figures['tokens_per_s']:.0f}", *map(str, ends)]
            cells += [f"{figures['cpu'][core]:.2f}" for core in ("engine_core", "other_core")]
            table.add_row(arm, f"{multiple}x", *cells)
        table.add_section()
    console.print(table)
    bars = Table(title="bars")
    for column in ("figure", "value", "bar", "fifo", "vLLM's server"):
        bars.add_column(column, justify="left" if column == "figure" else "right")
    for name, bar in BARS.items():
        value = result[name]
        known = isinstance(value, float | int)
        met = known and (value >= bar if name in AT_LEAST else value <= bar)
        verdict = "not known" if not known else "met" if met else "MISSED"
        others = [_cell((result[arm] or {}).get(name)) for arm in (FIFO, VLLM)]
        sign = "at least" if name in AT_LEAST else "at most"
        bars.add_row(name, _cell(value), f"{sign} {bar:g}: {verdict}", *others)
    other = result["other_core_at_peak"]
    bars.add_row("other core at its peak", _cell(other), f"under {OTHER_CORE_BAR:g}", "", "")
    console.print(bars)


def _cell(value: float | str | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:g}"
