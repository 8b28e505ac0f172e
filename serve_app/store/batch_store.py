"""Batches, their files and rows as the rest of the system asks the store: `Store` has one.

Every call may be repeated: what was applied changes nothing twice. A call that cannot reach the database raises
`StoreAway`; the next one tries again. What each does: `sql_batches`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from serve_app.core.batches import (
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowResult,
)


class BatchStore:
    """Args:
    call: runs a method of the `SqlBatches`, wherever that is.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def add_file(self, record: FileRecord) -> None:
        """Add a file, which may not be complete yet."""
        await self._call("add_file", record)

    async def finish_file(self, file_id: str, size: int) -> None:
        """A file is complete."""
        await self._call("finish_file", file_id, size)

    async def file(self, file_id: str, tenant: str | None) -> FileRecord:
        """Raises KeyError: there is none, it is deleted, or it is another tenant's (None: any)."""
        return await self._call("file", file_id, tenant)  # type: ignore[no-any-return]

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """The tenant's complete files, those behind `after`."""
        named = {"purpose": purpose, "after": after, "limit": limit, "newest_first": newest_first}
        return await self._call("files", tenant, **named)  # type: ignore[no-any-return]

    async def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        """Raises KeyError, as `file` does."""
        return await self._call("delete_file", file_id, tenant, now)  # type: ignore[no-any-return]

    async def expired_files(self, now: float, limit: int) -> list[FileRecord]:
        """Files that are over and not deleted."""
        return await self._call("expired_files", now, limit)  # type: ignore[no-any-return]

    async def create_batch(self, record: BatchRecord) -> BatchRecord:
        """Add a batch; one of this id stays as it is, and is returned."""
        return await self._call("create_batch", record)  # type: ignore[no-any-return]

    async def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """Raises KeyError: there is none, or it is another tenant's (None: any)."""
        return await self._call("batch", batch_id, tenant)  # type: ignore[no-any-return]

    async def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first, those behind `after`."""
        return await self._call("batches", tenant, after=after, limit=limit)  # type: ignore[no-any-return]

    async def change_batch(
        self, batch_id: str, *, if_status: Sequence[BatchStatus], **changes: Any
    ) -> BatchRecord | None:
        """Change fields of a batch, if it is in one of these statuses; None: it is not."""
        named = {"if_status": tuple(if_status), **changes}
        return await self._call("change_batch", batch_id, **named)  # type: ignore[no-any-return]

    async def work(self) -> list[BatchWork]:
        """The batches that are not over, the oldest first."""
        return await self._call("work")  # type: ignore[no-any-return]

    async def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> None:
        """Add rows; those that are there stay as they are."""
        await self._call("add_rows", batch_id, rows)

    async def claim_rows(self, worker: str, batch_id: str, model: str, limit: int, lease_s: float) -> list[ClaimedRow]:
        """Lease rows without a result that nobody has to a worker. A claim whose answer is lost has leased rows that
        only `renew` keeps: claim again under another name."""
        return await self._call("claim_rows", worker, batch_id, model, limit, lease_s)  # type: ignore[no-any-return]

    async def renew(self, worker: str, lease_s: float) -> int:
        """Lease the rows that a worker has for as long again. Returns how many."""
        return await self._call("renew", worker, lease_s)  # type: ignore[no-any-return]

    async def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> None:
        """Give rows back, by batch and number. Of one whose answer is lost the repeat changes nothing."""
        await self._call("release_rows", worker, rows, count_attempt=count_attempt)

    async def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]:
        """Write results of rows that have none, and count them. Returns those written, by batch and number."""
        return await self._call("add_results", results)  # type: ignore[no-any-return]

    async def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        """Results of rows behind a number, in the order of the lines."""
        named = {"failed": failed, "after": after, "limit": limit}
        return await self._call("results", batch_id, **named)  # type: ignore[no-any-return]

    async def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        """Rows without a result behind a number, whoever has them."""
        return await self._call("unfinished", batch_id, after, limit)  # type: ignore[no-any-return]

    async def forget_rows(self, batch_id: str) -> None:
        """Remove the rows of a batch that is over, with their results."""
        await self._call("forget_rows", batch_id)
