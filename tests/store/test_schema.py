"""The tables and their migrations."""

from __future__ import annotations

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from serve_app.errors import BatchConflict, StoreAway
from serve_app.store import database, schema
from serve_app.store.sql import SqlStore
from serve_app.store.tables import METADATA
from tests.store.records import key

AT_ONCE = 8
OLD_FILE = "'file-1', 'acme', 'key', 'in.jsonl', 'batch', 10, 5.0, 100.0, NULL"
OLD_BATCH = (
    "'batch_1', 'acme', 'key', '/v1/completions', 'file-1', '24h', 'in_progress', 5.0, 100.0, "
    + "NULL, " * 9
    + "'{}', '[]', 0, 0, 0"
)


def test_the_migrations_make_the_tables_of_the_code(empty_url: str) -> None:
    engine = database.engine_of(empty_url)
    schema.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_several_processes_that_start_at_once_migrate_once(empty_url: str) -> None:
    stores = [SqlStore(empty_url) for _ in range(AT_ONCE)]
    together = threading.Barrier(AT_ONCE)
    errors = []

    def start(store: SqlStore) -> None:
        together.wait()
        try:
            store.create_key(key())
        except StoreAway as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stores[0].keys_since(0)[0] == AT_ONCE


def test_an_upgrade_keeps_what_is_stored(empty_url: str) -> None:
    made = SqlStore(empty_url).create_key(key())
    assert SqlStore(empty_url).keys() == [made]


def test_an_upgrade_from_the_first_release_with_batches_keeps_them(empty_url: str) -> None:
    engine = database.engine_of(empty_url)
    schema.upgrade(engine, "0002")
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO batch_files VALUES ({OLD_FILE})"))
        connection.execute(text(f"INSERT INTO batches VALUES ({OLD_BATCH})"))
    batches = SqlStore(empty_url).batches
    assert batches.file("file-1", "acme").size == 10
    assert batches.batch("batch_1", "acme").input_file_id == "file-1"
    with pytest.raises(BatchConflict, match="batch_1"):
        batches.delete_file("file-1", "acme", 7.0)


def test_tables_of_a_newer_release_are_used_as_they_are(empty_url: str) -> None:
    made = SqlStore(empty_url).create_key(key())
    with database.engine_of(empty_url).begin() as connection:
        connection.execute(text("ALTER TABLE api_keys ADD COLUMN colour TEXT"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    older = SqlStore(empty_url)
    assert older.keys() == [made]
    assert older.change_key(made.key_id, metrics=True).metrics


def test_an_upgrade_that_fails_changes_nothing(empty_url: str) -> None:
    with database.engine_of(empty_url).begin() as connection:
        connection.execute(text("CREATE TABLE usage_sources (mine INTEGER)"))  # the last one that the migration makes
    with pytest.raises(StoreAway, match="usage_sources"):
        SqlStore(empty_url).keys()
    assert inspect(database.engine_of(empty_url)).get_table_names() == ["usage_sources"]
