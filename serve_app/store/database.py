"""Connections to SQLite and PostgreSQL, set up so that a commit is durable; their transactions; their errors as ours.

Invariant: no error that leaves this module has a value of a row in it, and none is SQLAlchemy's; no message names a
database's address or file, which only the `reason` may. No wait for a database is without end, also if its server
stands still with its connections open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, TimeoutError

from serve_app.core.times import DATABASE_SILENT_S, DATABASE_STATEMENT_S
from serve_app.errors import StoreAway
from serve_app.store import schema

BUSY_TIMEOUT_MS = 5000  # of SQLite: the wait for another process that holds the file, such as a backup
CONNECT_TIMEOUT_S = 5  # of PostgreSQL: a lost server must not hold a thread for minutes
ANSWER_S = DATABASE_STATEMENT_S + DATABASE_SILENT_S  # a server ends a statement before, unless it stands still itself
SIGNALS_S = 0.1  # between looks for a signal while psycopg waits; its own default
FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Database:
    """One database, for all parts of the store. Threads may share it; a block raises StoreAway if it cannot be used.

    Args:
        url: SQLAlchemy's, of SQLite or PostgreSQL; the first transaction makes or upgrades the tables.
        now: seconds since 1970 UTC.
    """

    def __init__(self, url: str, now: Callable[[], float]) -> None:
        self._engine = engine_of(url)
        self.now = now
        self._upgraded = False
        self._upgrading = threading.Lock()

    def close(self) -> None:
        self._engine.dispose()

    def reading(self) -> AbstractContextManager[Connection]:
        return self._transaction(reading=True)

    def writing(self) -> AbstractContextManager[Connection]:
        """Commits at its end; an error rolls back."""
        return self._transaction(reading=False)

    @contextmanager
    def _transaction(self, *, reading: bool) -> Iterator[Connection]:
        with own_errors():
            with self._upgrading:
                if not self._upgraded:
                    schema.upgrade(self._engine)
                    self._upgraded = True
            with self._engine.connect().execution_options(reading=reading) as connection, connection.begin():
                yield connection

    def insert(self, table: Any) -> Any:
        """An INSERT that can say ON CONFLICT: SQLAlchemy has it for each database apart."""
        return (postgresql if self._engine.dialect.name == "postgresql" else sqlite).insert(table)


def engine_of(url: str) -> Engine:
    """The engine of a URL of SQLite or PostgreSQL; connects to nothing."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        if parsed.database:
            _make_private(Path(parsed.database))
        # parameters are hidden in errors: they are digests
        engine = create_engine(parsed, hide_parameters=True)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "options": f"-c statement_timeout={DATABASE_STATEMENT_S}s",
        "tcp_user_timeout": DATABASE_SILENT_S * 1000,
        "keepalives_idle": DATABASE_SILENT_S,
        "prepare_threshold": None,  # a pooler between (PgBouncer) knows no statement prepared on another connection
    }
    address = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(address, module=psycopg, pool_pre_ping=True, hide_parameters=True, connect_args=options)
    event.listen(engine, "do_connect", _connect_postgresql)
    return engine


class _BoundedConnection(psycopg.Connection[Any]):
    """Gives up after `ANSWER_S`. The kernel of a server that stands still acknowledges all that is sent to it, and a
    server in that state ends no statement, so neither of the other bounds holds."""

    def wait(self, gen: Any, interval: float = SIGNALS_S, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, ANSWER_S if timeout is None else timeout)
        except psycopg.OperationalError as error:
            if error.sqlstate is not None:  # the server has answered
                raise
            self.pgconn.finish()  # a late answer would be taken for that of another statement
            raise psycopg.OperationalError(f"no answer of the database: {error}") from None


def _connect_postgresql(_: Any, __: Any, arguments: list[Any], named: dict[str, Any]) -> psycopg.Connection[Any]:
    return _BoundedConnection.connect(*arguments, **named)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises StoreAway for what the database refuses, except IntegrityError and DataError, which the caller caused."""
    try:
        yield
    except (IntegrityError, DataError):
        raise
    except (DBAPIError, TimeoutError, CommandError, OSError) as error:
        why = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise _away(why) from None


def _make_private(file: Path) -> None:
    """Make the file for its owner alone: SQLite gives the files beside it the same mode."""
    try:
        file.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(descriptor, FILE_MODE)
        os.close(descriptor)
    except OSError as error:
        raise _away(f"the file {file} cannot be made: {error.strerror}") from None


def _away(why: str) -> StoreAway:
    return StoreAway("the store of keys, use and batches cannot be used at the moment", retry_after_s=1.0, reason=why)


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # Python's own BEGIN comes too late for a schema change and for a read
    for pragma in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    reading = connection.get_execution_options().get("reading")
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
