"""A chart of slots over time: a row for each slot of an engine, a bar for each stretch in which a request runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tests.drawing import text

WIDTH = 880
LEFT = 92  # of the time axis
RIGHT = 24
ROW = 26
BAR = 20
TEXT = "#0f172a"
PALE_TEXT = "#475569"


class Colour(NamedTuple):
    """Of a group of requests: of its bars, their edges, and its name in the legend."""

    fill: str
    edge: str
    label: str


@dataclass(slots=True)
class Stretch:
    """A request runs in a slot. `ends_s`: None: it still runs."""

    request: str
    group: str
    slot: int
    begins_s: float
    ends_s: float | None = None
    is_stopped: bool = False  # at its end it was stopped for another, and continues later


def at_x(seconds: float, span_s: float) -> float:
    """Where a moment is on the time axis."""
    return LEFT + seconds / span_s * (WIDTH - LEFT - RIGHT)


def legend(y: float, colours: Mapping[str, Colour]) -> list[str]:
    """The names of the groups, in a row."""
    parts = []
    x = float(LEFT)
    for colour in colours.values():
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" rx="2" fill="{colour.fill}" '
            f'stroke="{colour.edge}"/>'
        )
        parts.append(text(x + 18, y, colour.label, "start", TEXT, size=12))
        x += 40 + 6.4 * len(colour.label)
    return parts


def axis(top: float, bottom: float, span_s: float, marks_s: Iterable[float], unit: str = " s") -> list[str]:
    """Vertical marks of time, with their seconds below."""
    parts = []
    for seconds in marks_s:
        x = at_x(seconds, span_s)
        parts.append(f'<path d="M{x:.1f} {top:.0f}V{bottom:.0f}" stroke="#e2e8f0"/>')
        parts.append(text(x, bottom + 14, f"{seconds:g}{unit}", "middle", PALE_TEXT))
    return parts


def chart(
    top: float, slots: int, span_s: float, stretches: Iterable[Stretch], colours: Mapping[str, Colour]
) -> list[str]:
    """The rows of the slots and the bars in them."""
    parts = []
    for slot in range(slots):
        y = top + ROW * slot
        parts.append(text(LEFT - 10, y + ROW / 2 + 4, f"slot {slot + 1}", "end", TEXT, size=12))
        parts.append(
            f'<rect x="{LEFT}" y="{y + (ROW - BAR) / 2:.0f}" width="{WIDTH - LEFT - RIGHT}" height="{BAR}" '
            'fill="#f8fafc" stroke="#e2e8f0"/>'
        )
    for stretch in stretches:
        colour = colours[stretch.group]
        begins = at_x(stretch.begins_s, span_s)
        ends = at_x(span_s if stretch.ends_s is None else min(span_s, stretch.ends_s), span_s)
        y = top + ROW * stretch.slot + (ROW - BAR) / 2
        dashes = ' stroke-dasharray="4 3"' if stretch.is_stopped else ""
        parts.append(
            f'<rect x="{begins:.1f}" y="{y:.0f}" width="{ends - begins:.1f}" height="{BAR}" rx="3" '
            f'fill="{colour.fill}" stroke="{colour.edge}"{dashes}/>'
        )
        parts.append(text((begins + ends) / 2, y + 14, stretch.request, "middle", TEXT, size=11))
    return parts
