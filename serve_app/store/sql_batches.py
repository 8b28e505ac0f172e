"""Files and batches over SQLAlchemy: each method is one transaction (but `forget_rows`), durable when it returns.

Invariants: a row has at most one result, its first, and counts in its batch with the same commit. A row without a
result is leased to one worker or can be claimed; a lease that is over can be claimed. Rows are locked by batch and
number before their batch is, or passed over where another transaction has them: no two transactions wait for each
other.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    false,
    func,
    or_,
    select,
    tuple_,
    update,
)

from serve_app.core.batches import (
    ENDED,
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowError,
    RowResult,
)
from serve_app.store.tables import BATCH_ROWS, BATCHES, FILES
from serve_app.store.transactions import Transactions

UPLOAD_KEPT_S = 7 * 86400.0  # an incomplete file this old has nobody who writes it: a week of a store that is away ends
MAX_CLAIM = 10_000  # rows of one claim: SQLite takes 32,766 parameters
FORGET_ROWS = 2000  # of one transaction: with answers of 5 KB, 10 MB; nobody waits long for SQLite's only writer

FIXED = frozenset({"batch_id", "tenant", "key_id", "endpoint", "input_file_id", "created_at", "completed", "failed"})
CHANGEABLE = frozenset(field.name for field in fields(BatchRecord)) - FIXED
CLAIMED = tuple(BATCH_ROWS.c[field.name] for field in fields(ClaimedRow))
UNCLAIMED: dict[str, Any] = {"worker": None, "claim": None, "lease_until": None}


class SqlBatches:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again.

    Args:
        now: seconds since 1970 UTC.
    """

    def __init__(self, transactions: Transactions, now: Callable[[], float]) -> None:
        self._reading, self._writing, self._insert = transactions.reading, transactions.writing, transactions.insert
        self._now = now

    # files

    def add_file(self, record: FileRecord) -> FileRecord:
        """Returns the record that is stored under this id."""
        with self._writing() as connection:
            columns = asdict(record) | {"filename": json.dumps(record.filename)}
            connection.execute(self._insert(FILES).values(columns).on_conflict_do_nothing())
            return _file(connection.execute(select(FILES).where(FILES.c.file_id == record.file_id)).one())

    def finish_file(self, file_id: str, size: int) -> FileRecord:
        """The content is complete. Raises KeyError: there is no such file, or it is deleted."""
        with self._writing() as connection:
            named = FILES.c.file_id == file_id, FILES.c.deleted_at.is_(None)
            connection.execute(update(FILES).where(*named).values(size=size))
            return _file(_found(connection, select(FILES).where(*named), file_id))

    def file(self, file_id: str, tenant: str | None) -> FileRecord:
        """Raises KeyError: none, deleted, or another tenant's (None: any)."""
        with self._reading() as connection:
            named = FILES.c.file_id == file_id, FILES.c.deleted_at.is_(None), *_of_tenant(FILES, tenant)
            return _file(_found(connection, select(FILES).where(*named), file_id))

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """Complete files by the time they were made. A deleted one is a place to go on from, an unknown one the end."""
        chosen = select(FILES).where(FILES.c.tenant == tenant, FILES.c.deleted_at.is_(None), FILES.c.size.is_not(None))
        if purpose is not None:
            chosen = chosen.where(FILES.c.purpose == purpose)
        with self._reading() as connection:
            page = _page(connection, chosen, FILES.c.file_id, after, newest_first=newest_first)
            return [_file(row) for row in connection.execute(page.limit(limit))]

    def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        """Raises KeyError: none, another tenant's, or deleted at another time than `now`."""
        with self._writing() as connection:
            named = and_(FILES.c.file_id == file_id, FILES.c.tenant == tenant)
            connection.execute(update(FILES).where(named, FILES.c.deleted_at.is_(None)).values(deleted_at=now))
            return _file(_found(connection, select(FILES).where(named, FILES.c.deleted_at == now), file_id))

    def expired_files(self, now: float, limit: int) -> list[FileRecord]:
        """Files to delete: they expire, or nobody has completed them within `UPLOAD_KEPT_S`."""
        left = and_(FILES.c.size.is_(None), FILES.c.created_at <= now - UPLOAD_KEPT_S)
        chosen = select(FILES).where(FILES.c.deleted_at.is_(None), or_(FILES.c.expires_at <= now, left))
        with self._reading() as connection:
            rows = connection.execute(chosen.order_by(FILES.c.created_at, FILES.c.file_id).limit(limit))
            return [_file(row) for row in rows]

    # batches

    def create_batch(self, record: BatchRecord) -> BatchRecord:
        """Returns the record that is stored under this id."""
        with self._writing() as connection:
            columns = _columns({field.name: getattr(record, field.name) for field in fields(BatchRecord)})
            connection.execute(self._insert(BATCHES).values(columns).on_conflict_do_nothing())
            return _batch(connection.execute(select(BATCHES).where(BATCHES.c.batch_id == record.batch_id)).one())

    def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """Raises KeyError: none, or another tenant's (None: any)."""
        with self._reading() as connection:
            named = BATCHES.c.batch_id == batch_id, *_of_tenant(BATCHES, tenant)
            return _batch(_found(connection, select(BATCHES).where(*named), batch_id))

    def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first."""
        chosen = select(BATCHES).where(*_of_tenant(BATCHES, tenant))
        with self._reading() as connection:
            page = _page(connection, chosen, BATCHES.c.batch_id, after, newest_first=True)
            return [_batch(row) for row in connection.execute(page.limit(limit))]

    def change_batch(self, batch_id: str, *, if_status: Sequence[BatchStatus], **changes: Any) -> BatchRecord | None:
        """Change fields of a batch in one of these states. None: it is in another one and has other values.

        Raises:
            KeyError: there is no such batch. ValueError: a field that cannot be changed.
        """
        if unknown := changes.keys() - CHANGEABLE:
            raise ValueError(f"of a batch {min(unknown)!r} cannot be changed")
        with self._writing() as connection:
            named, columns = BATCHES.c.batch_id == batch_id, _columns(changes)
            row = _found(connection, select(BATCHES).where(named).with_for_update(), batch_id)
            if all(row._mapping[name] == value for name, value in columns.items()):
                return _batch(row)  # a repeat
            if row.status not in [status.value for status in if_status]:
                return None
            connection.execute(update(BATCHES).where(named).values(columns))
            return _batch(connection.execute(select(BATCHES).where(named)).one())

    def work(self) -> list[BatchWork]:
        """Every batch that has not ended, the oldest first."""
        rows, by = BATCH_ROWS.c, (BATCH_ROWS.c.batch_id, BATCH_ROWS.c.model)
        running = BATCHES.c.status.in_([status.value for status in BatchStatus if status not in ENDED])
        open_batches = select(BATCHES).where(running).order_by(BATCHES.c.created_at, BATCHES.c.batch_id)
        unfinished = select(*by, func.count()).where(rows.is_failed.is_(None)).group_by(*by)
        leased = select(*by, func.count()).where(rows.worker.is_not(None), rows.lease_until > self._now()).group_by(*by)
        with self._reading() as connection:
            batches = [_batch(row) for row in connection.execute(open_batches)]
            waiting, held = _counts(connection.execute(unfinished)), _counts(connection.execute(leased))
        # PostgreSQL reads the two counts at two moments: a row may have ended in between
        return [
            BatchWork(batch, +(waiting[batch.batch_id] - held[batch.batch_id]), held[batch.batch_id].total())
            for batch in batches
        ]

    # rows

    def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> int:
        """Add rows to a batch that is `validating`. Returns how many are new."""
        with self._writing() as connection:
            status = select(BATCHES.c.status).where(BATCHES.c.batch_id == batch_id).with_for_update()
            if not rows or connection.execute(status).scalar() != BatchStatus.VALIDATING.value:
                return 0
            first, last = min(row.number for row in rows), max(row.number for row in rows)
            known = BATCH_ROWS.c.batch_id == batch_id, BATCH_ROWS.c.number.between(first, last)
            kept = select(func.count()).where(*known)
            before = connection.execute(kept).scalar_one()
            values = [{"batch_id": batch_id, "attempts": 0} | asdict(row) for row in rows]
            connection.execute(self._insert(BATCH_ROWS).on_conflict_do_nothing(), values)
            return int(connection.execute(kept).scalar_one() - before)

    def claim_rows(
        self, worker: str, batch_id: str, model: str, limit: int, lease_s: float, claim: str
    ) -> list[ClaimedRow]:
        """Lease rows by prefix and number; `MAX_CLAIM` at most.

        Args:
            claim: the name of this claim; the same one again gets the rows that are left of it, and no other.
        """
        rows, now = BATCH_ROWS.c, self._now()
        named = and_(rows.batch_id == batch_id, rows.model == model, rows.is_failed.is_(None))
        chosen = select(*CLAIMED).where(named).order_by(rows.prefix, rows.number)
        is_running = BATCHES.c.batch_id == batch_id, BATCHES.c.status == BatchStatus.IN_PROGRESS.value
        free = or_(rows.worker.is_(None), rows.lease_until <= now)
        with self._writing() as connection:
            again = connection.execute(chosen.where(rows.worker == worker, rows.claim == claim)).all()
            if again or limit <= 0 or connection.execute(select(BATCHES.c.batch_id).where(*is_running)).first() is None:
                return [_claimed(row) for row in again]
            found = chosen.where(free).limit(min(limit, MAX_CLAIM)).with_for_update(skip_locked=True)
            claimed = [_claimed(row) for row in connection.execute(found)]
            lease = {"worker": worker, "claim": claim, "lease_until": now + lease_s}
            _update_rows(connection, batch_id, [row.number for row in claimed], lease)
            return claimed

    def renew(self, worker: str, lease_s: float) -> int:
        """Lease what the worker has for another `lease_s`, from now on. Returns how many rows."""
        rows = BATCH_ROWS.c
        # a row that another transaction has gets its result, or another worker
        held = select(rows.batch_id, rows.number).where(rows.worker == worker).with_for_update(skip_locked=True)
        with self._writing() as connection:
            numbers = _by_batch(connection.execute(held))
            for batch_id, of_batch in numbers:
                _update_rows(connection, batch_id, of_batch, {"lease_until": self._now() + lease_s})
            return sum(len(of_batch) for _, of_batch in numbers)

    def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> int:
        """Give back rows that the worker still has. Returns how many."""
        values = UNCLAIMED | ({"attempts": BATCH_ROWS.c.attempts + 1} if count_attempt else {})
        count = 0
        with self._writing() as connection:
            for batch_id, numbers in _by_batch(rows):
                held = _locked(connection, batch_id, numbers, BATCH_ROWS.c.worker == worker)
                _update_rows(connection, batch_id, held, values)
                count += len(held)
        return count

    def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]:
        """Keep the first result of each row, whoever has the row, and count it in its batch. Returns whose are new."""
        first = {(one.batch_id, one.number): one for one in reversed(results)}
        new = update(BATCH_ROWS).values(UNCLAIMED | {"is_failed": bindparam("failed"), "line": bindparam("text")})
        new = new.where(BATCH_ROWS.c.batch_id == bindparam("batch"), BATCH_ROWS.c.number == bindparam("row"))
        written = []
        with self._writing() as connection:
            for batch_id, numbers in _by_batch(first):
                open_rows = _locked(connection, batch_id, numbers, BATCH_ROWS.c.is_failed.is_(None))
                if not open_rows:
                    continue
                taken = [first[batch_id, number] for number in open_rows]
                connection.execute(
                    new, [{"batch": batch_id, "row": o.number, "failed": o.is_failed, "text": o.line} for o in taken]
                )
                failed = sum(one.is_failed for one in taken)
                counts = {"failed": BATCHES.c.failed + failed, "completed": BATCHES.c.completed + len(taken) - failed}
                connection.execute(update(BATCHES).where(BATCHES.c.batch_id == batch_id).values(counts))
                written += [(batch_id, number) for number in open_rows]
        return written

    def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        """Results of one kind by number, behind the number `after`."""
        rows = BATCH_ROWS.c
        chosen = select(rows.batch_id, rows.number, rows.is_failed, rows.line)
        chosen = chosen.where(rows.batch_id == batch_id, rows.is_failed.is_(failed), rows.number > after)
        with self._reading() as connection:
            found = connection.execute(chosen.order_by(rows.number).limit(limit))
            return [RowResult(**row._mapping) for row in found]

    def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        """Rows without a result by number, behind the number `after`, claimed or not."""
        rows = BATCH_ROWS.c
        chosen = select(*CLAIMED).where(rows.batch_id == batch_id, rows.is_failed.is_(None), rows.number > after)
        with self._reading() as connection:
            return [_claimed(row) for row in connection.execute(chosen.order_by(rows.number).limit(limit))]

    def forget_rows(self, batch_id: str) -> None:
        """Delete the rows of a batch with their results, in transactions of `FORGET_ROWS`; its counts stay."""
        rows = BATCH_ROWS.c
        some = select(rows.number).where(rows.batch_id == batch_id).order_by(rows.number).limit(FORGET_ROWS)
        while True:
            with self._writing() as connection:
                numbers = connection.execute(some.with_for_update()).scalars().all()
                if not numbers:
                    return
                connection.execute(delete(BATCH_ROWS).where(rows.batch_id == batch_id, rows.number <= numbers[-1]))


def _of_tenant(table: Table, tenant: str | None) -> Iterator[ColumnElement[bool]]:
    if tenant is not None:
        yield table.c.tenant == tenant


def _page(
    connection: Connection, chosen: Select[Any], id_column: Any, after: str | None, *, newest_first: bool
) -> Select[Any]:
    """The rows chosen in the order of their age, behind the one whose id is `after`."""
    created_at = id_column.table.c.created_at
    if after is not None:
        place = connection.execute(select(created_at).where(id_column == after)).scalar()
        if place is None:
            return chosen.where(false())
        own, theirs = tuple_(created_at, id_column), tuple_(place, after)
        chosen = chosen.where(own < theirs if newest_first else own > theirs)
    columns = (created_at, id_column)
    return chosen.order_by(*(column.desc() if newest_first else column for column in columns))


def _found(connection: Connection, chosen: Select[Any], name: str) -> Row[Any]:
    row = connection.execute(chosen).one_or_none()
    if row is None:
        raise KeyError(name)
    return row


def _by_batch(rows: Iterable[Any]) -> list[tuple[str, list[int]]]:
    """Pairs of batch and number, as the numbers of each batch, both in order."""
    numbers = defaultdict[str, set[int]](set)
    for batch_id, number in rows:
        numbers[batch_id].add(number)
    return [(batch_id, sorted(numbers[batch_id])) for batch_id in sorted(numbers)]


def _locked(connection: Connection, batch_id: str, numbers: Sequence[int], condition: ColumnElement[bool]) -> list[int]:
    """Which of these rows meet the condition, locked in order."""
    rows = BATCH_ROWS.c
    chosen = select(rows.number).where(rows.batch_id == batch_id, rows.number.in_(numbers), condition)
    return list(connection.execute(chosen.order_by(rows.number).with_for_update()).scalars())


def _update_rows(connection: Connection, batch_id: str, numbers: Sequence[int], values: Mapping[str, Any]) -> None:
    if numbers:
        named = BATCH_ROWS.c.batch_id == batch_id, BATCH_ROWS.c.number.in_(numbers)
        connection.execute(update(BATCH_ROWS).where(*named).values(values))


def _counts(rows: Iterable[Any]) -> dict[str, Counter[str]]:
    """Rows of batch, model and count, as counts of models by batch."""
    counts = defaultdict[str, Counter[str]](Counter)
    for batch_id, model, count in rows:
        counts[batch_id][model] = count
    return counts


def _columns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `BatchRecord` as columns."""
    columns = dict(values)
    if "status" in columns:
        columns["status"] = BatchStatus(columns["status"]).value
    if "metadata" in columns:
        columns["metadata"] = json.dumps(dict(columns["metadata"]))
    if "errors" in columns:
        columns["errors"] = json.dumps([asdict(error) for error in columns["errors"]])
    return columns


def _batch(row: Row[Any]) -> BatchRecord:
    values = dict(row._mapping)
    values["status"] = BatchStatus(values["status"])
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = tuple(RowError(**error) for error in json.loads(values["errors"]))
    return BatchRecord(**values)


def _file(row: Row[Any]) -> FileRecord:
    return FileRecord(**(dict(row._mapping) | {"filename": json.loads(row.filename)}))


def _claimed(row: Row[Any]) -> ClaimedRow:
    return ClaimedRow(**row._mapping)
