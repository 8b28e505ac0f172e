"""Draws `docs/images/rooms.svg` from the code: `python -m tests.rooms_picture`.

Floors and rooms are those of `tests.house_rules`; the words in a room are the first line of its docstring. An arrow
means "imports". An arrow is left out where another path leads to the same room, and where it leads to the two lowest
floors, which everybody uses. `tests/test_docs.py` compares the file with the code, so the picture is never outdated.
"""

from __future__ import annotations

import ast
import math
import textwrap
from pathlib import Path

from tests.drawing import WIDTH, framed, text
from tests.house_rules import FLOOR_OF, FLOORS, GROUPS, House
from tests.test_house import SHIPPED, sources

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "rooms.svg"

MARGIN = 20
GAP = 18
BOX_HEIGHT = 74
ROW_HEIGHT = 96
MAX_IN_ROW = 7  # a floor of more rooms has several rows, since names need their width
MAX_LINES = 4
MAX_BOX_WIDTH = 290
DRAWN_FROM = 2  # the lowest floor to which arrows are drawn


def picture(house: House) -> str:
    """The SVG text."""
    boxes = _boxes()
    bottoms = _bottoms()
    height = bottoms[0] + MARGIN
    parts = [
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#64748b"/></marker></defs>',
    ]
    for floor in range(len(FLOORS)):
        if floor % 2:
            above = bottoms[floor + 1]
            band = f'y="{MARGIN // 2 + above}" width="{WIDTH}" height="{bottoms[floor] - above}"'
            parts.append(f'<rect {band} fill="#f8fafc"/>')
    for source, target in _arrows(house):
        x1, y1, w1 = boxes[source]
        x2, y2, w2 = boxes[target]
        start = (x1 + w1 / 2, y1 + BOX_HEIGHT)
        end = (x2 + w2 / 2, y2 - 1)
        bend = (end[1] - start[1]) * 0.5
        parts.append(
            f'<path d="M{start[0]:.0f} {start[1]:.0f}C{start[0]:.0f} {start[1] + bend:.0f} {end[0]:.0f} '
            f'{end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}" fill="none" stroke="#64748b" stroke-width="1.2" '
            'stroke-opacity=".7" marker-end="url(#head)"/>'
        )
    for room, (left, top, width) in boxes.items():
        core = room.startswith("serve_app.core") or room == "autoscaling.policies"
        fill, edge = ("#ecfdf5", "#0f766e") if core else ("#f1f5f9", "#334155")
        parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="7" '
            f'fill="{fill}" stroke="{edge}"/>'
        )
        middle = left + width / 2
        parts.append(text(middle, top + 17, shown(room), "middle", "#0f172a", weight="bold", size=13))
        for number, line in enumerate(_words(house, room, width)):
            parts.append(text(middle, top + 31 + 12 * number, line, "middle", "#334155", size=10))
    return framed(height, parts)


def shown(room: str) -> str:
    """A room's name in the picture."""
    return room.removeprefix("serve_app.")


def _rows(rooms: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The rooms of a floor in rows that are equally long, or nearly."""
    most = math.ceil(len(rooms) / math.ceil(len(rooms) / MAX_IN_ROW))
    return [rooms[first : first + most] for first in range(0, len(rooms), most)]


def _bottoms() -> list[int]:
    """How far below the picture's top each floor ends, from the lowest floor up; the last is 0."""
    heights = [ROW_HEIGHT * len(_rows(rooms)) for rooms in FLOORS]
    return [sum(heights[floor:]) for floor in range(len(FLOORS) + 1)]


def _boxes() -> dict[str, tuple[float, float, float]]:
    """Left, top and width of each room; the lowest floor is at the bottom."""
    boxes = {}
    bottoms = _bottoms()
    for floor, rooms in enumerate(FLOORS):
        for row, among in enumerate(_rows(rooms)):
            top = MARGIN / 2 + bottoms[floor + 1] + ROW_HEIGHT * row + (ROW_HEIGHT - BOX_HEIGHT) / 2
            width = min(MAX_BOX_WIDTH, (WIDTH - 2 * MARGIN - GAP * (len(among) - 1)) / len(among))
            left = (WIDTH - width * len(among) - GAP * (len(among) - 1)) / 2
            for number, room in enumerate(among):
                boxes[room] = (left + number * (width + GAP), top, width)
    return boxes


def _arrows(house: House) -> list[tuple[str, str]]:
    """Imports between rooms, without those that another path implies."""
    found = {(ours, theirs) for _, ours, theirs in house.between_rooms() if not {ours, theirs} & GROUPS}
    below: dict[str, set[str]] = {}
    for ours, theirs in found:
        below.setdefault(ours, set()).add(theirs)

    def under(room: str) -> set[str]:
        return below.get(room, set()).union(*(under(one) for one in below.get(room, ())))

    return sorted(
        (ours, theirs)
        for ours, theirs in found
        if FLOOR_OF[theirs] >= DRAWN_FROM and not any(theirs in under(one) for one in below[ours] if one != theirs)
    )


def _words(house: House, room: str, width: float) -> list[str]:
    words = (ast.get_docstring(house.trees[room]) or "").split("\n", 1)[0] if room in house.trees else ""
    return textwrap.wrap(words, max(12, int(width / 5.6)))[:MAX_LINES]


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(House(sources(*SHIPPED))))
