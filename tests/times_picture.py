"""Draws `docs/images/times.svg` from `serve_app/core/times.py`: `python -m tests.times_picture`.

A group of the module is a block of rows, a time is a point on a logarithmic axis of seconds with its reason beside it.
"""

from __future__ import annotations

import io
import math
import re
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.core import times
from tests.drawing import framed, text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "times.svg"

MARGIN = 16
ROW = 17
HEAD = 30
# right end of the names, left end of the reasons
NAMES = 176
REASONS = 590
SHORTEST_S = 0.1
LONGEST_S = 3600.0
MARKS_S = (0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Time:
    name: str
    value: float
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    times: list[Time] = field(default_factory=list)


def groups() -> list[Group]:
    """The groups of the module, in its order: a comment after an empty line begins one."""
    source = Path(str(times.__file__)).read_text()
    lines = source.split("\n")
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: list[Group] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("# ") and not lines[number - 2]:
            found.append(Group(comments[number]))
        elif named := re.match(r"([A-Z_]+) = ", line):
            found[-1].times.append(Time(named[1], getattr(times, named[1]), comments.get(number, "")))
    return found


def picture() -> str:
    """The SVG text."""
    blocks = groups()
    height = 2 * MARGIN + sum(HEAD + ROW * len(block.times) for block in blocks)
    parts: list[str] = []
    for seconds in MARKS_S:
        at = _at(seconds)
        parts.append(f'<path d="M{at:.0f} {MARGIN + 14}V{height - MARGIN}" stroke="#e2e8f0"/>')
        parts.append(text(at, MARGIN + 8, f"{seconds:g} s", "middle", "#64748b"))
    top = MARGIN
    for block in blocks:
        parts.append(text(MARGIN, top + HEAD - 8, block.title, "start", "#0f172a", weight="bold"))
        top += HEAD
        for time in block.times:
            middle = top + ROW / 2
            unit = " s" if time.name.endswith("_S") else ""
            parts.append(text(NAMES, middle + 4, time.name, "end", "#0f172a"))
            parts.append(text(NAMES + 60, middle + 4, f"{time.value:g}{unit}", "end", "#334155"))
            if unit:
                parts.append(f'<circle cx="{_at(time.value):.0f}" cy="{middle:.0f}" r="4" fill="#0f766e"/>')
            parts.append(text(REASONS, middle + 4, time.reason, "start", "#334155"))
            top += ROW
    return framed(height, parts)


def _at(seconds: float) -> float:
    """Where a time is on the axis."""
    share = math.log(seconds / SHORTEST_S) / math.log(LONGEST_S / SHORTEST_S)
    left = NAMES + 80
    return left + share * (REASONS - 30 - left)


if __name__ == "__main__":
    PICTURE.write_text(picture())
