"""What outlives the quota actor: who holds something, by kind and name, and what has to be stored of that.

Changes are taken in the order of the last one of each key: what was given up is forgotten before another one has it.

Invariant: what `take_changes` has given so far, applied in order, is what the roster is.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from serve_app.core.memory.reports import EngineReport
from serve_app.core.memory.reservations import Berth
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


@dataclass(frozen=True, slots=True)
class RouterEntry:
    """A router on the roster: the engines on which it may hold something. It grows before the router hears of another
    one, and forgets those that have left."""

    engines: frozenset[str] = frozenset()


Value = EngineEntry | RouterEntry | Reserved | Berth | None  # None: nothing is known of it but its key
Key = tuple[Entry, str]
Changes = dict[Key, tuple[bool, Value]]  # what has to be stored (True) or forgotten (False)


class Roster:
    """Entries by key, and what of them is not stored yet."""

    def __init__(self, entries: Mapping[Key, Value]) -> None:
        self._entries = dict(entries)
        self._changes: Changes = {}
        self._taken: Changes = {}  # on their way to where they are stored

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
            self._change(key, True, value)

    def forget(self, key: Key) -> None:
        if key in self._entries:
            del self._entries[key]
            self._change(key, False, None)

    def unstored(self, name: str = "", kinds: Container[Entry] = tuple(Entry)) -> bool:
        """Whether an entry of this name, or of these kinds, has changed and is not stored. O(such entries)."""
        return any(key[1] == name or key[0] in kinds for key in (*self._taken, *self._changes))

    def take_changes(self) -> Changes:
        """What is to be stored or forgotten next; `stored` or `not_stored` says what became of it."""
        self._taken, self._changes = self._changes, {}
        return self._taken

    def stored(self) -> None:
        """What was taken last is stored."""
        self._taken = {}

    def not_stored(self, changes: Changes) -> None:
        """Storing failed: they are to be taken again, but for those that have changed since."""
        since = self._changes
        self._changes = {key: change for key, change in changes.items() if key not in since} | since
        self._taken = {}

    def _change(self, key: Key, keep: bool, value: Value) -> None:
        self._changes.pop(key, None)
        self._changes[key] = (keep, value)
