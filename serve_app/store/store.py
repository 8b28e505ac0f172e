"""The store as the rest of the system asks it: the same calls whether the database is reached directly or through the
actor that owns it. A call that cannot reach it raises `StoreAway`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.usage import UsageBatch, UsageRow
from serve_app.store.records import KeyRecord, UsageQuery, Used
from serve_app.store.sql import SqlStore

Call = Callable[..., Awaitable[Any]]  # the name of a method of `SqlStore`, and its arguments


class Store:
    """Args:
    call: runs a method of the `SqlStore`, wherever that is.
    """

    def __init__(self, call: Call) -> None:
        self._call = call

    @classmethod
    def direct(cls, sql: SqlStore) -> Store:
        """The store over a database that this process reaches itself."""

        async def call(method: str, *arguments: Any, **named: Any) -> Any:
            return await asyncio.to_thread(getattr(sql, method), *arguments, **named)

        return cls(call)

    @classmethod
    def at(cls, url: str | None) -> Store:
        """The store of a URL."""
        return cls.direct(SqlStore(url or "sqlite://"))

    async def keys_since(self, version: int) -> tuple[int, list[KeyRecord]]:
        """The version now, and the keys changed after `version`; all, if the store is behind it (a restored backup)."""
        return await self._call("keys_since", version)  # type: ignore[no-any-return]

    async def keys(self) -> list[KeyRecord]:
        """All keys, the oldest first."""
        return await self._call("keys")  # type: ignore[no-any-return]

    async def create_key(self, record: KeyRecord) -> KeyRecord:
        """Returns it with its version."""
        return await self._call("create_key", record)  # type: ignore[no-any-return]

    async def change_key(self, key_id: str, **changes: Any) -> KeyRecord:
        """Change fields of a key. Raises KeyError: there is no such key."""
        return await self._call("change_key", key_id, **changes)  # type: ignore[no-any-return]

    async def add_usage(self, batch: UsageBatch) -> None:
        """Add a batch of use; one sent twice counts once."""
        await self._call("add_usage", batch)

    async def end_source(self, source: str) -> int:
        """Count what a source that is gone had in flight as unsettled. Returns how many requests; again: 0."""
        return await self._call("end_source", source)  # type: ignore[no-any-return]

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums of use, ordered by what they are grouped by."""
        return await self._call("usage", query)  # type: ignore[no-any-return]

    async def used(self, scope: str, start_day: str) -> Used:
        """What a scope of limits has used since a day, with that day."""
        return await self._call("used", scope, start_day)  # type: ignore[no-any-return]
