"""The quota actor's entries in the GCS, by name, and whether this version can read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.core.memory import (
    CheckpointKey,
    CheckpointValue,
    Device,
    EngineEntry,
    EntryKind,
    Reservation,
    RouterEntry,
    SessionEntry,
)
from serve_app.settings import QuotaSettings

EPOCH = "epoch"
INVENTORY = "inventory"  # the settings when the devices were stored
NODE = "node:"  # prefix of a node's id: its devices, in case the node does not answer later

VALUE_TYPES: dict[str, Any] = {  # type of the value, by the first part of its name
    EPOCH: int,
    INVENTORY: QuotaSettings,
    EntryKind.ENGINE: EngineEntry,
    EntryKind.ROUTER: RouterEntry | None,
    EntryKind.SESSION: SessionEntry,
    EntryKind.RESERVATION: Reservation,
}


def is_readable(name: str, value: Any) -> bool:
    """Whether this version stores such a value under this name."""
    kind = name.partition(":")[0]
    if kind + ":" == NODE:
        return isinstance(value, list) and all(isinstance(device, Device) for device in value)
    return kind in VALUE_TYPES and isinstance(value, VALUE_TYPES[kind])


def checkpoint_entries(stored: dict[str, Any]) -> Iterator[tuple[CheckpointKey, CheckpointValue]]:
    """The checkpoint's entries. An unreadable entry of an engine or router is None: only its existence is known."""
    for name, value in stored.items():
        kind, _, rest = name.partition(":")
        if kind in tuple(EntryKind) and (is_readable(name, value) or kind in (EntryKind.ENGINE, EntryKind.ROUTER)):
            yield (EntryKind(kind), rest), value if is_readable(name, value) else None
