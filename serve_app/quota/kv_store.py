"""Values that all processes of a Ray cluster share and that outlive each process: in the GCS's key-value store.

The quota actor's values have names; `is_readable` says whether this version can read one.

The GCS requires Ray's token. With Redis behind the GCS, the values survive the loss of the head node.
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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

VALUE_TYPES: dict[str, Any] = {  # type of the value, by the first part of its name
    EPOCH: int,
    INVENTORY: QuotaSettings,
    EntryKind.ENGINE: EngineReport,
    EntryKind.ROUTER: frozenset | None,
    EntryKind.SESSION: SessionEntry,
    EntryKind.RESERVATION: Reservation,
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
    """The actor's values by name. Each call is a round trip to the GCS and raises Ray's errors if the GCS is down.

    Values are pickled: only this application writes here, and the token that protects them also permits running code.
    """

    def put(self, name: str, value: Any) -> None:
        """Store a value; replaces an earlier one of this name."""
        internal_kv._internal_kv_put(PREFIX + name.encode(), pickle.dumps(value), overwrite=True, namespace=NAMESPACE)

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
        names = internal_kv._internal_kv_list(PREFIX, namespace=NAMESPACE)
        found = {bytes(name): internal_kv._internal_kv_get(name, namespace=NAMESPACE) for name in names}
        return {name.removeprefix(PREFIX).decode(): _read(value) for name, value in found.items() if value is not None}


def _read(value: bytes) -> Any:
    try:
        found = pickle.loads(value)
        repr(found)  # an object of an earlier version, which lacks a field, fails here
    except Exception as error:  # noqa: BLE001 - pickle raises any error of its classes
        return Unreadable(repr(error))
    return found


def is_readable(name: str, value: Any) -> bool:
    """Whether this version stores such a value under this name."""
    kind = name.partition(":")[0]
    if kind + ":" == NODE:
        return isinstance(value, list) and all(isinstance(device, Device) for device in value)
    return kind in VALUE_TYPES and isinstance(value, VALUE_TYPES[kind])


def checkpoint_entries(stored: dict[str, Any]) -> Iterator[tuple[CheckpointKey, object]]:
    """The checkpoint's entries. An unreadable entry of an engine or router is None: only its existence is known."""
    for name, value in stored.items():
        kind, _, rest = name.partition(":")
        if kind in tuple(EntryKind) and (is_readable(name, value) or kind in (EntryKind.ENGINE, EntryKind.ROUTER)):
            yield (EntryKind(kind), rest), value if is_readable(name, value) else None
