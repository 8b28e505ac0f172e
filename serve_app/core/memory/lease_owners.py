"""Who holds leases and is still heard of, and what comes due when nobody says a word.

Invariant: whatever has a moment at which it ends is found by `due` at that moment, once, unless that was put off.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from serve_app.core.memory.lease_tree import LeaseNode


class Owner:
    """A process that sends heartbeats, and its leases in the order they came."""

    __slots__ = ("expires_at", "leases", "ttl_s")

    def __init__(self, ttl_s: float, now: float) -> None:
        self.ttl_s = ttl_s
        self.expires_at = now + ttl_s
        self.leases: dict[str, LeaseNode] = {}

    def beat(self, now: float) -> None:
        """It was heard of; an older word changes nothing."""
        self.expires_at = max(self.expires_at, now + self.ttl_s)


class Alarms:
    """Names with the moment at which to look at them; put off lazily, so that a heartbeat costs nothing here.

    Invariant: a name has one entry that counts, however often it is set.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, str]] = []
        self._first: dict[str, float] = {}
        self._order = itertools.count()

    def set(self, name: str, at: float) -> None:
        """Look at it then, or before if that was asked for. O(log n)."""
        known = self._first.get(name)
        if known is None or at < known:
            self._first[name] = at
            heapq.heappush(self._entries, (at, next(self._order), name))

    def due(self, now: float, ends_at: Callable[[str], float | None]) -> str | None:
        """A name whose end, as `ends_at` knows it, has come; None: no other. None of `ends_at`: it is gone, or has no
        end any more."""
        while self._entries and self._entries[0][0] <= now:
            entry_at, _, name = heapq.heappop(self._entries)
            if self._first.get(name) != entry_at:
                continue  # asked for again, and earlier
            del self._first[name]
            at = ends_at(name)
            if at is not None and at <= now:
                return name
            if at is not None:
                self.set(name, at)
        return None
