"""Workers are killed at random moments, while the store, the files and the routers come and go: nothing is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.batch.calls import MAX_RETRY_S
from serve_app.batch.validation import READ_BYTES
from serve_app.core.batches import BatchStatus
from serve_app.core.times import ROW_LEASE_S, ROW_RENEW_S
from tests.batch.lane import Lane, wall
from tests.effort import effort, examples
from tests.fakes.virtual_time import run_in_virtual_time, time_passes

ROWS = 40


def rows_of(source: random.Random) -> list[dict[str, Any]]:
    """Most rows are answered; some are refused first, some fail at first, some always."""
    kinds: list[dict[str, Any]] = [
        {"answers": [200]},
        {"answers": [200]},
        {"answers": [200]},
        {"answers": [429, 200]},
        {"answers": [502, 200]},
        {"answers": [502]},
        {"answers": [400]},
    ]
    return [source.choice(kinds) | {"seconds": source.choice([0.01, 0.3, 3.0])} for _ in range(ROWS)]


async def kill_and_start(lane: Lane, source: random.Random, kills: int) -> None:
    """Keep one or two workers alive, and end one of them now and then; sometimes within its first calls."""
    for _ in range(kills):
        lane.start()
        await time_passes(source.choice([0.002, 0.02, 0.2, 2.0, 20.0]) * source.random())
        if source.random() < 0.3:
            lane.start()
            await time_passes(source.random())
        part = source.choice(["store", "files", "router", "none", "none"])
        if part == "store":
            for _, store in lane.workers.values():
                store.is_away = True
        elif part != "none":
            getattr(lane, part).is_away = True
        await time_passes(source.random())
        for number in list(lane.workers):
            if source.random() < 0.8:
                await lane.kill(number)
        lane.files.is_away = lane.router.is_away = False
        for _, store in lane.workers.values():
            store.is_away = False


async def kill_until_done(lane: Lane, seed: int) -> None:
    """Run a batch to its end with kills, and check its files."""
    source = random.Random(seed)
    rows = rows_of(source)
    batch_id = lane.submit(rows)
    await kill_and_start(lane, source, kills=12)
    lane.start()
    [batch] = await lane.ended(batch_id)
    assert batch.status is BatchStatus.COMPLETED
    output, errors = lane.assert_complete(batch, ROWS)
    assert {line["custom_id"] for line in errors} == {
        f"a-{n}" for n, row in enumerate(rows) if row["answers"][-1] != 200
    }
    for line in output + errors:
        row = rows[int(line["custom_id"].removeprefix("a-"))]
        assert line["response"]["status_code"] == row["answers"][-1]
        if row["answers"] == [200]:  # a run whose worker died is joined, and not begun again
            assert lane.router.runs[line["custom_id"]] == 1
    await lane.end()


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32))
@example(0)
def test_whenever_workers_are_killed_no_row_is_missing_and_none_is_twice(seed: int) -> None:
    async def play() -> None:
        await kill_until_done(Lane({"small": 4}, seed=seed), seed)

    run_in_virtual_time(play(), bound_s=1e6)


@pytest.mark.parametrize("seed", range(effort(1, 4)))  # the same on tables of memory draws its seeds
def test_whenever_workers_are_killed_the_tables_of_sqlite_lose_nothing(seed: int, tmp_path: Path) -> None:
    async def play() -> None:
        await kill_until_done(Lane({"small": 4}, seed=seed, folder=tmp_path), seed)

    run_in_virtual_time(play(), bound_s=1e6)


@settings(max_examples=examples(15))
@given(st.integers(0, 2**32), st.sampled_from(["cancel", "expire"]))
def test_whenever_a_batch_is_stopped_each_row_has_one_line_or_there_are_no_files(seed: int, how: str) -> None:
    async def play() -> None:
        source = random.Random(seed)
        lane = Lane({"small": 4}, seed=seed)
        after_s = source.choice([0.01, 1.0, 10.0, 60.0])
        batch_id = lane.submit(rows_of(source), window_s=after_s if how == "expire" else 1e5)

        async def cancel() -> None:
            await time_passes(after_s)
            running = [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS]
            lane.tables.change_batch(batch_id, if_status=running, status=BatchStatus.CANCELLING, cancelling_at=wall())

        cancelled = asyncio.create_task(cancel() if how == "cancel" else time_passes(0.0))
        await kill_and_start(lane, source, kills=6)
        lane.start()
        [batch] = await lane.ended(batch_id)
        if batch.in_progress_at is None:
            assert (batch.total, batch.output_file_id, batch.error_file_id) == (0, None, None)
        else:
            lane.assert_complete(batch, ROWS)
        last = BatchStatus.CANCELLED if how == "cancel" else BatchStatus.EXPIRED
        assert batch.status in (last, BatchStatus.COMPLETED)
        assert not lane.rows_left(batch_id)
        await cancelled
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


@pytest.mark.parametrize("workers", [2, 3])
def test_several_workers_run_each_row_once(workers: int) -> None:
    async def play() -> None:
        lane = Lane({"small": 12}, workers=workers)
        batch_ids = [lane.submit([{"seconds": 0.5}] * 200, name=name, tenant=name) for name in "abc"]
        for _ in range(workers):
            lane.start()
        for batch in await lane.ended(*batch_ids):
            lane.assert_complete(batch, 200)
        assert set(lane.router.runs.values()) == {1}
        assert set(lane.tables.claims.values()) == {1}
        took_s = wall() - 1_700_000_000.0
        assert 600 * 0.5 / 12 / took_s >= 0.8
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


def test_one_of_several_workers_reads_the_file_of_a_batch_and_writes_its_results_however_long_it_takes() -> None:
    async def play() -> None:
        lane = Lane({"small": 12})
        lane.files.latency_s = 1.5 * ROW_LEASE_S
        batch_id = lane.submit([{}] * 20)
        for _ in range(3):
            lane.start()
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 20)
        assert lane.files.reads["file-a", 0, READ_BYTES] == 1
        assert lane.files.writes == {batch.output_file_id: 1}
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


def test_a_batch_whose_worker_died_in_its_validation_goes_on_at_another_after_the_lease() -> None:
    async def play() -> None:
        lane = Lane({"small": 12})
        lane.files.latency_s = 10.0
        batch_id = lane.submit([{}] * 20)
        first = lane.start()
        await time_passes(5.0)
        lane.start()
        await time_passes(1.0)
        await lane.kill(first)
        await time_passes(ROW_LEASE_S - 10.0)
        assert lane.files.reads == {("file-a", 0, READ_BYTES): 1}
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 20)
        assert lane.files.reads["file-a", 0, READ_BYTES] == 2
        assert batch.in_progress_at is not None
        assert batch.in_progress_at - batch.created_at <= ROW_LEASE_S + 15.0
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


def test_a_worker_leaves_a_batch_to_another_that_has_its_lease() -> None:
    async def play() -> None:
        lane = Lane({"small": 12})
        lane.files.is_away = True
        batch_id = lane.submit([{}] * 20)
        workers = [lane.workers[lane.start()][0] for _ in range(2)]
        await time_passes(5.0)
        [other] = [worker.name for worker in workers if worker.name != lane.tables.leases[batch_id][0]]
        lane.tables.leases[batch_id] = other, wall() + ROW_LEASE_S
        await time_passes(2 * ROW_RENEW_S)
        assert lane.tables.leases[batch_id][0] == other
        before = lane.files.reads.total()
        await time_passes(20 * MAX_RETRY_S)
        assert lane.files.reads.total() - before <= 21, "one of them tries"
        lane.files.is_away = False
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 20)
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


def test_leases_of_long_rows_are_renewed_so_that_no_other_worker_runs_them() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        batch_id = lane.submit([{"seconds": 300.0}] * 4)
        lane.start()
        lane.start()
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 4)
        assert set(lane.tables.claims.values()) == {1}
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)


def test_rows_of_a_claim_whose_answer_was_lost_run_after_their_lease_though_their_worker_lives() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        slow = lane.submit([{"seconds": 2000.0}])
        number = lane.start()
        await time_passes(5.0)
        lost = lane.submit([{}] * 20, name="b")
        lane.workers[number][1].loses_claims = True
        await time_passes(20.0)
        assert lane.tables.claims["batch_b", 1] >= 1
        lane.workers[number][1].loses_claims = False
        [batch] = await lane.ended(lost)
        lane.assert_complete(batch, 20)
        assert wall() - 1_700_000_000.0 < 100.0
        await lane.ended(slow)
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)
