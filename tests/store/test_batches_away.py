"""A database that is full or read-only says so, and nothing is lost; workers at once do not stop each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from serve_app.core.batches import BatchRecord, BatchStatus, NewRow, RowResult
from serve_app.errors import StoreAway
from serve_app.store import database
from serve_app.store.sql import SqlStore
from serve_app.store.sql_batches import SqlBatches

LEASE_S = 30.0
NAME = "batch_1"
ROWS = 40
LINE = "x" * 100_000  # of a result: more than a database has left in its last page
WORKERS, ACTS = 4, 60
FULL = """
CREATE FUNCTION full_disk() RETURNS trigger AS $$
BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END
$$ LANGUAGE plpgsql;
CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON batch_rows FOR EACH STATEMENT EXECUTE FUNCTION full_disk()
"""


@pytest.fixture
def engine(url: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine of every store of the test."""
    made = database.engine_of(url)
    monkeypatch.setattr(database, "engine_of", lambda _: made)
    return made


@contextmanager
def pragma(engine: Engine, words: str) -> Iterator[None]:
    """Every connection of SQLite has it."""

    def set_up(connection: Any, _: Any) -> None:
        connection.execute(f"PRAGMA {words}")

    event.listen(engine, "connect", set_up)
    engine.dispose()
    try:
        yield
    finally:
        event.remove(engine, "connect", set_up)
        engine.dispose()


@contextmanager
def full(engine: Engine) -> Iterator[None]:
    """No page more."""
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            pages = connection.execute(text("PRAGMA page_count")).scalar_one()
        with pragma(engine, f"max_page_count = {pages}"):
            yield
        return
    with engine.begin() as connection:
        connection.exec_driver_sql(FULL)
    yield
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP FUNCTION full_disk CASCADE")


@contextmanager
def read_only(engine: Engine) -> Iterator[None]:
    """As a standby of PostgreSQL is, or a file that may not be written."""
    if engine.dialect.name == "sqlite":
        with pragma(engine, "query_only = 1"):
            yield
        return
    for value in ("on", "off"):
        with engine.begin() as connection:
            connection.exec_driver_sql("SET TRANSACTION READ WRITE")
            connection.exec_driver_sql(
                f"ALTER DATABASE {engine.url.database} SET default_transaction_read_only = {value}"
            )
        engine.dispose()
        if value == "on":
            yield


def begun(batches: SqlBatches) -> None:
    record = BatchRecord(NAME, "acme", "key_1", "/v1/completions", "file-1", "24h", BatchStatus.VALIDATING, 5.0, 9e9)
    batches.create_batch(record)
    batches.add_rows(NAME, [NewRow(number, 0, 9, f"c{number}", "m", number % 3) for number in range(1, ROWS + 1)])
    batches.change_batch(NAME, if_status=[BatchStatus.VALIDATING], status=BatchStatus.IN_PROGRESS, total=ROWS)


@pytest.mark.parametrize(("trouble", "words"), [(full, "full|space"), (read_only, "read-?only")])
def test_a_database_that_is_full_or_read_only_says_so_and_loses_nothing(
    url: str,
    engine: Engine,
    trouble: Callable[[Engine], AbstractContextManager[None]],
    words: str,
) -> None:
    batches = SqlStore(url).batches
    begun(batches)
    held = batches.claim_rows("w", NAME, "m", 10, LEASE_S, "claim 1")
    results = [RowResult(NAME, row.number, row.number % 2 == 0, LINE) for row in held]
    before, open_rows = batches.batch(NAME, None), batches.unfinished(NAME, 0, ROWS)
    with trouble(engine):
        with pytest.raises(StoreAway, match=words) as away:
            batches.add_results(results)
        assert LINE[:100] not in str(away.value)
        assert batches.batch(NAME, None) == before
        assert batches.unfinished(NAME, 0, ROWS) == open_rows
    assert batches.claim_rows("w", NAME, "m", 10, LEASE_S, "claim 1") == held
    assert sorted(batches.add_results(results)) == sorted((NAME, row.number) for row in held)
    after = batches.batch(NAME, None)
    assert (after.completed, after.failed) == (
        sum(not one.is_failed for one in results),
        sum(one.is_failed for one in results),
    )


def test_workers_that_claim_renew_return_and_write_the_same_rows_at_once_stop_nobody(url: str) -> None:
    """On PostgreSQL, rows locked crosswise would end one of two transactions."""
    store = SqlStore(url, lambda: 1e6)  # no lease is over
    begun(store.batches)
    owners: dict[int, str] = {}
    written: list[int] = []
    errors: list[BaseException] = []
    together = threading.Barrier(WORKERS)

    def work(worker: str, draw: random.Random) -> None:
        own: list[int] = []
        together.wait()
        try:
            for act in range(ACTS):
                rows = store.batches.claim_rows(worker, NAME, "m", draw.randrange(12), LEASE_S, f"{worker} {act}")
                for row in rows:
                    assert owners.setdefault(row.number, worker) == worker
                own += [row.number for row in rows]
                store.batches.renew(worker, LEASE_S)
                late = draw.sample(range(1, ROWS + 1), draw.randrange(4))  # of workers that were thought dead
                results = [RowResult(NAME, number, draw.random() < 0.5, worker) for number in late]
                written.extend(number for _, number in store.batches.add_results(results))
                back = draw.sample(own, len(own) // 2)
                for number in back:
                    own.remove(number)
                    del owners[number]
                store.batches.release_rows(worker, [(NAME, number) for number in back], count_attempt=True)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(f"w{n}", random.Random(n))) for n in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    found = store.batches.batch(NAME, None)
    assert sorted(written) == sorted(set(written))
    assert found.completed + found.failed == len(written) > 0
    assert len(store.batches.unfinished(NAME, 0, ROWS)) == ROWS - len(written)


def test_rows_come_late_only_while_their_batch_is_validated(url: str) -> None:
    """A validation that was thought dead goes on while its batch ends: no row of it stays behind."""
    store = SqlStore(url)
    record = BatchRecord(NAME, "acme", "key_1", "/v1/completions", "file-1", "24h", BatchStatus.VALIDATING, 5.0, 9e9)
    rounds = 10
    for round_ in range(rounds):
        store.batches.create_batch(replace(record, batch_id=f"batch_{round_}"))
    together = threading.Barrier(2)

    def add() -> None:
        together.wait()
        for round_ in range(rounds):
            for number in range(1, 20):
                store.batches.add_rows(f"batch_{round_}", [NewRow(number, 0, 9, f"c{number}", "m", 0)])

    def end() -> None:
        together.wait()
        for round_ in range(rounds):
            store.batches.change_batch(
                f"batch_{round_}", if_status=[BatchStatus.VALIDATING], status=BatchStatus.CANCELLED
            )
            store.batches.forget_rows(f"batch_{round_}")

    threads = [threading.Thread(target=act) for act in (add, end)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.batches.unfinished(f"batch_{round_}", 0, 99) for round_ in range(rounds)] == [[]] * rounds
