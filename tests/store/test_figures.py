"""What a scrape shows of the store: its size, and rows by model that add up to the batches' own counts."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import pytest

from serve_app.core.batches import BatchStatus, RowCounts, RowResult
from serve_app.store import Store
from serve_app.store.sql import SqlStore
from serve_app.store.sql_figures import SqlFigures
from tests.store.conftest import OpenStore
from tests.store.test_batches import ACTIVE, BATCH, WHOLE, claim, result, row


async def add_batch(store: Store, batch_id: str, *models: str) -> None:
    """A batch in progress with a row of each of these models."""
    batches = store.batches
    await batches.create_batch(replace(BATCH, batch_id=batch_id, status=BatchStatus.VALIDATING))
    await batches.add_rows(batch_id, [row(number, model) for number, model in enumerate(models, 1)])
    await batches.change_batch(batch_id, if_status=ACTIVE, status=BatchStatus.IN_PROGRESS)


def test_rows_of_several_models_are_counted_in_each_state(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        await store.batches.add_file(WHOLE)
        await add_batch(store, "batch_1", *"mmmmmn")
        await store.batches.add_results([result(1), result(2, is_failed=True), result(6, is_failed=True)])
        assert await claim(store.batches, "w", 1) == [3]
        found = await store.figures()
        assert found.rows == {"m": RowCounts(2, 1, 1, 1), "n": RowCounts(failed=1)}
        (work,) = found.work
        sums = {state: sum(asdict(one)[state] for one in found.rows.values()) for state in asdict(RowCounts())}
        assert sums == {
            "waiting": sum(work.waiting.values()),
            "running": work.running,
            "completed": work.batch.completed,
            "failed": work.batch.failed,
        }
        assert work.running_by_model == {"m": 1}
        await store.batches.add_results([result(3), result(4), result(5)])
        assert (await store.figures()).rows == {"m": RowCounts(0, 0, 4, 1), "n": RowCounts(failed=1)}

    asyncio.run(scenario())


def test_batches_of_one_model_are_added_up(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        await store.batches.add_file(WHOLE)
        await add_batch(store, "batch_1", "m", "m")
        await add_batch(store, "batch_2", "m", "m", "m")
        await store.batches.add_results([result(1), RowResult("batch_2", 2, True, "{}")])
        assert (await store.figures()).rows == {"m": RowCounts(3, 0, 1, 1)}

    asyncio.run(scenario())


def test_rows_that_are_still_added_wait(open_store: OpenStore) -> None:
    async def scenario() -> None:
        store = open_store()
        await store.batches.add_file(WHOLE)
        await store.batches.create_batch(replace(BATCH, status=BatchStatus.VALIDATING))
        await store.batches.add_rows("batch_1", [row(1), row(2)])
        assert (await store.figures()).rows == {"m": RowCounts(2)}
        await store.batches.add_rows("batch_1", [row(3)])
        assert (await store.figures()).rows == {"m": RowCounts(3)}

    asyncio.run(scenario())


def test_a_store_without_batches_has_a_size_and_no_rows(open_store: OpenStore) -> None:
    async def scenario() -> None:
        found = await open_store().figures()
        assert (found.work, found.rows) == ([], {})
        assert 10_000 < found.bytes < 100_000_000  # the tables alone

    asyncio.run(scenario())


def test_the_rows_of_a_batch_are_counted_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = SqlStore(url)
    sql.batches.add_file(WHOLE)
    sql.batches.create_batch(replace(BATCH, status=BatchStatus.VALIDATING))
    sql.batches.add_rows("batch_1", [row(1), row(2)])
    sql.batches.change_batch("batch_1", if_status=ACTIVE, status=BatchStatus.IN_PROGRESS)
    sql.figures.read()
    assert sql.figures.totals.keys() == {"batch_1"}
    counted = sql.figures.totals["batch_1"]
    sql.figures.read()
    assert sql.figures.totals["batch_1"] is counted
    sql.batches.change_batch("batch_1", if_status=(BatchStatus.IN_PROGRESS,), status=BatchStatus.CANCELLED)
    assert (sql.figures.read().rows, sql.figures.totals) == ({}, {})  # of one that has ended nothing is kept
    assert isinstance(sql.figures, SqlFigures)
