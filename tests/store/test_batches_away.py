"""A database that is full or read-only says so, and nothing is lost; workers at once do not stop each other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, event, select, text, update

from serve_app.core.batches import BatchRecord, BatchStatus, FileRecord, NewRow, RowResult
from serve_app.errors import BatchConflict, BodyTooLarge, StoreAway
from serve_app.store import database
from serve_app.store.sql import SqlStore
from serve_app.store.sql_batches import SqlBatches
from serve_app.store.tables import BATCH_FILES, BATCH_ROWS, BATCHES
from tests.fakes.postgres import PostgresServer
from tests.waiting import patient

LEASE_S = 30.0
NAME = "batch_1"
ROWS = 40
LINE = "x" * 100_000  # of a result: more than a database has left in its last page
WORKERS = 4
ACTS = 60
BESIDE_S = 0.3  # for a call to come to where it waits for another transaction; on a slow machine it comes too late to
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
    batches.add_file(FileRecord("file-1", "acme", "key_1", "rows.jsonl", "batch", 1, 5.0, None))
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
    before = batches.batch(NAME, None)
    open_rows = batches.unfinished(NAME, 0, ROWS)
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


def test_workers_that_claim_renew_return_and_write_the_same_rows_at_once_stop_nobody(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL, rows locked crosswise would end one of two transactions. SQLite's wait for a lock is not in turns,
    so on a busy machine it takes longer than a worker would wait."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", int(1000 * patient(database.BUSY_TIMEOUT_MS / 1000)))
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


@contextmanager
def in_the_background(act: Callable[[], None]) -> Iterator[None]:
    """Runs it beside the block, which it may wait for."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(BESIDE_S)
    yield
    thread.join()


def test_rows_that_come_while_their_batch_ends_stay_out(url: str, engine: Engine) -> None:
    """A validation that was thought dead goes on while another worker ends the batch: no row of it stays behind."""
    batches = SqlStore(url).batches
    added = []
    begun(batches)
    batches.create_batch(replace(batches.batch(NAME, None), batch_id="batch_2", status=BatchStatus.VALIDATING))
    with engine.connect() as other, other.begin() as transaction:
        other.execute(update(BATCHES).where(BATCHES.c.batch_id == "batch_2").values(status="cancelled"))
        with in_the_background(lambda: added.append(batches.add_rows("batch_2", [NewRow(1, 0, 9, "c", "m", 0)]))):
            transaction.commit()
    assert added == [0]
    assert batches.unfinished("batch_2", 0, ROWS) == []


def test_a_batch_made_while_its_file_is_deleted_is_none_and_a_file_deleted_while_a_batch_is_made_stays(
    url: str, engine: Engine
) -> None:
    batches = SqlStore(url).batches
    refused = list[Exception]()
    begun(batches)
    ended = {"status": BatchStatus.COMPLETED, "completed_at": 6.0}
    record = batches.change_batch(NAME, if_status=[BatchStatus.IN_PROGRESS], **ended)
    assert record is not None
    of_file = BATCH_FILES.c.file_id == "file-1"
    of_batch = BATCHES.c.batch_id == NAME

    def attempt(act: Callable[[], Any]) -> None:
        try:
            act()
        except (BatchConflict, KeyError) as error:
            refused.append(error)

    with engine.connect() as other, other.begin() as transaction:
        other.execute(select(BATCH_FILES).where(of_file).with_for_update())
        other.execute(update(BATCHES).where(of_batch).values(status="validating"))  # as a batch that is new
        with in_the_background(lambda: attempt(lambda: batches.delete_file("file-1", "acme", 7.0))):
            transaction.commit()
    assert [str(error) for error in refused] == [f"{NAME} reads this file and is validating: cancel it first"]
    assert batches.file("file-1", "acme").deleted_at is None
    with engine.connect() as other, other.begin() as transaction:
        other.execute(update(BATCH_FILES).where(of_file).values(deleted_at=8.0))
        late = replace(record, batch_id="batch_2", status=BatchStatus.VALIDATING)
        with in_the_background(lambda: attempt(lambda: batches.create_batch(late))):
            transaction.commit()
    assert isinstance(refused[1], KeyError)
    assert [one.batch_id for one in batches.batches("acme", after=None, limit=9)] == [NAME]


def test_two_uploads_that_end_at_once_do_not_bring_their_tenant_above_its_bound(url: str, engine: Engine) -> None:
    batches = SqlStore(url).batches
    refused = list[BodyTooLarge]()
    for number in range(2):
        batches.add_file(FileRecord(f"file-{number}", "acme", "key_1", "rows.jsonl", "batch", None, 5.0, None))

    def finish() -> None:
        try:
            batches.finish_file("file-1", 10, max_tenant_bytes=15)
        except BodyTooLarge as error:
            refused.append(error)

    with engine.connect() as other, other.begin() as transaction:
        other.execute(update(BATCH_FILES).where(BATCH_FILES.c.file_id == "file-0").values(size=10))
        with in_the_background(finish):
            transaction.commit()
    assert [one.code for one in refused] == ["storage_quota_exceeded"]
    assert batches.stored_bytes("acme") == 10


def test_of_two_results_at_once_the_first_stays(url: str, engine: Engine) -> None:
    batches = SqlStore(url).batches
    written = []
    begun(batches)
    of_row_1 = BATCH_ROWS.c.batch_id == NAME, BATCH_ROWS.c.number == 1
    with engine.connect() as other, other.begin() as transaction:
        other.execute(update(BATCH_ROWS).where(*of_row_1).values(is_failed=False, line="first"))
        second = [RowResult(NAME, 1, True, "second")]
        with in_the_background(lambda: written.extend(batches.add_results(second))):
            transaction.commit()
    assert written == []
    assert [one.line for one in batches.results(NAME, failed=False, after=0, limit=9)] == ["first"]
    assert batches.batch(NAME, None).failed == 0


def test_on_postgresql_a_claim_and_a_renewal_wait_for_no_row_of_another_transaction(postgres: PostgresServer) -> None:
    url = postgres.new_database()
    batches = SqlStore(url).batches
    begun(batches)
    assert len(batches.claim_rows("w", NAME, "m", 3, LEASE_S, "1")) == 3
    # of those with prefix 0
    first = 3
    fourth = 12
    locked = select(BATCH_ROWS).where(BATCH_ROWS.c.batch_id == NAME, BATCH_ROWS.c.number.in_((first, fourth)))
    with database.engine_of(url).begin() as other:
        assert len(other.execute(locked.with_for_update()).all()) == 2
        assert [row.number for row in batches.claim_rows("v", NAME, "m", 2, LEASE_S, "2")] == [15, 18]
        assert batches.renew("w", LEASE_S) == 2
