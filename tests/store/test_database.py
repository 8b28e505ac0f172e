"""What is written stays, and a database that is away is said to be away."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from serve_app.errors import KeyConflict, StoreAway
from serve_app.store import database
from serve_app.store.sql import SqlStore
from tests.fakes.postgres import PostgresServer
from tests.store.records import key

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/back-up-and-restore.md"
KILLED_AFTER = 20  # acknowledged keys
WRITER = """
import sys
from serve_app.store.sql import SqlStore
from tests.store.records import key
store = SqlStore(sys.argv[1])
while True:
    print(store.create_key(key()).key_id, flush=True)
"""


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "store.sqlite"
    before = os.umask(0)
    try:
        SqlStore(f"sqlite:///{file}").create_key(key())
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in (file.parent, *file.parent.iterdir())}
    assert modes.pop("new") == 0o700
    assert "store.sqlite" in modes
    assert set(modes.values()) == {0o600}


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    file.touch(0o644)
    SqlStore(f"sqlite:///{file}").keys()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_every_acknowledged_key_outlives_a_sigkill_of_the_writer(sqlite_url: str) -> None:
    acknowledged = []
    command = [sys.executable, "-c", WRITER, sqlite_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            acknowledged.append(line.strip())
            if len(acknowledged) == KILLED_AFTER:
                writer.send_signal(signal.SIGKILL)
    version, records = SqlStore(sqlite_url).keys_since(0)
    kept = [record.key_id for record in records]
    assert len(acknowledged) >= KILLED_AFTER
    assert kept[: len(acknowledged)] == acknowledged
    assert version == len(kept) <= len(acknowledged) + 1  # one may have been written and not acknowledged


def test_a_commit_is_synced_and_a_reader_is_not_in_its_way(sqlite_url: str) -> None:
    engine = database.engine_of(sqlite_url)
    with engine.connect() as connection:
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    assert found == ["wal", 2]


def test_a_server_that_goes_is_away_and_then_back(postgres: PostgresServer) -> None:
    store = SqlStore(postgres.new_database())
    made = store.create_key(key())
    postgres.stop()
    try:
        with pytest.raises(StoreAway):
            store.keys()
        with pytest.raises(StoreAway):
            store.create_key(key())
    finally:
        postgres.start()
    assert store.keys() == [made]


def test_a_server_that_stands_still_is_away_and_then_back(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, and the kernel acknowledges what is sent to it."""
    monkeypatch.setattr(database, "CONNECT_TIMEOUT_S", 2)  # psycopg's least
    url = postgres.new_database()
    store = SqlStore(url)
    made = store.create_key(key())
    monkeypatch.setattr(database, "ANSWER_S", 0.5)
    with database.engine_of(url).connect() as connection, postgres.standing_still():
        with pytest.raises(OperationalError, match="no answer of the database"):
            connection.exec_driver_sql("SELECT 1")
        with pytest.raises(StoreAway):
            store.keys()
    assert store.keys() == [made]


def test_a_statement_that_the_server_ends_leaves_the_connection(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "DATABASE_STATEMENT_S", 1)
    engine = database.engine_of(postgres.new_database())
    with engine.connect() as connection:
        served_by = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        with pytest.raises(OperationalError, match="statement timeout"):
            connection.exec_driver_sql("SELECT pg_sleep(60)")
        connection.rollback()
        assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() == served_by


def test_a_store_may_be_opened_while_its_server_is_away(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    postgres.stop()
    try:
        store = SqlStore(url)
        with pytest.raises(StoreAway):
            store.keys_since(0)
    finally:
        postgres.start()
    assert store.keys_since(0) == (0, [])


def test_a_file_that_is_no_database_or_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StoreAway, match="not a database"):
        SqlStore(f"sqlite:///{tmp_path}/text").keys()
    with pytest.raises(StoreAway, match="cannot be made"):
        SqlStore(f"sqlite:///{tmp_path}/text/below").keys()


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("postgresql://someone:secret@127.0.0.1:1/store", "127.0.0.1"),
        ("postgresql://someone:secret@/store?host=/nowhere/at/all", "/nowhere/at/all"),
        ("sqlite:////proc/nowhere/store.sqlite", "/proc/nowhere"),
    ],
)
def test_where_the_database_is_stands_in_logs_and_in_no_answer(address: str, named: str) -> None:
    with pytest.raises(StoreAway) as away:
        SqlStore(address).keys()
    error = pickle.loads(pickle.dumps(away.value))  # as from the store's own process
    assert named in str(error)
    assert named not in json.dumps(error.body())
    assert "someone" not in json.dumps(error.body())
    assert "secret" not in str(error)


def test_no_error_has_a_value_of_a_row_in_it(url: str) -> None:
    store = SqlStore(url)
    record = key("a-name-nobody-reads")
    store.create_key(record)
    shown = {record.digest.hex(), hashlib.sha256(b"").hexdigest(), record.name, repr(record.digest)}
    with pytest.raises(KeyConflict) as conflict:
        store.create_key(key(digest=record.digest, name=record.name))
    with database.engine_of(url).begin() as connection:
        connection.exec_driver_sql("DROP TABLE versions")
    with pytest.raises(StoreAway) as away:
        store.create_key(key(digest=record.digest, name=record.name))
    assert [text for text in shown for error in (conflict, away) if text in str(error.value)] == []


def test_the_documented_copy_of_a_store_in_use_is_whole(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\$ (python3 -c .*)$", DOCUMENT.read_text(), re.MULTILINE)
    command = shlex.split(line)
    assert command[-1] == "store.backup"
    file = tmp_path / "store.sqlite"
    store = SqlStore(f"sqlite:///{file}")
    made = store.create_key(key())
    subprocess.run([sys.executable, *command[1:3], file, "store.backup"], check=True, cwd=tmp_path)
    after = store.create_key(key())
    for left in ("store.sqlite-wal", "store.sqlite-shm"):
        (tmp_path / left).unlink()
    (tmp_path / "store.backup").replace(file)
    restored = SqlStore(f"sqlite:///{file}")
    assert restored.keys() == [made]
    assert restored.keys_since(after.version) == (made.version, [made])  # a router that knew more is told everything


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_postgresql_is_reached_by_the_driver_that_is_installed(scheme: str) -> None:
    engine = database.engine_of(f"{scheme}://user@host/name")
    assert engine.url == make_url("postgresql+psycopg://user@host/name")
