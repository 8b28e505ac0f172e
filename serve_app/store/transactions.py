"""Transactions on a database whose tables are up to date: the first one makes or upgrades them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.store import database, schema


class Transactions:
    """Threads may share it. A transaction raises StoreAway if the database cannot be used; the next one tries again."""

    def __init__(self, url: str) -> None:
        self._engine = database.engine_of(url)
        self._upgraded, self._upgrading = False, threading.Lock()

    def close(self) -> None:
        self._engine.dispose()

    def reading(self) -> AbstractContextManager[Connection]:
        return self._transaction(reading=True)

    def writing(self) -> AbstractContextManager[Connection]:
        """Commits at its end; an error rolls back. In SQLite nothing else writes meanwhile."""
        return self._transaction(reading=False)

    @contextmanager
    def _transaction(self, *, reading: bool) -> Iterator[Connection]:
        with database.own_errors():
            with self._upgrading:
                if not self._upgraded:
                    schema.upgrade(self._engine)
                    self._upgraded = True
            with self._engine.connect().execution_options(reading=reading) as connection, connection.begin():
                yield connection

    def insert(self, table: Any) -> Any:
        """An INSERT that can say ON CONFLICT: SQLAlchemy has it for each database apart."""
        return (postgresql if self._engine.dialect.name == "postgresql" else sqlite).insert(table)
