"""Checkpoint: the holders of leases, by kind and name, which outlive the quota actor, and the unstored changes of it.

Changes are ordered by the last change of each key: a freed holding is forgotten before its next holder is stored.

Whoever keeps engines, routers, sessions and reservations puts them here at once.

Invariant: all changes that were stored, and `changes` after them, give the checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping


class EntryKind(enum.StrEnum):
    """Kind of a checkpoint entry, the first part of its key; in the order in which entries are restored."""

    ENGINE = "engine"
    ROUTER = "router"
    RESERVATION = "berth"
    SESSION = "session"


CheckpointKey = tuple[EntryKind, str]
CheckpointChanges = dict[CheckpointKey, tuple[bool, object]]  # to store (True) or to delete (False)


class Checkpoint:
    """Entries by key, and their unstored changes.

    The value of an engine is its last `EngineReport`, with its grant in `holds`. That of a router is the set of engines
    on which it may have an account: an engine is added before the router is informed of the account; ended engines are
    removed. The others are a `Reservation` or a `SessionEntry`. None: unreadable, only the key is known.
    """

    def __init__(self, entries: Mapping[CheckpointKey, object]) -> None:
        self._entries = dict(entries)
        self._changes: CheckpointChanges = {}  # not confirmed as stored

    def __contains__(self, key: CheckpointKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[tuple[CheckpointKey, object]]:
        return iter(list(self._entries.items()))

    def get(self, key: CheckpointKey) -> object:
        return self._entries.get(key)

    def put(self, key: CheckpointKey, value: object) -> None:
        if key not in self._entries or self._entries[key] != value:
            self._entries[key] = value
            self._changes.pop(key, None)
            self._changes[key] = (True, value)

    def forget(self, key: CheckpointKey) -> None:
        if key in self._entries:
            del self._entries[key]
            self._changes.pop(key, None)
            self._changes[key] = (False, None)

    def unstored(self, name: str = "", kinds: Container[EntryKind] = tuple(EntryKind)) -> bool:
        """Whether an entry of this name, or of these kinds, has an unstored change. O(changes)."""
        return any(key[1] == name or key[0] in kinds for key in self._changes)

    def changes(self) -> CheckpointChanges:
        """The changes to store next; report them with `stored`, unless storing them has failed."""
        return dict(self._changes)

    def stored(self, changes: CheckpointChanges) -> None:
        """These changes are stored; a key that was changed again since is not."""
        for key, change in changes.items():
            if self._changes.get(key) is change:
                del self._changes[key]
