"""Batches in the store: one suite for SQLite, SQLite behind its actor and PostgreSQL, and random histories."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from serve_app.core.batches import BatchRecord, BatchStatus, FileRecord, NewRow, RowError, RowResult
from serve_app.errors import BatchConflict, BodyTooLarge
from serve_app.store import BatchStore
from serve_app.store.sql import SqlStore
from serve_app.store.sql_batches import UPLOAD_S, SqlBatches
from tests.store.conftest import OpenStore

LEASE_S = 30.0
AT_ONCE = 8  # workers
KEY = b"0123456789abcdef"
ACTIVE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
HISTORIES = 4
STEPS = 100
FILE = FileRecord("file-1", "acme", "key_1", "rows.jsonl", "batch", None, 5.0, 100.0)
WHOLE = replace(FILE, size=10)
BATCH = BatchRecord(
    "batch_1", "acme", "key_1", "/v1/completions", "file-1", "24h", BatchStatus.IN_PROGRESS, 5.0, 86405.0,
    metadata={"a": "\0é"},
)  # fmt: skip


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def row(number: int, model: str = "m", prefix: int = 0) -> NewRow:
    return NewRow(number, 100 * number, 90, f"c{number}", model, prefix)


def result(number: int, *, is_failed: bool = False, line: str = "{}") -> RowResult:
    return RowResult("batch_1", number, is_failed, line)


@pytest.fixture
def batches(open_store: OpenStore) -> BatchStore:
    return open_store().batches


async def made(batches: BatchStore, *rows: NewRow) -> None:
    await batches.add_file(WHOLE)
    await batches.create_batch(replace(BATCH, status=BatchStatus.VALIDATING))
    assert await batches.add_rows("batch_1", rows) == len(rows)
    assert await batches.add_rows("batch_1", [rows[0], replace(rows[1], prefix=5)]) == 0
    await batches.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.IN_PROGRESS)
    assert await batches.add_rows("batch_1", [row(98)]) == 0  # too late


def begun(batches: SqlBatches, rows: list[NewRow]) -> None:
    batches.add_file(WHOLE)
    batches.create_batch(replace(BATCH, status=BatchStatus.VALIDATING))
    batches.add_rows("batch_1", rows)
    batches.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.IN_PROGRESS)


async def claim(batches: BatchStore, worker: str, limit: int = 10, model: str = "m") -> list[int]:
    return [one.number for one in await batches.claim_rows(worker, "batch_1", model, limit, LEASE_S)]


def test_files_are_found_once_they_are_complete_until_they_are_deleted(batches: BatchStore) -> None:
    async def main() -> None:
        listing: dict[str, Any] = {"purpose": None, "after": None, "limit": 10, "newest_first": True}
        for number in range(4):
            await batches.add_file(replace(FILE, file_id=f"file-{number}", created_at=float(number // 2)))
        assert await batches.files("acme", **listing) == []
        for number in range(4):
            await batches.finish_file(f"file-{number}", 10 + number)
        await batches.add_file(FILE)  # again: it stays complete
        assert (await batches.file("file-1", "acme")).size == 11
        names = [one.file_id for one in await batches.files("acme", **listing)]
        assert names == ["file-3", "file-2", "file-1", "file-0"]
        behind = await batches.files("acme", **listing | {"after": "file-2", "limit": 1})
        assert [one.file_id for one in behind] == ["file-1"]
        oldest = await batches.files("acme", **listing | {"after": "file-1", "newest_first": False})
        assert [one.file_id for one in oldest] == ["file-2", "file-3"]
        assert await batches.files("acme", **listing | {"purpose": "batch_output"}) == []
        assert await batches.files("acme", **listing | {"after": "file-of-nobody"}) == []
        assert await batches.files("other", **listing) == []
        assert len(await batches.files_to_remove(100.0, 3)) == 3
        assert await batches.files_to_remove(99.0, 3) == []
        for _ in range(2):
            assert (await batches.delete_file("file-1", "acme", 7.0)).deleted_at == 7.0
        with pytest.raises(KeyError):
            await batches.finish_file("file-1", 3)
        await batches.add_file(replace(FILE, file_id="file-left", expires_at=None))
        assert [one.file_id for one in await batches.files_to_remove(50.0, 9)] == ["file-1"]  # its content is there
        for _ in range(2):
            await batches.content_removed("file-1", 8.0)
        assert await batches.files_to_remove(50.0, 9) == []
        assert [one.file_id for one in await batches.files_to_remove(5.0 + UPLOAD_S, 9)][-1] == "file-left"
        for tenant in ("acme", None):
            with pytest.raises(KeyError):
                await batches.file("file-1", tenant)
        for file_id, tenant in (("file-1", "acme"), ("file-2", "other")):
            with pytest.raises(KeyError):
                await batches.delete_file(file_id, tenant, 8.0)

    asyncio.run(main())


def test_the_bytes_of_a_tenant_s_complete_files_are_bounded_where_a_bound_is_given(batches: BatchStore) -> None:
    async def main() -> None:
        for number, tenant in enumerate(("acme", "acme", "acme", "other")):
            await batches.add_file(replace(FILE, file_id=f"file-{number}", tenant=tenant))
        assert await batches.stored_bytes("acme") == 0
        assert (await batches.finish_file("file-0", 60, 100)).size == 60
        with pytest.raises(BodyTooLarge, match="100 bytes together") as refused:
            await batches.finish_file("file-1", 41, 100)
        assert (refused.value.status, refused.value.code) == (413, "storage_quota_exceeded")
        assert (await batches.file("file-1", None)).size is None
        await batches.finish_file("file-3", 100, 100)
        for _ in range(2):  # again: it counts once
            assert (await batches.finish_file("file-1", 40, 100)).size == 40
        await batches.finish_file("file-2", 2**40)  # a file of results
        assert await batches.stored_bytes("acme") == 100 + 2**40
        await batches.delete_file("file-2", "acme", 7.0)
        assert await batches.stored_bytes("acme") == 100

    asyncio.run(main())


def test_uploads_reserve_what_is_left_of_their_tenant_s_bytes_until_they_end(batches: BatchStore) -> None:
    async def main() -> None:
        for number, tenant in enumerate(("acme", "acme", "other")):
            await batches.add_file(replace(FILE, file_id=f"file-{number}", tenant=tenant))
        assert await batches.reserve_bytes("file-0", 10, 20, 100) == 20
        assert await batches.reserve_bytes("file-1", 10, 200, 100) == 80
        assert await batches.stored_bytes("acme") == 100
        with pytest.raises(BodyTooLarge):
            await batches.reserve_bytes("file-0", 21, 40, 100)
        with pytest.raises(BodyTooLarge):
            await batches.finish_file("file-0", 21, 100)
        assert await batches.reserve_bytes("file-2", 100, 100, 100) == 100
        assert (await batches.finish_file("file-1", 30, 100)).size == 30
        assert await batches.reserve_bytes("file-0", 21, 400, 100) == 70
        await batches.delete_file("file-0", "acme", 7.0)
        assert await batches.stored_bytes("acme") == 30
        with pytest.raises(KeyError):
            await batches.reserve_bytes("file-0", 1, 1, 100)

    asyncio.run(main())


def test_a_batch_is_made_once_listed_by_tenant_and_changed_only_as_it_was(batches: BatchStore) -> None:
    async def main() -> None:
        for tenant in ("acme", "other"):
            await batches.add_file(replace(WHOLE, file_id=f"file-{tenant}", tenant=tenant))
        await batches.add_file(WHOLE)
        assert await batches.create_batch(BATCH) == BATCH
        assert await batches.create_batch(replace(BATCH, endpoint="/other")) == BATCH
        assert await batches.batch("batch_1", "acme") == await batches.batch("batch_1", None) == BATCH
        with pytest.raises(KeyError):
            await batches.batch("batch_1", "other")
        later = replace(BATCH, batch_id="batch_2", created_at=6.0, tenant="other", input_file_id="file-other")
        await batches.create_batch(later)
        assert await batches.batches(None, after=None, limit=9) == [later, BATCH]
        assert await batches.batches(None, after="batch_2", limit=9) == [BATCH]
        assert await batches.batches("acme", after=None, limit=9) == [BATCH]
        errors = (RowError("bad", "no", 3, "body"),)
        failed = {"status": BatchStatus.FAILED, "failed_at": 9.0, "errors": errors}
        assert await batches.change_batch("batch_1", if_status=[BatchStatus.VALIDATING], **failed) is None
        changed = await batches.change_batch("batch_1", if_status=ACTIVE, **failed)
        assert changed == replace(BATCH, **failed)
        assert await batches.change_batch("batch_1", if_status=ACTIVE, **failed) == changed  # again
        assert await batches.change_batch("batch_1", if_status=ACTIVE, **failed | {"failed_at": 10.0}) is None
        with pytest.raises(KeyError):
            await batches.change_batch("batch_3", if_status=ACTIVE, **failed)
        assert [work.batch.batch_id for work in await batches.work()] == ["batch_2"]
        with pytest.raises(ValueError, match="colour"):
            await batches.change_batch("batch_2", if_status=ACTIVE, colour="red")

    asyncio.run(main())


def test_a_file_stays_as_long_as_a_batch_that_has_not_ended_reads_it(batches: BatchStore) -> None:
    async def main() -> None:
        with pytest.raises(KeyError):
            await batches.create_batch(BATCH)
        await batches.add_file(WHOLE)
        with pytest.raises(KeyError):
            await batches.create_batch(replace(BATCH, tenant="other"))
        await batches.create_batch(BATCH)
        with pytest.raises(BatchConflict, match="batch_1 reads this file and is in_progress") as refused:
            await batches.delete_file("file-1", "acme", 7.0)
        assert refused.value.code == "file_in_use"
        assert (await batches.file("file-1", "acme")).deleted_at is None
        assert await batches.files_to_remove(100.0, 9) == []
        await batches.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.COMPLETED, completed_at=9.0)
        assert [one.file_id for one in await batches.files_to_remove(100.0, 9)] == ["file-1"]
        assert (await batches.delete_file("file-1", "acme", 7.0)).deleted_at == 7.0
        with pytest.raises(KeyError):
            await batches.create_batch(replace(BATCH, batch_id="batch_2"))
        assert (await batches.create_batch(BATCH)).status is BatchStatus.COMPLETED  # again

    asyncio.run(main())


def test_a_batch_reads_a_complete_file_for_batches_whose_time_is_not_over(batches: BatchStore) -> None:
    async def main() -> None:
        changes: tuple[dict[str, Any], ...] = ({"size": None}, {"expires_at": 5.0}, {"purpose": "batch_output"})
        for number, change in enumerate(changes):
            await batches.add_file(replace(WHOLE, file_id=f"file-{number}", **change))
            with pytest.raises(KeyError):
                await batches.create_batch(replace(BATCH, input_file_id=f"file-{number}"))
        assert await batches.batches(None, after=None, limit=9) == []

    asyncio.run(main())


def test_of_one_key_there_is_one_batch_however_many_ask_for_it_at_once(open_store: OpenStore) -> None:
    async def main() -> None:
        stores = [open_store().batches for _ in range(4)]
        await stores[0].add_file(WHOLE)
        asked = [
            stores[number % 4].create_batch(replace(BATCH, batch_id=f"batch_{number}"), key=KEY, fingerprint=b"f")
            for number in range(12)
        ]
        made = await asyncio.gather(*asked)
        assert len({one.batch_id for one in made}) == 1
        assert await stores[0].batches(None, after=None, limit=99) == made[:1]
        await stores[0].change_batch(made[0].batch_id, if_status=ACTIVE, status=BatchStatus.COMPLETED)
        await stores[0].delete_file("file-1", "acme", 7.0)
        again = await open_store().batches.create_batch(replace(BATCH, batch_id="batch_x"), key=KEY, fingerprint=b"f")
        assert (again.batch_id, again.status) == (made[0].batch_id, BatchStatus.COMPLETED)
        with pytest.raises(ValueError, match="used for another batch"):
            await stores[0].create_batch(BATCH, key=KEY, fingerprint=b"g")

    asyncio.run(main())


def test_records_are_forgotten_some_at_a_time_and_none_of_a_live_batch(batches: BatchStore) -> None:
    ends = {
        BatchStatus.COMPLETED: "completed_at",
        BatchStatus.FAILED: "failed_at",
        BatchStatus.EXPIRED: "expired_at",
        BatchStatus.CANCELLED: "cancelled_at",
    }

    async def main() -> None:
        await batches.add_file(WHOLE)
        for status in BatchStatus:
            for at in (20.0, 30.0):
                times: dict[str, Any] = {ends[status]: at} if status in ends else {"expired_at": at}
                await batches.create_batch(replace(BATCH, batch_id=f"batch_{status}_{at}", status=status, **times))
        for number in range(4):
            await batches.add_file(replace(WHOLE, file_id=f"file-gone-{number}"))
            await batches.delete_file(f"file-gone-{number}", "acme", 7.0)
        for number in range(3):
            await batches.content_removed(f"file-gone-{number}", (20.0, 20.0, 30.0)[number])
        assert await batches.forget_records(19.9, 99) == 0
        assert [await batches.forget_records(20.0, 3) for _ in range(3)] == [2 + 3, 1, 0]
        left = {one.batch_id for one in await batches.batches(None, after=None, limit=99)}
        live = {f"batch_{status}_{at}" for status in BatchStatus if status not in ends for at in (20.0, 30.0)}
        assert left == live | {f"batch_{status}_30.0" for status in ends}
        assert await batches.forget_records(1e9, 99) == 1 + 4
        assert {one.batch_id for one in await batches.batches(None, after=None, limit=99)} == live
        assert [one.file_id for one in await batches.files_to_remove(9.0, 9)] == ["file-gone-3"]  # it has content
        assert (await batches.file("file-1", "acme")).size == 10

    asyncio.run(main())


def test_rows_are_claimed_by_prefix_for_one_worker_and_written_once(batches: BatchStore) -> None:
    async def main() -> None:
        await made(batches, *(row(number, prefix=number % 2) for number in range(1, 7)), row(7, model="other"))
        assert await claim(batches, "w1", 4) == [2, 4, 6, 1]
        assert await claim(batches, "w2") == [3, 5]
        assert await claim(batches, "w2") == []
        (work,) = await batches.work()
        assert (work.waiting, work.running) == ({"other": 1}, 6)
        await batches.release_rows("w1", [("batch_1", 2), ("batch_1", 3)], count_attempt=True)  # 3 is not its own
        await batches.release_rows("w1", [("batch_1", 2)], count_attempt=True)  # again
        await batches.release_rows("w1", [("batch_1", 4)], count_attempt=False)
        again = await batches.claim_rows("w3", "batch_1", "m", 9, LEASE_S)
        assert [(one.number, one.attempts, one.offset, one.length, one.custom_id) for one in again] == [
            (2, 1, 200, 90, "c2"), (4, 0, 400, 90, "c4"),
        ]  # fmt: skip
        first = [result(2), result(6, is_failed=True), result(2, line="another")]
        assert sorted(await batches.add_results(first)) == [("batch_1", 2), ("batch_1", 6)]
        assert await batches.add_results([result(6), result(1), result(99)]) == [("batch_1", 1)]
        found = await batches.batch("batch_1", None)
        assert (found.completed, found.failed) == (2, 1)
        assert await batches.results("batch_1", failed=False, after=0, limit=9) == [result(1), result(2)]
        assert await batches.results("batch_1", failed=False, after=1, limit=9) == [result(2)]
        assert await batches.results("batch_1", failed=True, after=0, limit=9) == [result(6, is_failed=True)]
        rest = await batches.unfinished("batch_1", 3, 2)
        assert [one.number for one in rest] == [4, 5]
        await batches.forget_rows("batch_1")
        assert await batches.results("batch_1", failed=False, after=0, limit=9) == []
        assert await batches.add_results([result(4)]) == []

    asyncio.run(main())


def test_rows_of_a_batch_that_is_not_in_progress_are_not_claimed(batches: BatchStore) -> None:
    async def main() -> None:
        await made(batches, row(1), row(2))
        assert await claim(batches, "w1", 1) == [1]
        await batches.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.CANCELLING)
        assert await claim(batches, "w1", 1) == []
        assert await batches.add_results([result(1)]) == [("batch_1", 1)]  # it ran on

    asyncio.run(main())


def test_a_dead_workers_rows_return_and_its_late_results_count_if_they_are_first(url: str) -> None:
    clock = Clock()
    store = SqlStore(url, clock).batches
    begun(store, [row(number) for number in range(1, 5)])
    dead = store.claim_rows("dead", "batch_1", "m", 3, LEASE_S, "claim")
    assert [one.number for one in dead] == [1, 2, 3]
    assert store.claim_rows("dead", "batch_1", "m", 3, LEASE_S, "claim") == dead  # its answer was lost
    clock.now += 20
    assert store.renew("dead", LEASE_S) == 3
    clock.now += LEASE_S - 1
    assert [one.number for one in store.claim_rows("w", "batch_1", "m", 1, LEASE_S, "1")] == [4]
    clock.now += 1
    assert [one.number for one in store.claim_rows("w", "batch_1", "m", 2, LEASE_S, "2")] == [1, 2]
    assert store.renew("dead", LEASE_S) == 1  # what nobody has taken
    assert store.add_results([result(1, line="late")]) == [("batch_1", 1)]
    assert store.add_results([result(1, line="of the next one")]) == []
    assert store.results("batch_1", failed=False, after=0, limit=1) == [result(1, line="late")]


def test_a_batch_is_brought_on_by_one_worker_until_its_next_status_or_the_end_of_its_lease(url: str) -> None:
    clock = Clock()
    store = SqlStore(url, clock).batches
    store.add_file(WHOLE)
    store.create_batch(replace(BATCH, status=BatchStatus.VALIDATING))

    def lease(worker: str, status: BatchStatus = BatchStatus.VALIDATING) -> bool:
        return store.lease_batch("batch_1", status, worker, LEASE_S)

    assert not lease("a", BatchStatus.IN_PROGRESS)
    assert lease("a")
    clock.now += LEASE_S - 1
    assert lease("a")  # renewed
    clock.now += LEASE_S - 1
    assert not lease("b")
    clock.now += 1
    assert lease("b")  # a is dead
    assert not lease("a")
    assert [one.batch.batch_id for one in store.work()] == ["batch_1"]
    store.change_batch("batch_1", if_status=ACTIVE, total=3)
    assert not lease("a")
    assert store.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.IN_PROGRESS) == replace(BATCH, total=3)
    assert not lease("b")
    assert lease("a", BatchStatus.IN_PROGRESS)


def test_of_workers_that_lease_a_batch_at_once_one_has_it(url: str) -> None:
    stores = [SqlStore(url).batches for _ in range(AT_ONCE)]
    stores[0].add_file(WHOLE)
    stores[0].create_batch(BATCH)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        leased = list(
            threads.map(
                lambda number: stores[number].lease_batch("batch_1", BatchStatus.IN_PROGRESS, f"w{number}", LEASE_S),
                range(AT_ONCE),
            )
        )
    assert leased.count(True) == 1
