"""The HTML page of a comparison: one file without script, and without anything from elsewhere. Pure.

A chart is an SVG that is stretched to the page's width, with its labels beside it as text, so that these stay readable
on a phone. Colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import PurePath

from serve_app.cli.simulate.figures import ArmResult, Comparison
from serve_app.cli.simulate.panels import COLOURS, Bar, ChartLine, Panel, bars, panels, time_ticks, value_ticks
from serve_app.cli.simulate.verdict import money, percent

WIDTH = 1000  # of a chart's own coordinates
HEIGHT = 240
STYLE = "page.css"
MEETS = {True: "meets every level", False: "misses a level", None: ""}


def page(found: Comparison) -> str:
    """The whole page."""
    title, costs = bars(found)
    name = escape(f"Capacity for {PurePath(found.trace.file).name}")
    body = [
        f"<h1>{name}</h1>",
        f"<p class=answer>{escape(found.recommendation.text)}</p>",
        f"<p class=quiet>{escape(_traffic(found))}</p>",
        _table(found),
        *([_legend(found.arms)] if len(found.arms) > 1 else []),
        *map(_chart, panels(found)),
        _bars(title, costs),
        "<h2>Read this with care</h2><ul class=quiet>",
        *(f"<li>{escape(note)}</li>" for note in [*_profiles(found), *found.notes]),
        "</ul>",
    ]
    style = resources.files("serve_app.cli.simulate").joinpath(STYLE).read_text(encoding="utf-8")
    return (
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n"
        "<meta name=viewport content='width=device-width, initial-scale=1'>\n"
        "<meta name=color-scheme content='light dark'>\n"
        f"<title>{name}</title>\n<style>\n{style}</style>\n<main>\n" + "\n".join(body) + "\n</main>\n</html>\n"
    )


def _breakable(name: str) -> str:
    """A name that may be broken after its signs."""
    return re.sub(r"([,_=])", r"\1<wbr>", escape(name))


def _traffic(found: Comparison) -> str:
    trace = found.trace
    minutes = trace.span_s / 60
    faster = f", {trace.scale:g} times as fast as recorded" if trace.scale != 1 else ""
    return (
        f"{trace.requests:,} requests in {minutes:,.0f} minutes{faster}; {trace.prompt_tokens / trace.requests:,.0f} "
        f"prompt and {trace.output_tokens / trace.requests:,.0f} output tokens each in the mean. "
        f"Configuration: {found.config}."
    )


def _profiles(found: Comparison) -> Iterator[str]:
    for model, profile in found.profiles.items():
        yield f"{model}: profile {profile['name']} ({profile['source']})"


def _table(found: Comparison) -> str:
    head = ["arm", "replicas", "GPUs", "GPU hours", "cost", "class", "level", "in time", "p50", "p99", "refused"]
    rows = [row for arm in found.arms for row in _rows(arm, is_best=arm.name == found.recommendation.arm)]
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _rows(arm: ArmResult, *, is_best: bool) -> Iterator[str]:
    """A row for each class; the arm's own figures are in the first."""
    span = max(1, len(arm.classes))
    own = [
        f"{arm.replicas_mean:.1f} (most {arm.replicas_peak})",
        f"{arm.gpus_mean:.1f} (most {arm.gpus_peak})",
        f"{arm.gpu_hours:.1f}",
        money(arm.cost),
    ]
    name = f"{_breakable(arm.name)}{'<br><small>take this</small>' if is_best else ''}"
    cells = "".join(f"<td rowspan={span}>{cell}</td>" for cell in [name, *map(escape, own)])
    for number, each in enumerate(arm.classes):
        level = "-" if each.level_s is None else f"{each.level_s:g} s"
        found = [
            each.request_class,
            level,
            percent(each.attainment),
            seconds(each.ttft_p50_s),
            seconds(each.ttft_p99_s),
        ]
        of_class = "".join(f"<td>{escape(cell)}</td>" for cell in [*found, str(each.refused)])
        mark = " class=best" if is_best else ""
        yield f"<tr{mark}>{cells if not number else ''}{of_class}</tr>"


