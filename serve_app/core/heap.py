"""A heap whose items can change their key and can leave.

Invariant: stale entries never outnumber the live ones by more than `SLACK`, so memory follows what is in it now.
"""

from __future__ import annotations

import heapq

SLACK = 64  # entries; below it a rebuild costs more than the memory it gives back

Key = tuple[float, ...]


class KeyedHeap:
    """Items by smallest key, ties by the item itself. `set` and `discard` are O(log n), amortised over rebuilds."""

    __slots__ = ("_entries", "_keys")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, str]] = []
        self._keys: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, item: str, key: Key) -> None:
        """Put an item in, or give it another key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._entries, (key, item))
        self._tidy()

    def replace_first(self, key: Key) -> None:
        """Give what `peek` has just found another key; half the cost of `set`."""
        item = self._entries[0][1]
        self._keys[item] = key
        heapq.heapreplace(self._entries, (key, item))

    def discard(self, item: str) -> None:
        """Take an item out; one that is not in it changes nothing."""
        if self._keys.pop(item, None) is not None:
            self._tidy()

    def peek(self) -> tuple[Key, str] | None:
        """The smallest key and its item; None when empty."""
        entries = self._entries
        while entries:
            key, item = entries[0]
            if self._keys.get(item) == key:
                return entries[0]
            heapq.heappop(entries)
        return None

    def _tidy(self) -> None:
        if len(self._entries) > 2 * len(self._keys) + SLACK:
            self._entries = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._entries)
