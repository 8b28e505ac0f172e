"""Records of files and batches as rows of their tables, and pages of both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, or_, select

from serve_app.core.batches import INPUT_PURPOSE, BatchRecord, BatchStatus, FileRecord, RowError
from serve_app.store.tables import BATCH_FILES, BATCHES

FILES = BATCH_FILES.c
B = BATCHES.c
# What a record has; the other columns are the store's own.
FILE_COLUMNS = tuple(FILES[one.name] for one in fields(FileRecord))
BATCH_NAMES = tuple(one.name for one in fields(BatchRecord))
BATCH_COLUMNS = tuple(B[name] for name in BATCH_NAMES)


def of_tenant(file_id: str, tenant: str | None) -> list[ColumnElement[bool]]:
    """The conditions for a file of a tenant; None: of any."""
    return [FILES.file_id == file_id, *([] if tenant is None else [FILES.tenant == tenant])]


def one_file(connection: Connection, *chosen: ColumnElement[bool], is_locked: bool = False) -> FileRecord:
    """Raises KeyError. `is_locked`: nobody else changes it before this transaction ends."""
    found = select(*FILE_COLUMNS).where(*chosen)
    row = connection.execute(found.with_for_update() if is_locked else found).one_or_none()
    if row is None:
        raise KeyError("there is no such file")
    return FileRecord(**row._mapping)


def input_of(batch: BatchRecord) -> list[ColumnElement[bool]]:
    """The conditions for the file that a new batch reads."""
    lives = or_(FILES.expires_at.is_(None), FILES.expires_at > batch.created_at)
    is_there = FILES.deleted_at.is_(None), FILES.size.is_not(None), FILES.purpose == INPUT_PURPOSE
    return [*of_tenant(batch.input_file_id, batch.tenant), *is_there, lives]


def stored_bytes(
    connection: Connection, tenant: str, now: float, *, without: str | None = None, is_locked: bool = False
) -> int:
    """Of all complete files of the tenant, and what its uploads have reserved. `without`: this file. `is_locked`: no
    upload of it is completed or grows before this transaction ends."""
    files = FILES.tenant == tenant, FILES.deleted_at.is_(None)
    if is_locked:
        uploads = select(FILES.file_id).where(*files, FILES.size.is_(None)).order_by(FILES.file_id)
        connection.execute(uploads.with_for_update()).all()
    reserved = case((FILES.reserved_until > now, FILES.reserved), else_=0)
    chosen = select(func.coalesce(func.sum(func.coalesce(FILES.size, reserved)), 0)).where(*files)
    return int(connection.execute(chosen if without is None else chosen.where(FILES.file_id != without)).scalar_one())


def one_batch(connection: Connection, batch_id: str, tenant: str | None) -> BatchRecord:
    """Raises KeyError: there is none, or it is another tenant's (None: any)."""
    chosen = select(*BATCH_COLUMNS).where(B.batch_id == batch_id)
    row = connection.execute(chosen if tenant is None else chosen.where(B.tenant == tenant)).one_or_none()
    if row is None:
        raise KeyError(batch_id)
    return batch_record(row)


def batch_record(row: Row[Any]) -> BatchRecord:
    """Of a row that begins with `BATCH_COLUMNS`. By place: names would cost three times as much, thousands of times."""
    values: dict[str, Any] = dict(zip(BATCH_NAMES, row, strict=False))
    values["status"] = BatchStatus(values["status"])
    values["metadata"] = json.loads(values["metadata"])
    values["errors"] = tuple(RowError(**one) for one in json.loads(values["errors"]))
    return BatchRecord(**values)


def batch_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `BatchRecord` as columns. Raises ValueError: it has no such field."""
    if unknown := changes.keys() - {one.name for one in fields(BatchRecord)}:
        raise ValueError(f"a batch has no {sorted(unknown)[0]!r}")
    columns = dict(changes)
    if "status" in columns:
        columns["status"] = str(BatchStatus(columns["status"]))
    if "metadata" in columns:
        columns["metadata"] = json.dumps(dict(columns["metadata"]))
    if "errors" in columns:
        columns["errors"] = json.dumps([asdict(one) for one in columns["errors"]])
    return columns


def page_of(
    connection: Connection,
    chosen: Select[Any],
    time: Any,
    name: Any,
    after: str | None,
    limit: int,
    *,
    newest_first: bool,
) -> Iterable[Row[Any]]:
    """A page by time, and by name at the same time; behind the one called `after`, which may have been deleted since.
    Nothing is behind one that never was."""
    if after is not None:
        at = select(time).where(name == after).scalar_subquery()
        beyond = time < at if newest_first else time > at
        same = and_(time == at, name < after if newest_first else name > after)
        chosen = chosen.where(or_(beyond, same))
    order = (time.desc(), name.desc()) if newest_first else (time, name)
    return connection.execute(chosen.order_by(*order).limit(limit))
