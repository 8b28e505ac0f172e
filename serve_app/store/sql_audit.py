"""The audit record over SQLAlchemy.

Invariant: an entry of a change that the store makes is written in the transaction of that change. Numbers become
visible in their order, so a reader that asks for what comes after a number misses no entry.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, delete, select, update

from serve_app.store.audit import AuditEntry, Author
from serve_app.store.database import Database
from serve_app.store.tables import AUDIT, AUDIT_NUMBER, VERSIONS

A = AUDIT.c


class SqlAudit:
    """Threads may share it. Every method raises StoreAway if the database cannot be used; the next call tries again."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, entry: AuditEntry) -> None:
        """Add an entry, once."""
        with self._database.writing() as connection:
            self.add_in(connection, entry)

    def add_in(self, connection: Connection, entry: AuditEntry) -> None:
        """The same in a transaction that has begun."""
        counted = update(VERSIONS).where(VERSIONS.c.name == AUDIT_NUMBER).values(version=VERSIONS.c.version + 1)
        number = connection.execute(counted.returning(VERSIONS.c.version)).scalar_one()
        columns = {
            "number": number,
            "entry_id": entry.entry_id,
            "at": entry.at,
            "author": entry.author.key_id,
            "tenant": entry.author.tenant,
            "action": str(entry.action),
            "target": entry.target,
            "digest_before": entry.digest_before,
            "digest_after": entry.digest_after,
            "details": json.dumps(dict(entry.details)),
        }
        adding = self._database.insert(AUDIT).values(columns)
        connection.execute(adding.on_conflict_do_nothing(index_elements=["entry_id"]))

    def entries(self, since: float, after: int, limit: int) -> list[AuditEntry]:
        """Entries since a time, behind the number `after`, in the order of their numbers."""
        chosen = select(AUDIT).where(A.at >= since, A.number > after).order_by(A.number).limit(limit)
        with self._database.reading() as connection:
            return [_entry(dict(row)) for row in connection.execute(chosen).mappings()]

    def forget(self, before: float, limit: int) -> int:
        """Remove entries from before a time, at most `limit`. Returns how many."""
        old = select(A.number).where(A.at < before).order_by(A.number).limit(limit)
        with self._database.writing() as connection:
            # another router removes those that it has locked
            numbers = connection.execute(old.with_for_update(skip_locked=True)).scalars().all()
            connection.execute(delete(AUDIT).where(A.number.in_(numbers)))
            return len(numbers)


def _entry(values: dict[str, Any]) -> AuditEntry:
    author = Author(values.pop("author"), values.pop("tenant"))
    return AuditEntry(author=author, **(values | {"details": json.loads(values["details"])}))
