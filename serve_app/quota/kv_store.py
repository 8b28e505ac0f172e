"""Values that all processes of a Ray cluster share and that outlive each process: in the GCS's key-value store.

The quota actor's values have names and are JSON by their types: a field that another release has added or dropped is
ignored or has its default, so the ledger survives an upgrade in place, and the way back. A value that still cannot be
read is put aside.

The GCS requires Ray's token. With Redis behind the GCS, the values survive the loss of the head node.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from ray.experimental import internal_kv

from serve_app.core.memory import CheckpointKey, Device, EngineReport, EntryKind, Reservation, SessionEntry
from serve_app.settings import QuotaSettings

NAMESPACE = b"serve_app"
PREFIX = b"quota/"  # of the actor's keys
SALT_KEY = b"cache_salt_secret"
QUARANTINE_PREFIX = b"aside/"  # before the key of an unreadable value
SALT_BYTES = 32  # an HMAC-SHA256 key of full strength

EPOCH = "epoch"
INVENTORY = "inventory"  # the settings when the devices were stored
NODE = "node:"  # prefix of a node's id: its devices, in case the node does not answer later

# Type of the value, by the first part of its name.
VALUE_TYPES: dict[str, TypeAdapter[Any]] = {
    EPOCH: TypeAdapter(int),
    INVENTORY: TypeAdapter(QuotaSettings),
    NODE.rstrip(":"): TypeAdapter(list[Device]),
    EntryKind.ENGINE: TypeAdapter(EngineReport),
    EntryKind.ROUTER: TypeAdapter(frozenset[str]),
    EntryKind.SESSION: TypeAdapter(SessionEntry),
    EntryKind.RESERVATION: TypeAdapter(Reservation),
}


def cluster_secret() -> bytes:
    """A secret that is the same for every process of this Ray cluster; the first caller creates it."""
    internal_kv._internal_kv_put(SALT_KEY, secrets.token_bytes(SALT_BYTES), overwrite=False, namespace=NAMESPACE)
    kept = internal_kv._internal_kv_get(SALT_KEY, namespace=NAMESPACE)
    assert kept is not None  # stored above or earlier
    return bytes(kept)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """In place of a stored value that cannot be read, with the reason."""

    why: str


class GcsStore:
    """The actor's values by name. Each call is a round trip to the GCS and waits for it, however long it is away: a
    write that was given up could still arrive, after a later one. Ray ends this process when there is no GCS for a
    minute."""

    def put(self, name: str, value: Any) -> None:
        """Store a value; replaces an earlier one of this name."""
        internal_kv._internal_kv_put(PREFIX + name.encode(), encode(name, value), overwrite=True, namespace=NAMESPACE)

    def delete(self, name: str) -> None:
        """Delete a value; an unknown name changes nothing."""
        internal_kv._internal_kv_del(PREFIX + name.encode(), namespace=NAMESPACE)

    def quarantine(self, name: str) -> None:
        """Move a value, unchanged, under `QUARANTINE_PREFIX` for later inspection; an unknown name changes nothing."""
        key = PREFIX + name.encode()
        kept = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if kept is not None:
            internal_kv._internal_kv_put(QUARANTINE_PREFIX + key, kept, overwrite=True, namespace=NAMESPACE)
            self.delete(name)

    def load_all(self) -> dict[str, Any]:
        """All stored values; `Unreadable` for each one that this version of the application cannot read."""
        keys = internal_kv._internal_kv_list(PREFIX, namespace=NAMESPACE)
        found = {bytes(key): internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys}
        names = {key: key.removeprefix(PREFIX).decode() for key in found}
        return {names[key]: decode(names[key], value) for key, value in found.items() if value is not None}


def encode(name: str, value: Any) -> bytes:
    """A value as it is stored under this name."""
    return VALUE_TYPES[_kind(name)].dump_json(value)


def decode(name: str, stored: bytes) -> Any:
    """The value stored under this name; `Unreadable` if it is none of this version's."""
    kind = VALUE_TYPES.get(_kind(name))
    if kind is None:
        return Unreadable(f"unknown name {name!r}")
    try:
        return kind.validate_json(stored)
    except ValueError as error:
        return Unreadable(str(error))


def _kind(name: str) -> str:
    return name.partition(":")[0]


def checkpoint_entries(stored: dict[str, Any]) -> Iterator[tuple[CheckpointKey, object]]:
    """The checkpoint's entries. An unreadable entry of an engine or router is None: only its existence is known."""
    for name, value in stored.items():
        kind, _, rest = name.partition(":")
        readable = not isinstance(value, Unreadable)
        if kind in tuple(EntryKind) and (readable or kind in (EntryKind.ENGINE, EntryKind.ROUTER)):
            yield (EntryKind(kind), rest), value if readable else None
