"""Batches and files in the store, as the rest of the system asks for them.

Every call may be repeated: the second one changes nothing. StoreAway: the database cannot be used now (it is away, full
or read-only; the message says which), and nothing of the call is in it.
"""

from __future__ import annotations

import secrets
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

CLAIM_BYTES = 8  # of a claim's name: unique among those of one worker


class BatchStore:
    """Args:
    call: runs a method of the `SqlStore`, wherever that is.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def add_file(self, record: FileRecord) -> FileRecord:
        """Returns the record that the store has under this id."""
        return await self._call("batches.add_file", record)  # type: ignore[no-any-return]

    async def finish_file(self, file_id: str, size: int, max_tenant_bytes: int | None = None) -> FileRecord:
        """The content is complete.

        Raises:
            KeyError: there is no such file, or it is deleted. BodyTooLarge: with it the tenant's complete files have
            more than `max_tenant_bytes`.
        """
        return await self._call("batches.finish_file", file_id, size, max_tenant_bytes)  # type: ignore[no-any-return]

    async def reserve_bytes(self, file_id: str, size: int, wanted: int, max_tenant_bytes: int) -> int:
        """Reserve bytes of the tenant for content that arrives: `wanted`, or as many as are left, `size` at least.
        Returns how many.

        Raises:
            KeyError, BodyTooLarge: as `finish_file`; counting what other uploads have reserved.
        """
        return await self._call("batches.reserve_bytes", file_id, size, wanted, max_tenant_bytes)  # type: ignore[no-any-return]

    async def stored_bytes(self, tenant: str) -> int:
        """Of all complete files of the tenant, and what its uploads have reserved."""
        return await self._call("batches.stored_bytes", tenant)  # type: ignore[no-any-return]

    async def file(self, file_id: str, tenant: str | None) -> FileRecord:
        """A file, its content complete or not. Raises KeyError: none, deleted, or another tenant's (None: any)."""
        return await self._call("batches.file", file_id, tenant)  # type: ignore[no-any-return]

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """Complete files by the time they were made. `after`: an id; nothing comes after one that never was."""
        named = {"purpose": purpose, "after": after, "limit": limit, "newest_first": newest_first}
        return await self._call("batches.files", tenant, **named)  # type: ignore[no-any-return]

    async def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        """Delete the record; `content_removed` follows once its content is removed.

        Raises:
            KeyError: none, another tenant's, or deleted at another time than `now`. BatchConflict: a batch that has not
            ended reads it.
        """
        return await self._call("batches.delete_file", file_id, tenant, now)  # type: ignore[no-any-return]

    async def content_removed(self, file_id: str, now: float) -> None:
        """Nothing is left of the content of a deleted file."""
        await self._call("batches.content_removed", file_id, now)

    async def files_to_remove(self, now: float, limit: int) -> list[FileRecord]:
        """Files that expire, whose upload was left incomplete long ago, or that are deleted and have content; none that
        a batch reads."""
        return await self._call("batches.files_to_remove", now, limit)  # type: ignore[no-any-return]

    async def create_batch(
        self, record: BatchRecord, *, key: bytes | None = None, fingerprint: bytes | None = None
    ) -> BatchRecord:
        """Returns the batch that the store has under this key, or without a key under this id.

        Args:
            key: stands for the tenant and the `Idempotency-Key`; `fingerprint`: for what is asked for.

        Raises:
            KeyError: its tenant has no such input file, complete and not over. ValueError: the batch of the key was
            asked for with another fingerprint.
        """
        return await self._call("batches.create_batch", record, key=key, fingerprint=fingerprint)  # type: ignore[no-any-return]

    async def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """Raises KeyError: none, or another tenant's (None: any)."""
        return await self._call("batches.batch", batch_id, tenant)  # type: ignore[no-any-return]

    async def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first. `after`: an id; nothing comes after one that never was."""
        return await self._call("batches.batches", tenant, after=after, limit=limit)  # type: ignore[no-any-return]

    async def forget_records(self, before: float, limit: int) -> int:
        """Remove the records of files whose content was removed, and of batches that ended, until `before`: at most
        `limit` of each. Returns how many."""
        return await self._call("batches.forget_records", before, limit)  # type: ignore[no-any-return]

    async def change_batch(
        self, batch_id: str, *, if_status: Sequence[BatchStatus], **fields: Any
    ) -> BatchRecord | None:
        """Change fields of a batch, the status among them. None: it is in another status and has other values.

        Raises:
            KeyError: there is no such batch. ValueError: a field that cannot be changed.
        """
        return await self._call("batches.change_batch", batch_id, if_status=list(if_status), **fields)  # type: ignore[no-any-return]

    async def lease_batch(self, batch_id: str, status: BatchStatus, worker: str, lease_s: float) -> bool:
        """Lease a batch in this status to a worker that brings it to the next one, which ends the lease; again: to
        renew it. False: another worker has it, or it is in another status."""
        return await self._call("batches.lease_batch", batch_id, status, worker, lease_s)  # type: ignore[no-any-return]

    async def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> int:
        """Add rows while the batch is `validating`; in another status none. Returns how many are new."""
        return await self._call("batches.add_rows", batch_id, list(rows))  # type: ignore[no-any-return]

    async def work(self) -> list[BatchWork]:
        """Every batch that has not ended, the oldest first."""
        return await self._call("batches.work")  # type: ignore[no-any-return]

    async def claim_rows(self, worker: str, batch_id: str, model: str, limit: int, lease_s: float) -> list[ClaimedRow]:
        """Rows without a result that nobody has, or whose lease is over, by prefix and number; none if the batch is not
        `in_progress`. The worker has them for `lease_s`."""
        claim = secrets.token_hex(CLAIM_BYTES)  # a repeat of this call gets the same rows
        return await self._call("batches.claim_rows", worker, batch_id, model, limit, lease_s, claim)  # type: ignore[no-any-return]

    async def renew(self, worker: str, lease_s: float) -> int:
        """Lease what the worker has for another `lease_s`. Returns how many rows."""
        return await self._call("batches.renew", worker, lease_s)  # type: ignore[no-any-return]

    async def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> int:
        """Give back rows that the worker still has. Returns how many."""
        return await self._call("batches.release_rows", worker, list(rows), count_attempt=count_attempt)  # type: ignore[no-any-return]

    async def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]:
        """Keep the first result of each row, whoever has the row, and count it in its batch. Returns whose are new."""
        return await self._call("batches.add_results", list(results))  # type: ignore[no-any-return]

    async def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        """Results of one kind by number, behind the number `after`."""
        return await self._call("batches.results", batch_id, failed=failed, after=after, limit=limit)  # type: ignore[no-any-return]

    async def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        """Rows without a result by number, behind the number `after`, claimed or not."""
        return await self._call("batches.unfinished", batch_id, after, limit)  # type: ignore[no-any-return]

    async def forget_rows(self, batch_id: str) -> None:
        """Delete the rows of a batch with their results; its counts stay."""
        await self._call("batches.forget_rows", batch_id)
