"""How much of a list is shown, and what was left off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

MAX_TEXT_CHARS = 300  # of a reason: two lines of a narrow screen, and whole reasons of our own

Plain = dict[str, Any]
T = TypeVar("T")


class Shown:
    """`left_off`: entries of each list that were left off, of those lists that lack any."""

    def __init__(self) -> None:
        self.left_off: dict[str, int] = {}
        self._shown: dict[str, int] = {}

    def first(self, name: str, entries: Sequence[T], most: int) -> list[T]:
        """The first entries, at most so many over all lists of this name."""
        room = most - self._shown.get(name, 0)
        found = list(entries[:room])
        self._shown[name] = self._shown.get(name, 0) + len(found)
        if len(entries) > len(found):
            self.left_off[name] = self.left_off.get(name, 0) + len(entries) - len(found)
        return found


def cut(text: str) -> str:
    """A text of bounded length."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
