"""The store over SQLAlchemy: each method is one transaction, durable when it returns. Its calls block.

Invariant: versions of keys become visible in their order, so nobody who asks for what changed since a version misses a
change; a batch of use counts once, however often it is sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import (
    Connection,
    CursorResult,
    Row,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from serve_app.core.limits import Limits
from serve_app.core.times import USAGE_SILENT_S
from serve_app.core.usage import BATCH_SUFFIX, USAGE_COUNTS, InFlightUse, UsageBatch, UsageRow
from serve_app.errors import KeyConflict
from serve_app.store.audit import NOBODY_KNOWN, Author, key_changed, key_created
from serve_app.store.database import Database
from serve_app.store.records import KeyRecord, UsageQuery, Used, in_flight_json, in_flight_of
from serve_app.store.sql_audit import SqlAudit
from serve_app.store.sql_background import SqlBackground
from serve_app.store.sql_batches import SqlBatches
from serve_app.store.sql_figures import SqlFigures
from serve_app.store.sql_responses import SqlResponses
from serve_app.store.sql_usage import add_rows, usage_sums
from serve_app.store.tables import API_KEYS, KEYS_VERSION, USAGE, USAGE_SOURCES, VERSIONS
from serve_app.types import RequestClass

SOURCE_KEPT_S = 7 * 86400.0  # an ended source is remembered this long, so that a batch repeated late counts once


class SqlStore:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again.

    Args:
        url: SQLAlchemy's, of SQLite or PostgreSQL; the first call makes or upgrades the tables.
        now: seconds since 1970 UTC.
    """

    def __init__(self, url: str, now: Callable[[], float] = time.time) -> None:
        self._database = database = Database(url, now)
        self.batches = SqlBatches(database)
        self.figures = SqlFigures(database, self.batches)
        self.responses = SqlResponses(database)
        self.background = SqlBackground(database, self.responses)
        self.audit = SqlAudit(database)

    def close(self) -> None:
        self._database.close()

    def keys_since(self, version: int) -> tuple[int, list[KeyRecord]]:
        """The version now, and the keys changed after `version`; all, if the store is behind it (a restored backup)."""
        with self._database.reading() as connection:
            # the version first: what is committed in between is told twice, and not lost
            current = connection.execute(select(VERSIONS.c.version).where(VERSIONS.c.name == KEYS_VERSION)).scalar_one()
            if version == current:
                return current, []
            after = version if version < current else 0
            rows = connection.execute(select(API_KEYS).where(API_KEYS.c.version > after).order_by(API_KEYS.c.version))
            return current, [_record(row) for row in rows]

    def keys(self) -> list[KeyRecord]:
        """All keys, the oldest first."""
        with self._database.reading() as connection:
            rows = connection.execute(select(API_KEYS).order_by(API_KEYS.c.created_at, API_KEYS.c.key_id))
            return [_record(row) for row in rows]

    def key(self, key_id: str) -> KeyRecord:
        """Raises KeyError: there is no such key."""
        with self._database.reading() as connection:
            return _one(connection, key_id)

    def create_key(self, record: KeyRecord, by: Author = NOBODY_KNOWN) -> KeyRecord:
        """Raises KeyConflict: another key has its id or its digest. The same record again changes nothing. `by`: who
        makes it, for the audit record."""
        try:
            with self._database.writing() as connection:
                columns = _columns(asdict(record)) | {"version": _next_version(connection)}
                connection.execute(insert(API_KEYS).values(columns))
                self.audit.add_in(connection, key_created(record, by, self._database.now()))
                return _one(connection, record.key_id)
        except IntegrityError:
            with self._database.reading() as connection:
                same = API_KEYS.c.key_id == record.key_id, API_KEYS.c.digest == record.digest
                row = connection.execute(select(API_KEYS).where(*same)).one_or_none()
            if row is None:
                raise KeyConflict("there is a key with this id or this digest already") from None
            return _record(row)

    def change_key(
        self, key_id: str, *, if_version: int | None = None, by: Author = NOBODY_KNOWN, **changes: Any
    ) -> KeyRecord:
        """Change fields of a key. The same changes again change nothing.

        Args:
            if_version: only of the key as it was with this version.
            by: who changes it, for the audit record.

        Raises:
            KeyError: there is no such key. KeyConflict: it has another version and other values.
        """
        with self._database.writing() as connection:
            version = _next_version(connection)
            columns = _columns(changes)
            row = connection.execute(select(API_KEYS).where(API_KEYS.c.key_id == key_id)).one_or_none()
            if row is None:
                raise KeyError(key_id)
            if all(row._mapping[name] == value for name, value in columns.items()):
                return _record(row)
            if if_version not in (None, row.version):
                raise KeyConflict("the key was changed at the same time: look at it, then try again")
            columns["version"] = version
            connection.execute(update(API_KEYS).where(API_KEYS.c.key_id == key_id).values(columns))
            changed = _one(connection, key_id)
            self.audit.add_in(connection, key_changed(_record(row), changed, by, self._database.now()))
            return changed

    def add_usage(self, batch: UsageBatch) -> None:
        """Add a batch, once. A source that was ended has come back with it, and what it had in flight is no longer
        unsettled: this batch, or a later one, has it."""
        with self._database.writing() as connection:
            source = USAGE_SOURCES.c
            now = self._database.now()
            fresh = self._database.insert(USAGE_SOURCES).values(
                source=batch.source, seq=0, in_flight="[]", ended=False, seen_at=now
            )
            connection.execute(fresh.on_conflict_do_nothing())
            named = source.source == batch.source
            stored = select(source.seq, source.in_flight, source.ended).where(named).with_for_update()
            seq, in_flight, ended = connection.execute(stored).one()
            if seq >= batch.seq:
                return
            again = _unsettled(in_flight_of(in_flight), -1) if ended else []
            add_rows(connection, self._database.insert, [*again, *batch.rows])
            state = {
                "seq": batch.seq,
                "in_flight": in_flight_json(batch.in_flight),
                "ended": False,
                "seen_at": now,
            }
            connection.execute(update(USAGE_SOURCES).where(named).values(state))

    def _end_silent(self) -> None:
        """End the sources that have requests in flight and have not reported for `USAGE_SILENT_S`: what they had in
        flight is unsettled. Whoever asks for use does it, so no process has to watch. One that comes back changes that
        (`add_usage`)."""
        table = USAGE_SOURCES.c
        silent = and_(table.in_flight != "[]", ~table.ended, table.seen_at < self._database.now() - USAGE_SILENT_S)
        with self._database.reading() as connection:
            if connection.execute(select(table.source).where(silent).limit(1)).first() is None:
                return
        with self._database.writing() as connection:
            found = select(table.source, table.in_flight).where(silent).order_by(table.source).with_for_update()
            ended = {source: in_flight_of(text) for source, text in connection.execute(found)}
            entries = [entry for in_flight in ended.values() for entry in in_flight]
            add_rows(connection, self._database.insert, _unsettled(entries, 1))
            connection.execute(update(USAGE_SOURCES).where(table.source.in_(ended)).values(ended=True))
            idle = or_(table.in_flight == "[]", table.ended)
            connection.execute(delete(USAGE_SOURCES).where(idle, table.seen_at < self._database.now() - SOURCE_KEPT_S))

    def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums of use, ordered by what they are grouped by. Raises ValueError: `by` has an unknown word."""
        sums = usage_sums(query)
        self._end_silent()
        with self._database.reading() as connection:
            rows = connection.execute(sums).mappings()
            return [_usage_row(dict(row)) for row in rows if row["requests"] or row["unsettled"]]

    def used(self, scope: str, start_day: str) -> Used:
        """What a scope has used since a day, with that day: `key:ID`, `tenant:NAME` and `model:TENANT\\0MODEL` without
        the rows of batches, `rows:ID` and `batch:TENANT` of them alone, and `allowance:ID` of a key with its rows."""
        self._end_silent()
        requests = func.sum(USAGE.c.requests + USAGE.c.unsettled)
        tokens = func.sum(USAGE.c.prompt_tokens + USAGE.c.output_tokens)
        cost = func.sum(USAGE.c.cost_micro)
        with self._database.reading() as connection:
            chosen = select(requests, tokens, cost).where(USAGE.c.day >= start_day, _of_scope(scope))
            return Used(*(int(value or 0) for value in connection.execute(chosen).one()))


def _unsettled(in_flight: Iterable[InFlightUse], sign: int) -> list[UsageRow]:
    return [UsageRow(one.day, one.key_id, one.tenant, one.model, unsettled=sign * one.count) for one in in_flight]


def _next_version(connection: Connection) -> int:
    counted = update(VERSIONS).where(VERSIONS.c.name == KEYS_VERSION).values(version=VERSIONS.c.version + 1)
    result: CursorResult[Any] = connection.execute(counted.returning(VERSIONS.c.version))
    return int(result.scalar_one())


def _one(connection: Connection, key_id: str) -> KeyRecord:
    row = connection.execute(select(API_KEYS).where(API_KEYS.c.key_id == key_id)).one_or_none()
    if row is None:
        raise KeyError(key_id)
    return _record(row)


def _columns(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a `KeyRecord` as columns."""
    columns = dict(fields)
    if columns.get("models") is not None:
        columns["models"] = json.dumps(columns["models"])
    for name in ("limits", "batch_limits"):
        if (limits := columns.get(name)) is not None:
            columns[name] = json.dumps(asdict(limits) if isinstance(limits, Limits) else limits)
    for name in ("max_class", "default_class"):
        if name in columns:
            columns[name] = int(columns[name])
    return columns


