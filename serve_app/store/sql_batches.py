"""Batches, their files and rows over SQLAlchemy: each method is one transaction, durable once it returns. Calls block.

Invariant: a row has one result, the first that was written, and a batch's counts are those of its results; a row is
leased to one worker at a time, and a batch until its next status; whatever is called again with the same arguments
changes nothing. A batch that has not ended has its input file. A file is locked before batches, rows in the order of
batch and number and before their batch, or passed over where another transaction has them: no two transactions wait for
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Select, and_, delete, exists, func, or_, select, update

from serve_app.core.batches import (
    ENDED,
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowResult,
    check_stored,
)
from serve_app.errors import BatchConflict
from serve_app.store.batch_columns import (
    BATCH_COLUMNS,
    FILE_COLUMNS,
    FILES,
    B,
    batch_record,
    batch_values,
    input_of,
    of_tenant,
    one_batch,
    one_file,
    page_of,
    stored_bytes,
)
from serve_app.store.database import Database
from serve_app.store.sql_rows import (
    CLAIMED,
    FREE,
    NOBODYS,
    ROWS,
    WRITE_RESULT,
    RowKey,
    by_batch,
    change_rows,
    claimable,
    counts_by_model,
    lock_rows,
)
from serve_app.store.tables import BATCH_FILES, BATCH_ROWS, BATCHES

ENDED_AT = func.coalesce(B.completed_at, B.failed_at, B.cancelled_at, B.expired_at)
IS_LIVE = B.status.in_([str(one) for one in BatchStatus if one not in ENDED])  # few: found by their index
UPLOAD_S = 7 * 86_400.0  # what is not complete by then never will be, even if files or store were away for days
RESERVED_S = 120.0  # an upload reserves anew for each MiB, which takes 16 s at its slowest; its router may die
MAX_CLAIM = 10_000  # rows: SQLite takes 32,766 parameters
FORGET_ROWS = 2000  # of one transaction: some 10 MB of results, so that SQLite's other writers wait for milliseconds


class SqlBatches:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Files

    def add_file(self, record: FileRecord) -> FileRecord:
        """Add a file, which may not be complete yet; one of this id stays as it is, and is returned."""
        with self._database.writing() as connection:
            connection.execute(self._database.insert(BATCH_FILES).values(asdict(record)).on_conflict_do_nothing())
            return one_file(connection, FILES.file_id == record.file_id)

    def finish_file(self, file_id: str, size: int, max_tenant_bytes: int | None = None) -> FileRecord:
        """Its content is complete.

        Raises:
            KeyError: there is no such file, or it is deleted. BodyTooLarge: with it the tenant's complete files have
            more than `max_tenant_bytes`.
        """
        chosen = FILES.file_id == file_id, FILES.deleted_at.is_(None)
        with self._database.writing() as connection:
            file = one_file(connection, *chosen)
            if file.size is None and max_tenant_bytes is not None:
                others = stored_bytes(connection, file.tenant, self._database.now(), without=file_id, is_locked=True)
                check_stored(others, size, max_tenant_bytes)
            connection.execute(update(BATCH_FILES).where(*chosen).values(size=size))
            return one_file(connection, *chosen)

    def reserve_bytes(self, file_id: str, size: int, wanted: int, max_tenant_bytes: int) -> int:
        """Reserve bytes of the tenant for content that arrives: `wanted`, or as many as are left, `size` at least; for
        `RESERVED_S` from now. Returns how many.

        Raises:
            KeyError, BodyTooLarge: as `finish_file`.
        """
        chosen = (FILES.file_id == file_id, FILES.deleted_at.is_(None))
        now = self._database.now()
        with self._database.writing() as connection:
            file = one_file(connection, *chosen)
            others = stored_bytes(connection, file.tenant, now, without=file_id, is_locked=True)
            check_stored(others, size, max_tenant_bytes)
            reserved = min(wanted, max_tenant_bytes - others)
            held = {"reserved": reserved, "reserved_until": now + RESERVED_S}
            connection.execute(update(BATCH_FILES).where(*chosen).values(held))
            return reserved

    def stored_bytes(self, tenant: str) -> int:
        """Of all complete files of the tenant, and what its uploads have reserved."""
        with self._database.reading() as connection:
            return stored_bytes(connection, tenant, self._database.now())

    def file(self, file_id: str, tenant: str | None) -> FileRecord:
        """Raises KeyError: there is none, it is deleted, or it is another tenant's (None: any)."""
        with self._database.reading() as connection:
            return one_file(connection, *of_tenant(file_id, tenant), FILES.deleted_at.is_(None))

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRecord]:
        """The tenant's complete files, those behind `after`."""
        chosen = select(*FILE_COLUMNS).where(
            FILES.tenant == tenant, FILES.deleted_at.is_(None), FILES.size.is_not(None)
        )
        if purpose is not None:
            chosen = chosen.where(FILES.purpose == purpose)
        with self._database.reading() as connection:
            page = page_of(connection, chosen, FILES.created_at, FILES.file_id, after, limit, newest_first=newest_first)
            return [FileRecord(**row._mapping) for row in page]

    def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        """Delete the record; `content_removed` follows once its content is removed.

        Raises:
            KeyError: there is none, it is another tenant's, or was deleted at another time than `now`.
            BatchConflict: a batch that has not ended reads it.
        """
        with self._database.writing() as connection:
            file = one_file(connection, *of_tenant(file_id, tenant), is_locked=True)
            if file.deleted_at not in (None, now):
                raise KeyError(file_id)
            reading = select(B.batch_id, B.status).where(B.input_file_id == file_id, IS_LIVE).limit(1)
            if file.deleted_at is None and (batch := connection.execute(reading).one_or_none()) is not None:
                raise BatchConflict(
                    f"{batch.batch_id} reads this file and is {batch.status}: cancel it first", code="file_in_use"
                )
            connection.execute(update(BATCH_FILES).where(FILES.file_id == file_id).values(deleted_at=now))
            return replace(file, deleted_at=now)

    def content_removed(self, file_id: str, now: float) -> None:
        """Nothing is left of the content of a deleted file."""
        with self._database.writing() as connection:
            chosen = FILES.file_id == file_id, FILES.deleted_at.is_not(None), FILES.removed_at.is_(None)
            connection.execute(update(BATCH_FILES).where(*chosen).values(removed_at=now))

    def files_to_remove(self, now: float, limit: int) -> list[FileRecord]:
        """Files that expire, whose upload was left incomplete long ago, or that are deleted and have content; none that
        a batch reads."""
        left = and_(FILES.size.is_(None), FILES.created_at <= now - UPLOAD_S)
        over = or_(FILES.expires_at <= now, left, FILES.deleted_at.is_not(None))
        chosen = FILES.removed_at.is_(None), over, ~exists().where(B.input_file_id == FILES.file_id, IS_LIVE)
        with self._database.reading() as connection:
            rows = connection.execute(select(*FILE_COLUMNS).where(*chosen).order_by(FILES.created_at).limit(limit))
            return [FileRecord(**row._mapping) for row in rows]

    # Batches

    def create_batch(
        self, record: BatchRecord, *, key: bytes | None = None, fingerprint: bytes | None = None
    ) -> BatchRecord:
        """Add a batch; one of this key, or without a key of this id, stays as it is, and is returned.

        Raises:
            KeyError: the tenant has no such input file, complete and not over. ValueError: the batch of the key was
            asked for with another fingerprint.
        """
        request = {"request_key": key, "request_fingerprint": fingerprint}
        same = B.batch_id == record.batch_id if key is None else B.request_key == key
        made: Select[Any] = select(*BATCH_COLUMNS, B.request_fingerprint).where(same)
        with self._database.writing() as connection:
            if connection.execute(select(B.batch_id).where(same)).scalar() is None:
                one_file(connection, *input_of(record), is_locked=True)  # it stays until the batch is in
                values = batch_values({one.name: getattr(record, one.name) for one in fields(BatchRecord)}) | request
                connection.execute(self._database.insert(BATCHES).values(values).on_conflict_do_nothing())
            row = connection.execute(made).one()
            if row.request_fingerprint != fingerprint:
                raise ValueError("the key was used for another batch")
            return batch_record(row)

    def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        """Raises KeyError: there is none, or it is another tenant's (None: any)."""
        with self._database.reading() as connection:
            return one_batch(connection, batch_id, tenant)

    def batches(self, tenant: str | None, *, after: str | None, limit: int) -> list[BatchRecord]:
        """The newest first, those behind `after`."""
        chosen = select(*BATCH_COLUMNS) if tenant is None else select(*BATCH_COLUMNS).where(B.tenant == tenant)
        with self._database.reading() as connection:
            page = page_of(connection, chosen, B.created_at, B.batch_id, after, limit, newest_first=True)
            return [batch_record(row) for row in page]

    def change_batch(self, batch_id: str, *, if_status: Sequence[BatchStatus], **changes: Any) -> BatchRecord | None:
        """Change fields of a batch, if it is in one of these statuses; None: it is not, and has other values.

        Raises:
            KeyError: there is no such batch. ValueError: it has no such field.
        """
        with self._database.writing() as connection:
            columns = batch_values(changes)
            row = connection.execute(
                select(*BATCH_COLUMNS).where(B.batch_id == batch_id).with_for_update()
            ).one_or_none()
            if row is None:
                raise KeyError(batch_id)
            if row.status not in if_status:
                is_same = all(row._mapping[name] == value for name, value in columns.items())
                return batch_record(row) if is_same else None
            freed = {"worker": None, "leased_until": None} if "status" in columns else {}
            connection.execute(update(BATCHES).where(B.batch_id == batch_id).values(columns | freed))
            return one_batch(connection, batch_id, None)

    def lease_batch(self, batch_id: str, status: BatchStatus, worker: str, lease_s: float) -> bool:
        """Lease a batch in this status to a worker, until its next one; whoever has it has it for as long again.
        False: another worker has it, or it is in another status."""
        now = self._database.now()
        free = or_(B.worker.is_(None), B.worker == worker, B.leased_until <= now)
        with self._database.writing() as connection:
            chosen = update(BATCHES).where(B.batch_id == batch_id, B.status == str(status), free)
            leased = connection.execute(chosen.values(worker=worker, leased_until=now + lease_s))
            return leased.rowcount == 1

    def forget_records(self, before: float, limit: int) -> int:
        """Remove records of removed files and ended batches, at most `limit` of each. Returns how many."""
        removed = select(FILES.file_id).where(FILES.removed_at <= before).order_by(FILES.removed_at)
        # the index of `created_at` bounds what is read; a batch that is finalized can have `expired_at` and be live
        ended = select(B.batch_id).where(B.created_at <= before, before >= ENDED_AT, ~IS_LIVE).order_by(B.created_at)
        count = 0
        with self._database.writing() as connection:
            for table, name, chosen in ((BATCH_FILES, FILES.file_id, removed), (BATCHES, B.batch_id, ended)):
                # another worker removes those that it has locked
                found = connection.execute(chosen.limit(limit).with_for_update(skip_locked=True)).scalars().all()
                connection.execute(delete(table).where(name.in_(found)))
                count += len(found)
        return count

    def work(self) -> list[BatchWork]:
        """The batches that are not over, the oldest first."""
        with self._database.reading() as connection:
            chosen = select(*BATCH_COLUMNS).where(IS_LIVE).order_by(B.created_at, B.batch_id)
            found = [batch_record(row) for row in connection.execute(chosen)]
            if not found:
                return []
            by = ROWS.batch_id, ROWS.model
            unfinished = select(*by, func.count()).where(ROWS.is_failed.is_(None)).group_by(*by)
            is_held = ROWS.worker.is_not(None), ROWS.leased_until > self._database.now()
            left = counts_by_model(connection.execute(unfinished))  # read from an index alone
            leased = counts_by_model(connection.execute(select(*by, func.count()).where(*is_held).group_by(*by)))
        # PostgreSQL reads the two counts at two moments: a row may have been claimed between them
        return [
            BatchWork(one, dict(left[one.batch_id] - held), held.total(), dict(held))
            for one in found
            for held in (leased[one.batch_id],)
        ]

    # Rows

    def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> int:
        """Add rows while the batch is validated; those that are there stay as they are. Returns how many are new."""
        values = [
            {
                "batch_id": batch_id,
                "number": row.number,
                "row_offset": row.offset,
                "row_length": row.length,
                "custom_id": row.custom_id,
                "model": row.model,
                "prefix": row.prefix,
                "attempts": 0,
                "leased_until": FREE,
            }
            for row in rows
        ]
        with self._database.writing() as connection:
            status = select(B.status).where(B.batch_id == batch_id).with_for_update()  # it stays until the rows are in
            if not values or connection.execute(status).scalar() != BatchStatus.VALIDATING:
                return 0
            first = min(row.number for row in rows)
            last = max(row.number for row in rows)
            stored = select(func.count()).where(ROWS.batch_id == batch_id, ROWS.number.between(first, last))
            before = connection.execute(stored).scalar_one()
            connection.execute(self._database.insert(BATCH_ROWS).on_conflict_do_nothing(), values)
            return int(connection.execute(stored).scalar_one() - before)

    def claim_rows(
        self, worker: str, batch_id: str, model: str, limit: int, lease_s: float, claim: str
    ) -> list[ClaimedRow]:
        """Lease rows without a result that nobody has, by prefix, to a worker; none unless the batch is in progress.
        `claim`: its name; the same one again gets the same rows."""
        now = self._database.now()
        free = and_(ROWS.batch_id == batch_id, ROWS.model == model, ROWS.is_failed.is_(None), ROWS.leased_until <= now)
        same = and_(ROWS.worker == worker, ROWS.claim == claim, ROWS.is_failed.is_(None))
        with self._database.writing() as connection:
            if rows := [ClaimedRow(*row) for row in connection.execute(claimable().where(same).order_by(*CLAIMED))]:
                return rows
            status = connection.execute(select(B.status).where(B.batch_id == batch_id)).scalar()
            if status != BatchStatus.IN_PROGRESS or limit <= 0:
                return []
            chosen = claimable().where(free).order_by(*CLAIMED).limit(min(limit, MAX_CLAIM))
            rows = [ClaimedRow(*row) for row in connection.execute(chosen.with_for_update(skip_locked=True))]
            taken = {"worker": worker, "claim": claim, "leased_until": now + lease_s}
            change_rows(connection, batch_id, [row.number for row in rows], taken)
            return rows

    def renew(self, worker: str, lease_s: float) -> int:
        """Lease the rows that a worker has for as long again, from now. Returns how many."""
        with self._database.writing() as connection:
            held = select(ROWS.batch_id, ROWS.number).where(ROWS.worker == worker)
            # whoever has one of them locked writes its result, or has claimed it
            rows = by_batch((*row,) for row in connection.execute(held.with_for_update(skip_locked=True)))
            for batch_id, numbers in rows.items():
                change_rows(connection, batch_id, numbers, {"leased_until": self._database.now() + lease_s})
            return sum(len(numbers) for numbers in rows.values())

    def release_rows(self, worker: str, rows: Sequence[RowKey], *, count_attempt: bool) -> int:
        """Give rows back that this worker has. `count_attempt`: their runs failed. Returns how many."""
        free = dict[str, Any](NOBODYS)
        if count_attempt:
            free["attempts"] = ROWS.attempts + 1
        count = 0
        with self._database.writing() as connection:
            for batch_id, numbers in by_batch(rows).items():
                held = lock_rows(connection, batch_id, numbers, ROWS.worker == worker)
                change_rows(connection, batch_id, held, free)
                count += len(held)
        return count

    def add_results(self, results: Sequence[RowResult]) -> list[RowKey]:
        """Write results of rows that have none, and count them. Returns those written."""
        first: dict[RowKey, RowResult] = {}
        for result in results:
            first.setdefault((result.batch_id, result.number), result)
        with self._database.writing() as connection:
            written = [
                first[batch_id, number]
                for batch_id, numbers in by_batch(first).items()
                for number in lock_rows(connection, batch_id, numbers, ROWS.is_failed.is_(None))
            ]
            if written:
                connection.execute(
                    WRITE_RESULT, [{f"new_{name}": value for name, value in asdict(one).items()} for one in written]
                )
            for batch_id in sorted({one.batch_id for one in written}):
                failed = [one.is_failed for one in written if one.batch_id == batch_id]
                counts = {"failed": B.failed + sum(failed), "completed": B.completed + len(failed) - sum(failed)}
                connection.execute(update(BATCHES).where(B.batch_id == batch_id).values(counts))
            return [(one.batch_id, one.number) for one in written]

    def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        """Results of rows behind a number, in the order of the lines."""
        chosen = (
            select(ROWS.batch_id, ROWS.number, ROWS.is_failed, ROWS.line)
            .where(ROWS.batch_id == batch_id, ROWS.number > after, ROWS.is_failed.is_(failed))
            .order_by(ROWS.number)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [RowResult(*row) for row in connection.execute(chosen)]

    def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        """Rows without a result behind a number, whoever has them, in the order of the lines."""
        without = ROWS.batch_id == batch_id, ROWS.number > after, ROWS.is_failed.is_(None)
        with self._database.reading() as connection:
            chosen = claimable().where(*without).order_by(ROWS.number).limit(limit)
            return [ClaimedRow(*row) for row in connection.execute(chosen)]

    def forget_rows(self, batch_id: str) -> None:
        """Remove the rows of a batch that is over, with their results, in transactions of `FORGET_ROWS`."""
        some = select(ROWS.number).where(ROWS.batch_id == batch_id).order_by(ROWS.number).limit(FORGET_ROWS)
        while True:
            with self._database.writing() as connection:
                numbers = connection.execute(some.with_for_update()).scalars().all()
                if not numbers:
                    return
                connection.execute(delete(BATCH_ROWS).where(ROWS.batch_id == batch_id, ROWS.number <= numbers[-1]))
