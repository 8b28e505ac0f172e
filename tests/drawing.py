"""The frame of the pictures that are drawn from the code: SVG text on white, so that dark pages show them, too."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 1240
FONT_SIZE = 11


def framed(height: float, parts: Iterable[str], width: int = WIDTH) -> str:
    """The SVG text of a picture with these elements, the last one on top."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{FONT_SIZE}">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def text(
    x: float, y: float, words: str, anchor: str, color: str, *, weight: str = "normal", size: int = FONT_SIZE
) -> str:
    """One line of text. `anchor`: which end of it is at `x`, as `text-anchor` in SVG."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{color}">{escape(words)}</text>'
    )
