"""Validates a new batch: reads its input file in pieces, checks each line and writes its rows to the store.

Invariant: a batch is in progress only when all of its rows are in the store. A validation that was killed begins anew
and adds no row twice; a batch that fails leaves no row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from serve_app.batch.calls import until_answered
from serve_app.batch.files import FileStorage
from serve_app.batch.interfaces import ModelCheck
from serve_app.core.batches import (
    ENDED,
    BadRow,
    BatchRecord,
    BatchStatus,
    Line,
    LineSplitter,
    NewRow,
    RowCheck,
    RowError,
)
from serve_app.errors import NotFound
from serve_app.store import BatchStore

READ_BYTES = 2**20  # of one read: a hundred rows of some KB
GROUP_ROWS = 1000  # of one transaction
MAX_ERRORS = 20  # in the record of a batch: who has more has one cause


class Validation:
    """The check of one batch.

    Args:
        models: None: a row whose model is not served, or not allowed, gets the router's refusal as its result.
        wall: seconds since 1970 UTC.
    """

    def __init__(
        self,
        batch: BatchRecord,
        store: BatchStore,
        files: FileStorage,
        models: ModelCheck | None,
        max_rows: int,
        wall: Callable[[], float],
    ) -> None:
        self._batch = batch
        self._store = store
        self._files = files
        self._models = models
        self._max_rows = max_rows
        self._wall = wall
        self._errors: list[RowError] = []
        self._refusals: dict[str, RowError | None] = {}
        self._rows: list[NewRow] = []
        self._total = 0

    async def run(self) -> None:
        """Bring the batch to `in_progress` or `failed`, unless it leaves `validating` meanwhile."""
        batch_id = self._batch.batch_id
        try:
            await self._read()
        except NotFound:
            self._errors.append(RowError("input_file_not_found", f"there is no file {self._batch.input_file_id}"))
        except BadRow as error:
            self._errors.append(error.error)
        if not self._errors and not self._total:
            self._errors.append(RowError("empty_file", "the input file has no line"))
        if self._errors:
            await until_answered(
                lambda: self._store.forget_rows(batch_id), f"deleting the rows of failed batch {batch_id}"
            )
            fields = {"status": BatchStatus.FAILED, "failed_at": self._wall(), "errors": tuple(self._errors)}
        else:
            await self._add_rows()
            fields = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": self._wall(), "total": self._total}
        changed = await until_answered(
            lambda: self._store.change_batch(batch_id, if_status=[BatchStatus.VALIDATING], **fields),
            f"storing the status of batch {batch_id}",
        )
        if changed is None and (await self._now()).status in ENDED:
            await until_answered(
                lambda: self._store.forget_rows(batch_id), f"deleting the rows of ended batch {batch_id}"
            )

    async def _read(self) -> None:
        """Raises BadRow: a line is too long. NotFound: there is no such file."""
        lines = LineSplitter()
        check = RowCheck()
        at = 0
        while True:
            chunk = await until_answered(
                partial(self._files.read, self._batch.input_file_id, at, READ_BYTES),
                f"reading the input of batch {self._batch.batch_id}",
            )
            at += len(chunk)
            is_last = len(chunk) < READ_BYTES
            found = [*lines.feed(chunk), *(lines.end() if is_last else ())]
            for line in found:
                await self._check(check, line)
                if self._total > self._max_rows or len(self._errors) >= MAX_ERRORS:
                    return
            if is_last:
                return
            if len(self._rows) >= GROUP_ROWS and not self._errors:
                await self._add_rows()

    async def _check(self, check: RowCheck, line: Line) -> None:
        self._total += 1
        if self._total > self._max_rows:
            self._fault(line.number, "too_many_rows", f"a batch has at most {self._max_rows} rows")
            return
        try:
            row = check.feed(line.data, line.number)
        except BadRow as error:
            self._errors.append(error.error)
            return
        if row.url != self._batch.endpoint:
            self._fault(
                line.number, "invalid_url", f"the url is {row.url}, the batch's is {self._batch.endpoint}", "url"
            )
        elif (refusal := await self._refusal(row.model)) is not None:
            self._fault(line.number, refusal.code, refusal.message, "body.model")
        else:
            new = NewRow(line.number, line.offset, len(line.data), row.custom_id, row.model, row.prefix)
            self._rows.append(new)

    def _fault(self, number: int, code: str, message: str, param: str | None = None) -> None:
        self._errors.append(RowError(code, message, line=number, param=param))

    async def _refusal(self, model: str) -> RowError | None:
        if self._models is None:
            return None
        if model not in self._refusals:
            models = self._models
            self._refusals[model] = await until_answered(
                lambda: models.refusal(self._batch, model), f"asking for the models of batch {self._batch.batch_id}"
            )
        return self._refusals[model]

    async def _add_rows(self) -> None:
        """In groups of `GROUP_ROWS`, as long as the batch is validated: it may be cancelled, or in progress by another
        worker."""
        while self._rows and (await self._now()).status is BatchStatus.VALIDATING:
            rows, self._rows = self._rows[:GROUP_ROWS], self._rows[GROUP_ROWS:]
            await until_answered(
                partial(self._store.add_rows, self._batch.batch_id, rows),
                f"storing rows of batch {self._batch.batch_id}",
            )

    async def _now(self) -> BatchRecord:
        return await until_answered(
            lambda: self._store.batch(self._batch.batch_id, None), f"reading the status of batch {self._batch.batch_id}"
        )
