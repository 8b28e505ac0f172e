"""All values that processes of an application send each other by pickle, found by the annotations of what they call."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from serve_app.batch.local_files import LocalFiles
from serve_app.engine.deployment import EngineReplica
from serve_app.http.deployment import RouterReplica
from serve_app.quota.actor import GpuMemoryQuota
from serve_app.store.batch_store import BatchStore
from serve_app.store.sql import SqlStore

CALLED = (GpuMemoryQuota, EngineReplica, RouterReplica, SqlStore, BatchStore, LocalFiles)
# Public methods that are called in their own process only.
LOCAL = {"EngineReplica": {"run", "produced", "drain"}}


def is_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_message(cls: type) -> bool:
    return is_tuple(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)


def sent_messages() -> list[type]:
    """The classes, in the order in which they are found."""
    seen: dict[type, None] = {}
    for called in CALLED:
        for name, method in inspect.getmembers(called, inspect.isfunction):
            if not name.startswith("_") and name not in LOCAL.get(called.__name__, ()):
                for hint in typing.get_type_hints(method).values():
                    _collect(hint, seen)
    return list(seen)


def _collect(hint: Any, seen: dict[type, None]) -> None:
    for part in _parts(hint):
        if part not in seen and part.__module__.startswith("serve_app.") and is_message(part):
            seen[part] = None
            for inner in typing.get_type_hints(part).values():
                _collect(inner, seen)


def _parts(hint: Any) -> Iterator[type]:
    """The classes that an annotation names."""
    arguments = hint if isinstance(hint, list) else typing.get_args(hint)
    if not arguments and isinstance(hint, type):
        yield hint
    for argument in arguments:
        yield from _parts(argument)


def names_of(cls: Any) -> list[str]:
    """The fields of a message, in order."""
    if is_tuple(cls):
        return list(cls._fields)
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return list(cls.__struct_fields__)


def with_default(cls: Any) -> int:
    """How many of its last fields have a default."""
    if is_tuple(cls):
        return len(cls._field_defaults)
    if dataclasses.is_dataclass(cls):
        none = dataclasses.MISSING
        return sum(not field.default is field.default_factory is none for field in dataclasses.fields(cls))
    return len(cls.__struct_defaults__)
