"""Batches and files in the store, as the rest of the system asks for them.

Every call may be repeated: the second one changes nothing. StoreAway: the database cannot be used now (it is away, full
or read-only; the message says which), and nothing of the call is in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

from serve_app.core.batches import (
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowResult,
)
from serve_app.store.sent_calls import SentCalls


class BatchStore(Protocol):
    """The calls, as `sent_by` makes them."""

    async def add_file(self, record: FileRecord) -> FileRecord:
        """Returns the record that the store has under this id."""

    async def finish_file(self, file_id: str, size: int, max_tenant_bytes: int | None = None) -> FileRecord:
        """The content is complete.

        Raises:
            KeyError: there is no such file, or it is deleted. BodyTooLarge: with it the tenant's complete files have
            more than `max_tenant_bytes`.
        """

    async def reserve_bytes(self, file_id: str, size: int, wanted: int, max_tenant_bytes: int) -> int:
        """Reserve bytes of the tenant for content that arrives: `wanted`, or as many as are left, `size` at least.
        Returns how many.

        Raises:
            KeyError, BodyTooLarge: as `finish_file`; counting what other uploads have reserved.
        """

    async def stored_bytes(self, tenant: str) -> int:
        """Of all complete files of the tenant, and what its uploads have reserved."""

    async def file(self, file_id: str, tenant: str | None) -> FileRecord:
        """A file, its content complete or not. Raises KeyError: none, deleted, or another tenant's (None: any)."""

    async def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """Complete files by the time they were made. `after`: an id; nothing comes after one that never was."""

    async def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        """Delete the record; `content_removed` follows once its content is removed.

        Raises:
            KeyError: none, another tenant's, or deleted at another time than `now`. BatchConflict: a batch that has not
            ended reads it.
        """

    async def content_removed(self, file_id: str, now: float) -> None:
        """Nothing is left of the content of a deleted file."""

    async def files_to_remove(self, now: float, limit: int) -> list[FileRecord]:
        """Files that expire, whose upload was left incomplete long ago, or that are deleted and have content; none that
        a batch reads."""

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

    async def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """Raises KeyError: none, or another tenant's (None: any)."""

    async def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first. `after`: an id; nothing comes after one that never was."""

    async def forget_records(self, before: float, limit: int) -> int:
        """Remove the records of files whose content was removed, and of batches that ended, until `before`: at most
        `limit` of each. Returns how many."""

    async def change_batch(
        self, batch_id: str, *, if_status: Sequence[BatchStatus], **fields: Any
    ) -> BatchRecord | None:
        """Change fields of a batch, the status among them. None: it is in another status and has other values.

        Raises:
            KeyError: there is no such batch. ValueError: a field that cannot be changed.
        """

    async def lease_batch(self, batch_id: str, status: BatchStatus, worker: str, lease_s: float) -> bool:
        """Lease a batch in this status to a worker that brings it to the next one, which ends the lease; again: to
        renew it. False: another worker has it, or it is in another status."""

    async def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> int:
        """Add rows while the batch is `validating`; in another status none. Returns how many are new."""

    async def work(self) -> list[BatchWork]:
        """Every batch that has not ended, the oldest first."""

    async def claim_rows(self, worker: str, batch_id: str, model: str, limit: int, lease_s: float) -> list[ClaimedRow]:
        """Rows without a result that nobody has, or whose lease is over, by prefix and number; none if the batch is not
        `in_progress`. The worker has them for `lease_s`."""

    async def renew(self, worker: str, lease_s: float) -> int:
        """Lease what the worker has for another `lease_s`. Returns how many rows."""

    async def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> int:
        """Give back rows that the worker still has. Returns how many."""

    async def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]:
        """Keep the first result of each row, whoever has the row, and count it in its batch. Returns whose are new."""

    async def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        """Results of one kind by number, behind the number `after`."""

    async def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        """Rows without a result by number, behind the number `after`, claimed or not."""

    async def forget_rows(self, batch_id: str) -> None:
        """Delete the rows of a batch with their results; its counts stay."""


def sent_by(call: Callable[..., Awaitable[Any]]) -> BatchStore:
    """The store over `call`, which runs a method of the `SqlStore`, wherever that is."""
    return cast(BatchStore, SentCalls(call, "batches", claims="claim_rows"))
