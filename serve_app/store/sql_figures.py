"""What a scrape shows of the store: its size, the batches that have not ended, and their rows by model. Calls block.

Invariant: the rows of a batch are counted once for each process, when they are all there. A later scrape reads what is
unfinished from its index, and the failed rows of a batch with several models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import Connection, func, select

from serve_app.core.batches import BatchStatus, BatchWork, RowCounts
from serve_app.store.database import Database
from serve_app.store.records import StoreFigures
from serve_app.store.sql_batches import SqlBatches
from serve_app.store.sql_rows import ROWS, counts_by_model

BY_MODEL = ROWS.batch_id, ROWS.model


class SqlFigures:
    """Threads may share it. Raises StoreAway if the database cannot be used."""

    def __init__(self, database: Database, batches: SqlBatches) -> None:
        self._database = database
        self._batches = batches
        self.totals: Mapping[str, Counter[str]] = {}  # by batch whose rows are all there, and model

    def read(self) -> StoreFigures:
        """The figures now."""
        work = self._batches.work()
        with self._database.reading() as connection:
            totals = self._count_rows(connection, work)
            failed = _count_failed(connection, [name for name, by_model in totals.items() if len(by_model) > 1])
            stored_bytes = _database_bytes(connection)
        rows: dict[str, RowCounts] = {}
        for batch in work:
            for model, found in _rows_of(batch, totals.get(batch.batch.batch_id), failed).items():
                rows[model] = _sum(rows.get(model, RowCounts()), found)
        return StoreFigures(work, rows, stored_bytes)

    def _count_rows(self, connection: Connection, work: Sequence[BatchWork]) -> Mapping[str, Counter[str]]:
        """All rows by batch and model, of the batches that are validated."""
        known = self.totals
        validated = [live.batch.batch_id for live in work if live.batch.status is not BatchStatus.VALIDATING]
        new = [name for name in validated if name not in known]
        counted: Mapping[str, Counter[str]] = {}
        if new:
            chosen = select(*BY_MODEL, func.count()).where(ROWS.batch_id.in_(new)).group_by(*BY_MODEL)
            counted = counts_by_model(connection.execute(chosen))
        self.totals = {name: known[name] if name in known else counted.get(name, Counter()) for name in validated}
        return self.totals


def _count_failed(connection: Connection, batches: Sequence[str]) -> Callable[[str, str], int]:
    """The failed rows of these batches, by batch and model."""
    found: Mapping[str, Counter[str]] = {}
    if batches:
        chosen = ROWS.batch_id.in_(batches), ROWS.is_failed.is_(True)
        found = counts_by_model(connection.execute(select(*BY_MODEL, func.count()).where(*chosen).group_by(*BY_MODEL)))
    return lambda batch_id, model: found.get(batch_id, Counter())[model]


def _rows_of(work: BatchWork, totals: Counter[str] | None, failed: Callable[[str, str], int]) -> dict[str, RowCounts]:
    batch = work.batch
    found: dict[str, RowCounts] = {}
    for model in {*work.waiting, *work.running_by_model, *(totals or ())}:
        waiting = work.waiting.get(model, 0)
        running = work.running_by_model.get(model, 0)
        if totals is None:  # rows are still added, and none runs
            found[model] = RowCounts(waiting, running)
        elif len(totals) == 1:
            found[model] = RowCounts(waiting, running, batch.completed, batch.failed)
        else:
            ended = max(0, totals[model] - waiting - running)
            failures = min(ended, failed(batch.batch_id, model))
            found[model] = RowCounts(waiting, running, ended - failures, failures)
    return found


def _sum(first: RowCounts, second: RowCounts) -> RowCounts:
    return RowCounts(
        first.waiting + second.waiting,
        first.running + second.running,
        first.completed + second.completed,
        first.failed + second.failed,
    )


def _database_bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())
    pages, page_bytes = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar_one() for name in ("page_count", "page_size")
    )
    return int(pages) * int(page_bytes)
