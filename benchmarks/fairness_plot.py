"""Accumulated service of each client over time, one panel an arm, as an SVG: text, so it needs no library to draw.

Invariant: the panels have one scale, so that what differs between them is the service alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from benchmarks.fairness_metric import Answer, Floats, accumulated, clients_of

PANEL_WIDTH, PANEL_HEIGHT = 360, 240
LEFT, TOP, BOTTOM, GAP = 62, 34, 40, 44
POINTS = 121  # a point every five seconds of ten minutes: finer than the eye sees here
COLOURS = ("#d95f02", "#1b6ca8", "#1b9e77", "#7570b3", "#666666")
STYLE = "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}.g{stroke:#ddd}polyline{fill:none;stroke-width:1.6}"


def svg(arms: Mapping[str, Sequence[Answer]], begin_s: float, end_s: float, title: str) -> str:
    """The picture; every arm has the same clients.

    Raises:
        ValueError: no arm, or nobody was served.
    """
    moments = np.linspace(begin_s, end_s, POINTS)
    rows = {name: accumulated(answers, moments) for name, answers in arms.items()}
    top = max((float(each.max()) for each in rows.values()), default=0.0)
    if not top > 0:
        raise ValueError("there is nothing to draw")
    top, step = scale(top)
    width = LEFT + len(rows) * PANEL_WIDTH + (len(rows) - 1) * GAP + 16
    height = TOP + PANEL_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
    ]
    for number, (name, found) in enumerate(rows.items()):
        left = LEFT + number * (PANEL_WIDTH + GAP)
        parts += _grid(left, name, (begin_s, end_s), top, step, labels=not number)
        parts += _lines(left, clients_of(arms[name]), found, top)
    parts.append(f'<text x="14" y="{TOP - 16}">{escape(title)}</text></svg>')
    return "\n".join(parts) + "\n"


def scale(most: float) -> tuple[float, float]:
    """A round end of an axis that has this much, and the step between its marks: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(most / 2))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 5)
    return float(np.ceil(most / step) * step), float(step)


def _grid(left: int, name: str, span: tuple[float, float], top: float, step: float, *, labels: bool) -> list[str]:
    bottom, right = TOP + PANEL_HEIGHT, left + PANEL_WIDTH
    parts = [f'<text class="t" x="{left + 8}" y="{TOP + 16}">{escape(name)}</text>']
    for mark in np.arange(0.0, top + step / 2, step):
        y = round(bottom - mark / top * PANEL_HEIGHT, 1)
        parts.append(f'<line class="g" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
        if labels:
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{mark / 1000:,.0f}k</text>')
    for share in (0.0, 0.5, 1.0):
        x = left + share * PANEL_WIDTH
        at_s = span[0] + share * (span[1] - span[0])
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{at_s:.0f} s</text>')
    return parts


def _lines(left: int, clients: Sequence[str], found: Floats, top: float) -> list[str]:
    parts = []
    bottom = TOP + PANEL_HEIGHT
    for number, (client, row) in enumerate(zip(clients, found, strict=True)):
        points = " ".join(
            f"{left + at / (len(row) - 1) * PANEL_WIDTH:.1f},{bottom - value / top * PANEL_HEIGHT:.1f}"
            for at, value in enumerate(row)
        )
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" stroke="{colour}"><title>{escape(client)}</title></polyline>')
        x, y = left + 8, TOP + 34 + 16 * number
        if len(clients) <= len(COLOURS):
            parts.append(f'<text x="{x}" y="{y}" style="fill:{colour}">{escape(client)}</text>')
    return parts
