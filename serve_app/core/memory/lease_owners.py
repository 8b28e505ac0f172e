"""Owners of leases with their heartbeats, and deadlines of what expires without them.

Invariant: `due` finds each name once, at its end, unless the end was postponed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from serve_app.core.memory.lease_tree import LeaseNode


class Owner:
    """A process that sends heartbeats, and its leases in order of creation."""

    __slots__ = ("expires_at", "leases", "ttl_s")

    def __init__(self, ttl_s: float, now: float) -> None:
        self.ttl_s = ttl_s
        self.expires_at = now + ttl_s
        self.leases: dict[str, LeaseNode] = {}

    def heartbeat(self, now: float) -> None:
        """Extend the expiry; an older heartbeat changes nothing."""
        self.expires_at = max(self.expires_at, now + self.ttl_s)


class Deadlines:
    """Names with the time at which to check them; postponed lazily, so that a heartbeat costs nothing here.

    Invariant: a name has one valid entry, however often it is set.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, str]] = []
        self._earliest: dict[str, float] = {}
        self._order = itertools.count()

    def set(self, name: str, at: float) -> None:
        """Check a name at this time, or earlier if set before. O(log n)."""
        known = self._earliest.get(name)
        if known is None or at < known:
            self._earliest[name] = at
            heapq.heappush(self.entries, (at, next(self._order), name))

    def due(self, now: float, ends_at: Callable[[str], float | None]) -> str | None:
        """A name whose end, by `ends_at`, is reached; None: no more. `ends_at` returns None for a name that is gone or
        has no end."""
        while self.entries and self.entries[0][0] <= now:
            entry_at, _, name = heapq.heappop(self.entries)
            if self._earliest.get(name) != entry_at:
                continue  # set again, to an earlier time
            del self._earliest[name]
            at = ends_at(name)
            if at is not None and at <= now:
                return name
            if at is not None:
                self.set(name, at)
        return None
