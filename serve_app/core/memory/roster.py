"""What outlives the quota actor: who holds something, by kind and name, and what has to be stored of that.

Invariant: what `take_changes` has given so far, applied in order, is what the roster is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_app.core.memory.berths import Berth
from serve_app.core.memory.grants import EngineReport
from serve_app.core.memory.sessions import Reserved


class Entry(enum.StrEnum):
    """What the roster knows; the first part of an entry's key."""

    ENGINE = "engine"
    ROUTER = "router"
    SESSION = "session"
    BERTH = "berth"


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine on the roster: its last word, with what it was granted in `holds`."""

    told: EngineReport


Value = EngineEntry | Reserved | Berth | None  # a router's entry has nothing but its key
Key = tuple[Entry, str]
Changes = dict[Key, tuple[bool, Value]]  # what has to be stored (True) or forgotten (False)


class Roster:
    """Entries by key, and what of them is not stored yet."""

    def __init__(self, entries: Mapping[Key, Value]) -> None:
        self._entries = dict(entries)
        self._changes: Changes = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[tuple[Key, Value]]:
        return iter(list(self._entries.items()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value:
        return self._entries.get(key)

    def put(self, key: Key, value: Value) -> None:
        if key not in self._entries or self._entries[key] != value:
            self._entries[key] = value
            self._changes[key] = (True, value)

    def forget(self, key: Key) -> None:
        if key in self._entries:
            del self._entries[key]
            self._changes[key] = (False, None)

    def take_changes(self) -> Changes:
        """What has to be stored or forgotten before any answer given so far is sent."""
        changes, self._changes = self._changes, {}
        return changes

    def not_stored(self, changes: Changes) -> None:
        """Storing failed: they are to be taken again, but for those that have changed since."""
        self._changes = {**changes, **self._changes}