def _record(row: Row[Any]) -> KeyRecord:
    values = dict(row._mapping)
    for name in ("max_class", "default_class"):
        values[name] = RequestClass(values[name])
    if values["models"] is not None:
        values["models"] = tuple(json.loads(values["models"]))
    for name in ("limits", "batch_limits"):
        if values[name] is not None:
            values[name] = Limits(**json.loads(values[name]))
    return KeyRecord(**values)


def _usage_row(values: dict[str, Any]) -> UsageRow:
    counts = {name: int(values[name]) for name in USAGE_COUNTS}  # PostgreSQL's sums are Decimal
    return UsageRow(**(values | counts))


def _of_scope(scope: str) -> Any:
    """The condition for the rows of a scope. Raises ValueError: no such scope."""
    kind, _, name = scope.partition(":")
    of_batches = USAGE.c.model.endswith(BATCH_SUFFIX, autoescape=True)
    if kind == "allowance":
        return USAGE.c.key_id == name
    if kind in ("key", "rows"):
        return and_(USAGE.c.key_id == name, of_batches if kind == "rows" else ~of_batches)
    if kind == "tenant":
        return and_(USAGE.c.tenant == name, ~of_batches)
    if kind == "batch":
        return and_(USAGE.c.tenant == name, of_batches)
    tenant, found, model = name.partition("\0")
    if kind == "model" and found:
        return and_(USAGE.c.tenant == tenant, USAGE.c.model == model)
    raise ValueError(f"no scope of limits: {scope!r}")
