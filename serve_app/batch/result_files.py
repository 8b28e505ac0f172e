"""Ends a batch: writes its output and error files, in the order of the input's lines, and its last status.

Invariant: a file is complete or not there: its lines are counted against the counts of the batch. Its id follows from
the batch, so that whoever repeats this writes the same file. The rows are forgotten once both files are complete, and
before the batch's status says so: none is left behind. A complete file that is deleted before that status stays
deleted, as after it; an incomplete one whose record is deleted is written again, under its next id.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from serve_app.batch.calls import until_answered
from serve_app.batch.files import FileStorage
from serve_app.batch.result_lines import error_result
from serve_app.core.batches import OUTPUT_PURPOSE, BatchRecord, BatchStatus, FileRecord
from serve_app.store import BatchStore

READ_BYTES = 4 * 2**20  # of results in memory at once, about
FIRST_READ_ROWS = 20  # until the length of lines is known: an answer of 1 MiB each is bearable
MAX_READ_ROWS = 1000
UNFINISHED_ROWS = 500  # of one transaction
MAX_FILE_BYTES = 2**40  # the results of a batch are wanted whatever they weigh
WRITE_S = 3600.0  # of one whole file: 4 GB to a bucket at 1 MB/s
MAX_FILES = 20  # of one batch and kind: each was deleted while it was written; twice the attempts of a worker

EXPIRED = "batch_expired", "This request could not be executed before the completion window expired."
CANCELLED = "batch_cancelled", "The batch was cancelled before this request was executed."


class IncompleteResults(Exception):
    """Rows were forgotten while they were read: another worker has written the file, or its record is gone too."""


class Finalization:
    """The end of one batch.

    Args:
        keep_s: how long its files are kept.
        wall: seconds since 1970 UTC.
    """

    def __init__(
        self, batch: BatchRecord, store: BatchStore, files: FileStorage, keep_s: float, wall: Callable[[], float]
    ) -> None:
        self._batch = batch
        self._store = store
        self._files = files
        self._keep_s = keep_s
        self._wall = wall

    async def run(self) -> None:
        """Bring a batch that is `finalizing` or `cancelling` to its end; rows without a result get an error.

        Raises:
            IncompleteResults: try again; if the batch has not ended meanwhile, its results are lost.
        """
        if self._batch.in_progress_at is None:  # cancelled or expired while it was validated
            await self._end()
            return
        await self._end_unfinished(*(CANCELLED if self._batch.status is BatchStatus.CANCELLING else EXPIRED))
        self._batch = await until_answered(
            lambda: self._store.batch(self._batch.batch_id, None), f"reading the counts of batch {self._batch.batch_id}"
        )
        fields: dict[str, Any] = {}
        if self._batch.completed:
            fields["output_file_id"] = await self._write(failed=False, lines=self._batch.completed)
        if self._batch.failed:
            fields["error_file_id"] = await self._write(failed=True, lines=self._batch.failed)
        await self._end(**fields)

    async def _end(self, **fields: Any) -> None:
        batch_id = self._batch.batch_id
        now = self._wall()
        if self._batch.status is BatchStatus.CANCELLING:
            fields |= {"status": BatchStatus.CANCELLED, "cancelled_at": now}
        elif self._batch.expired_at is not None:
            fields |= {"status": BatchStatus.EXPIRED}
        else:
            fields |= {"status": BatchStatus.COMPLETED, "completed_at": now}
        await until_answered(lambda: self._store.forget_rows(batch_id), f"deleting the rows of ended batch {batch_id}")
        await self._change(batch_id, [self._batch.status], fields)

    async def _change(self, batch_id: str, if_status: Sequence[BatchStatus], fields: dict[str, Any]) -> None:
        await until_answered(
            lambda: self._store.change_batch(batch_id, if_status=if_status, **fields),
            f"storing the status of batch {batch_id}",
        )

    async def _end_unfinished(self, code: str, message: str) -> None:
        after = 0
        while True:
            rows = await until_answered(
                partial(self._store.unfinished, self._batch.batch_id, after, UNFINISHED_ROWS),
                f"reading unfinished rows of batch {self._batch.batch_id}",
            )
            if not rows:
                return
            errors = [error_result(row, code, message) for row in rows]
            await until_answered(
                partial(self._store.add_results, errors), f"storing errors of rows of batch {self._batch.batch_id}"
            )
            after = rows[-1].number

    async def _write(self, *, failed: bool, lines: int) -> str:
        """The id of the complete file."""
        record = await self._record(failed)
        if record.size is None:
            size = await until_answered(
                lambda: self._files.write(record.file_id, self._lines(failed, lines), MAX_FILE_BYTES),
                f"writing a result file of batch {self._batch.batch_id}",
                WRITE_S,
            )
            await until_answered(
                lambda: self._store.finish_file(record.file_id, size),
                f"storing a file record of batch {self._batch.batch_id}",
            )
        return record.file_id

    async def _record(self, failed: bool) -> FileRecord:
        """The record of the file: complete, perhaps deleted since, or to be written."""
        batch = self._batch
        made_at = batch.finalizing_at or batch.cancelling_at or batch.created_at
        for number in range(MAX_FILES):
            new = self._new_record(failed, number, made_at)
            record = await until_answered(
                partial(self._store.add_file, new), f"storing a file record of batch {self._batch.batch_id}"
            )
            if record.size is not None or record.deleted_at is None:
                return record
            made_at = self._wall()  # of the next one: whatever removes incomplete files by age has removed this one
        raise IncompleteResults(f"{MAX_FILES} of its files were deleted before they were complete")

    def _new_record(self, failed: bool, number: int, made_at: float) -> FileRecord:
        batch = self._batch
        return FileRecord(
            file_id=result_file_id(batch.batch_id, failed, number),
            tenant=batch.tenant,
            key_id=batch.key_id,
            filename=f"{batch.batch_id}_{'error' if failed else 'output'}.jsonl",
            purpose=OUTPUT_PURPOSE,
            size=None,
            created_at=made_at,
            expires_at=made_at + self._keep_s,
        )

    async def _lines(self, failed: bool, expected: int) -> AsyncIterator[bytes]:
        """Raises IncompleteResults: there are not as many as the batch has counted."""
        after = 0
        limit = FIRST_READ_ROWS
        found = 0
        while True:
            results = await until_answered(
                partial(self._store.results, self._batch.batch_id, failed=failed, after=after, limit=limit),
                f"reading the results of batch {self._batch.batch_id}",
            )
            if not results:
                break
            piece = "".join(f"{result.line}\n" for result in results).encode()
            after = results[-1].number
            found += len(results)
            limit = max(1, min(MAX_READ_ROWS, READ_BYTES * len(results) // len(piece)))
            yield piece
        if found != expected:
            raise IncompleteResults(f"{found} results are left of {expected}")


def result_file_id(batch_id: str, failed: bool, number: int = 0) -> str:
    """The id of a batch's output or error file: the same whoever writes it. `number`: those deleted before."""
    again = f"/{number}" if number else ""
    digest = hashlib.sha256(f"{batch_id}/{'error' if failed else 'output'}{again}".encode()).hexdigest()
    return f"file-{digest[:32]}"
