"""What the quota actor keeps in the GCS, by name, and whether an actor of this version can read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.core.memory import Berth, Device, EngineEntry, Entry, Key, Reserved, RouterEntry, Value
from serve_app.quota.inventory import InventorySettings

EPOCH = "epoch"
INVENTORY = "inventory"  # what counted as a device when these were stored
NODE = "node:"  # before a node's id, its devices: it may not answer when they have to be known

KINDS: dict[str, Any] = {  # what is stored, by the first part of its name
    EPOCH: int,
    INVENTORY: InventorySettings,
    Entry.ENGINE: EngineEntry,
    Entry.ROUTER: RouterEntry | None,
    Entry.SESSION: Reserved,
    Entry.BERTH: Berth,
}


def readable(name: str, value: Any) -> bool:
    """Whether this is what an actor of this version stores under such a name."""
    kind = name.partition(":")[0]
    if kind + ":" == NODE:
        return isinstance(value, list) and all(isinstance(device, Device) for device in value)
    return kind in KINDS and isinstance(value, KINDS[kind])


def strange(stored: dict[str, Any]) -> list[str]:
    """Names of what is to be put aside: an actor that failed over it would fail for good."""
    return [name for name, value in stored.items() if not readable(name, value)]


def known(stored: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    """The roster's entries. Of an engine or router that cannot be read it is known that there was one."""
    for name, value in stored.items():
        kind, _, rest = name.partition(":")
        if kind in tuple(Entry) and (readable(name, value) or kind in (Entry.ENGINE, Entry.ROUTER)):
            yield (Entry(kind), rest), value if readable(name, value) else None
