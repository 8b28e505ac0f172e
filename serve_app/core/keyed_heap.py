"""A heap whose items can change their key and can be removed.

Invariant: stale entries never outnumber the live ones by more than `SLACK`, so memory follows the live items.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

SLACK = 64  # entries; for fewer, a rebuild costs more than the memory that it frees

Key = tuple[float, ...]
_Entry = tuple[Any, ...]  # the key's numbers, then the item: a flat tuple compares in half the time of a pair


class KeyedHeap:
    """Items by smallest key, ties by the item itself; all keys are of one length. `set` and `discard` are O(log n),
    amortised over rebuilds."""

    __slots__ = ("_live", "entries")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._live: dict[str, tuple[Key, _Entry]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        """The items in arbitrary order."""
        return iter(self._live)

    def in_order(self) -> Iterator[tuple[Key, str]]:
        """The items with their keys, the smallest first, while nothing changes. O(log n) each."""
        ahead = [(self.entries[0], 0)] if self.entries else []  # entries whose parents are done, and where they are
        while ahead:
            entry, at = heapq.heappop(ahead)
            known = self._live.get(entry[-1])
            if known is not None and known[1] is entry:
                yield known[0], entry[-1]
            for child in range(2 * at + 1, min(2 * at + 3, len(self.entries))):
                heapq.heappush(ahead, (self.entries[child], child))

    def set(self, item: str, key: Key) -> None:
        """Add an item, or replace its key."""
        known = self._live.get(item)
        if known is not None and known[0] == key:
            return
        entry = (*key, item)
        self._live[item] = key, entry
        heapq.heappush(self.entries, entry)
        if len(self.entries) > 2 * len(self._live) + SLACK:
            self._rebuild()

    def replace_first(self, key: Key) -> None:
        """Replace the key of the item that `peek` has just returned; half the cost of `set`."""
        item = self.entries[0][-1]
        entry = (*key, item)
        self._live[item] = key, entry
        heapq.heapreplace(self.entries, entry)

    def discard(self, item: str) -> None:
        """Remove an item; an unknown item changes nothing."""
        if self._live.pop(item, None) is not None and len(self.entries) > 2 * len(self._live) + SLACK:
            self._rebuild()

    def peek(self) -> tuple[Key, str] | None:
        """The smallest key and its item; None when empty."""
        entries = self.entries
        while entries:
            entry = entries[0]
            item: str = entry[-1]
            known = self._live.get(item)
            if known is not None and known[1] is entry:
                return known[0], item
            heapq.heappop(entries)
        return None

    def _rebuild(self) -> None:
        self.entries = [entry for _, entry in self._live.values()]
        heapq.heapify(self.entries)
