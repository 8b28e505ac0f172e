"""The store as the rest of the system asks it: the same calls whether the database is reached directly or through the
actor that owns it.

Every call may be repeated: what was applied changes nothing twice. A call that cannot reach the database raises
`StoreAway`; the next one tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from serve_app.core.times import STORE_CALL_S
from serve_app.core.usage import UsageBatch, UsageRow
from serve_app.errors import StoreAway
from serve_app.names import STORE_ACTOR
from serve_app.ray_adapter import HeadActor
from serve_app.store.audit import NOBODY_KNOWN, AuditEntry, Author
from serve_app.store.background_store import background_by
from serve_app.store.batch_store import sent_by
from serve_app.store.owner import CALLS, StoreOwner
from serve_app.store.records import KeyRecord, StoreFigures, UsageQuery, Used
from serve_app.store.response_store import ResponseStore

if TYPE_CHECKING:
    from serve_app.store.sql import SqlStore

THREADS = 4  # calls of one process at once; they have threads of their own, since a lost server holds them for seconds

Call = Callable[..., Awaitable[Any]]  # the name of a method of `SqlStore`, and its arguments


class Store:
    """The database of keys, use and batches.

    Args:
        call: runs a method of the `SqlStore` or, as `batches.METHOD`, `responses.METHOD`,
            `background.METHOD`, `audit.METHOD` and `figures.METHOD`, of these parts of it, wherever that is.
        close: gives up what calls need; calls that run are finished.
    """

    def __init__(self, call: Call, close: Callable[[], None] = lambda: None) -> None:
        self._call = call
        self.close = close
        self.batches = sent_by(call)
        self.responses = ResponseStore(call)
        self.background = background_by(call)

    @classmethod
    def direct(cls, sql: SqlStore) -> Store:
        """The store over a database that this process reaches itself."""

        threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")

        async def call(method: str, *arguments: Any, **named: Any) -> Any:
            run = partial(attrgetter(method)(sql), *arguments, **named)
            return await asyncio.get_running_loop().run_in_executor(threads, run)

        def close() -> None:
            threads.shutdown(wait=False)
            sql.close()

        return cls(call, close)

    @classmethod
    def at(cls, url: str | None) -> Store:
        """The store of a URL: PostgreSQL is reached directly, SQLite through the actor that owns the file."""
        if url is None or url.startswith("sqlite"):
            return cls.through_actor(url)
        from serve_app.store.sql import SqlStore  # here: a router whose store is SQLite needs no SQLAlchemy

        return cls.direct(SqlStore(url))

    @classmethod
    def through_actor(cls, url: str | None) -> Store:
        """The store of any URL through the actor: for a process that may not reach PostgreSQL itself."""
        owner = HeadActor(STORE_ACTOR, StoreOwner, CALLS)
        return cls(owner.calls_of(url, "the store's actor", STORE_CALL_S, StoreAway))

    async def keys_since(self, version: int) -> tuple[int, list[KeyRecord]]:
        """The version now, and the keys changed after `version`; all, if the store is behind it (a restored backup)."""
        return await self._call("keys_since", version)  # type: ignore[no-any-return]

    async def keys(self) -> list[KeyRecord]:
        """All keys, the oldest first."""
        return await self._call("keys")  # type: ignore[no-any-return]

    async def key(self, key_id: str) -> KeyRecord:
        """Raises KeyError: there is no such key."""
        return await self._call("key", key_id)  # type: ignore[no-any-return]

    async def create_key(self, record: KeyRecord, by: Author = NOBODY_KNOWN) -> KeyRecord:
        """Returns it with its version; `by`: who makes it. Raises KeyConflict: another key has its id or its digest."""
        return await self._call("create_key", record, by)  # type: ignore[no-any-return]

    async def change_key(
        self, key_id: str, *, if_version: int | None = None, by: Author = NOBODY_KNOWN, **changes: Any
    ) -> KeyRecord:
        """Change fields of a key; with `if_version` only as it was with this version. `by`: who changes it.

        Raises:
            KeyError: there is no such key. KeyConflict: it was changed since that version.
        """
        call = self._call("change_key", key_id, if_version=if_version, by=by, **changes)
        return await call  # type: ignore[no-any-return]

    async def add_audit(self, entry: AuditEntry) -> None:
        """Add an entry of a change that the store does not make itself; one sent twice is there once."""
        await self._call("audit.add", entry)

    async def audit(self, since: float, after: int, limit: int) -> list[AuditEntry]:
        """Entries since a time, behind the number `after`, in the order of their numbers."""
        return await self._call("audit.entries", since, after, limit)  # type: ignore[no-any-return]

    async def forget_audit(self, before: float, limit: int) -> int:
        """Remove entries from before a time, at most `limit`. Returns how many."""
        return await self._call("audit.forget", before, limit)  # type: ignore[no-any-return]

    async def figures(self) -> StoreFigures:
        """What a scrape shows: size, batches, rows by model."""
        return await self._call("figures.read")  # type: ignore[no-any-return]

    async def add_usage(self, batch: UsageBatch) -> None:
        """Add a batch of use; one sent twice counts once."""
        await self._call("add_usage", batch)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums of use, ordered by what they are grouped by."""
        return await self._call("usage", query)  # type: ignore[no-any-return]

    async def used(self, scope: str, start_day: str) -> Used:
        """What a scope of limits has used since a day, with that day."""
        return await self._call("used", scope, start_day)  # type: ignore[no-any-return]