def seconds(value: float | None) -> str:
    """A duration to two or three digits."""
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def _legend(arms: Sequence[ArmResult]) -> str:
    entries = (f"<li>{_swatch(ChartLine(arm.name, number, ()))}</li>" for number, arm in enumerate(arms))
    return f"<ul class=legend>{''.join(entries)}</ul>"


def _swatch(line: ChartLine) -> str:
    """A line's name with its colour."""
    line_class = _class_of(line)
    return f"<svg viewBox='0 0 20 4' class=swatch><path d='M0 2H20' class='{line_class}'/></svg>{_breakable(line.name)}"


def _chart(panel: Panel) -> str:
    ticks = [(value, _y(panel, value)) for value in value_ticks(panel)]
    grid = "".join(f"<path class=grid d='M0 {y:.1f}H{WIDTH}'/>" for _, y in ticks)
    levels = "".join(f"<path class=level d='M0 {_y(panel, level):.1f}H{WIDTH}'/>" for level in panel.levels)
    lines = "".join(
        f"<path class='{_class_of(line)}' d='{_path(panel, line)}'><title>{escape(line.name)}</title></path>"
        for line in panel.lines
    )
    ys = "".join(f"<span style='top:{100 * y / HEIGHT:.1f}%'>{value:g}</span>" for value, y in ticks)
    xs = "".join(
        f"<span style='left:{100 * at / panel.span_s:.1f}%'>{name}</span>" for at, name in time_ticks(panel.span_s)
    )
    names = ", ".join(f"dotted: the level, {level:g} s" for level in panel.levels)
    of_classes = [line for line in panel.lines if line.is_class]
    keys = " ".join(f"<span class=key>{_swatch(line)}</span>" for line in of_classes if len(of_classes) > 1)
    return (
        f"<figure><figcaption><b>{escape(panel.title)}</b>, {escape(panel.unit)}"
        f"{'; ' + names if names else ''} {keys}</figcaption>"
        f"<div class=chart><div class=ys>{ys}</div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio=none role=img aria-label='{escape(panel.title)}'>"
        f"{grid}{levels}{lines}</svg><div class=xs>{xs}</div></div></figure>"
    )


def _class_of(line: ChartLine) -> str:
    if line.is_class:
        return f"line c{line.number}"
    return f"line s{line.number % COLOURS}{' dashed' if line.is_dashed else ''}"


def _y(panel: Panel, value: float) -> float:
    low, high = panel.bounds
    if panel.is_log:
        return HEIGHT * (1.0 - math.log(max(value, low) / low) / math.log(high / low))
    return HEIGHT * (1.0 - (value - low) / (high - low))


def _path(panel: Panel, line: ChartLine) -> str:
    """The line; where there was nothing to measure it has a gap."""
    parts = []
    is_drawn = False
    for step, value in enumerate(line.values):
        if value is not None:
            x = WIDTH * (step + 0.5) * panel.step_s / panel.span_s
            parts.append(f"{'L' if is_drawn else 'M'}{x:.1f} {_y(panel, value):.1f}")
            if not is_drawn:
                parts.append("h.1")  # a value between two gaps is a dot
        is_drawn = value is not None
    return "".join(parts)


def _bars(title: str, costs: Sequence[Bar]) -> str:
    most = max(bar.value for bar in costs) or 1.0
    rows = "".join(
        f"<li><span>{_breakable(bar.name)}</span><span class=bar><i class='b{bar.number % COLOURS}' "
        f"style='width:{100 * bar.value / most:.1f}%'></i></span><span>{escape(bar.text)}"
        f"<small>{MEETS[bar.meets]}</small></span></li>"
        for bar in costs
    )
    return f"<figure><figcaption><b>{title}</b></figcaption><ul class=bars>{rows}</ul></figure>"
