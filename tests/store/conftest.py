"""The databases that the store runs on: SQLite, SQLite as its actor's callers see it, and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import ServeAppError
from serve_app.store.owner import StoreOwner
from serve_app.store.sql import SqlStore
from serve_app.store.store import Store
from tests.fakes.databases import with_tables
from tests.fakes.postgres import PostgresServer, postgres_server

OpenStore = Callable[[], Store]  # of one database, by another process each


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{with_tables(tmp_path / 'keys' / 'store.sqlite')}"


def through(owner: StoreOwner, url: str) -> Store:
    """The store through an actor that needs no Ray: everything is pickled on its way."""

    async def call(method: str, *arguments: Any, **named: Any) -> Any:
        def run() -> bytes:
            sent = pickle.loads(pickle.dumps((url, method, arguments, named)))
            try:
                return pickle.dumps((owner.run(*sent), None))
            except (ServeAppError, KeyError, ValueError) as error:
                return pickle.dumps((None, error))

        answer, error = pickle.loads(await asyncio.to_thread(run))
        if error is not None:
            raise error
        return answer

    return Store(call)


@pytest.fixture(params=["sqlite", "actor", "postgresql"])
def open_store(request: pytest.FixtureRequest, sqlite_url: str) -> OpenStore:
    if request.param == "sqlite":
        return lambda: Store.direct(SqlStore(sqlite_url))
    if request.param == "actor":
        owner = StoreOwner()
        return lambda: through(owner, sqlite_url)
    url = request.getfixturevalue("postgres").new_store()
    return lambda: Store.at(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    """Of a database with the store's tables."""
    if request.param == "sqlite":
        return sqlite_url
    return str(request.getfixturevalue("postgres").new_store())


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/store.sqlite"
    return str(request.getfixturevalue("postgres").new_database())
