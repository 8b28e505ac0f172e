"""A batch in `finalizing` ends whatever becomes of its files, its rows or its worker, and can be cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.batch import worker
from serve_app.batch.result_files import result_file_id
from serve_app.batch.worker import CHANGE_RETRY_S
from serve_app.core.batches import BatchStatus
from tests.batch.lane import Lane, scenario, wall
from tests.fakes.batch_store import FakeBatchStore
from tests.fakes.virtual_time import time_passes

ROWS = 3
ATTEMPTS = 4  # for a shorter test
GIVEN_UP_S = CHANGE_RETRY_S * 2.0**ATTEMPTS  # the sum of all waits is below it


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "CHANGE_ATTEMPTS", ATTEMPTS)


async def until(condition: Callable[[], bool]) -> None:
    """At most a minute of virtual time."""
    for _ in range(6000):
        if condition():
            return
        await time_passes(0.01)
    raise AssertionError("it never came to that")


@pytest.fixture
def stop_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes calls of a method of the store wait without an end, before they count."""

    def stop(method: str) -> None:
        async def waits(store: FakeBatchStore, *arguments: Any, **named: Any) -> Any:
            await time_passes(1e9)

        monkeypatch.setattr(FakeBatchStore, method, waits, raising=False)

    return stop


@pytest.mark.parametrize("rows_are_gone", [False, True])
def test_a_batch_whose_owner_deletes_its_listed_file_before_its_worker_dies_completes_at_the_next_one(
    rows_are_gone: bool, tmp_path: Path, stop_before: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        file_id = result_file_id(batch_id, failed=False)
        stop_before("forget_rows")
        number = lane.start()

        def is_listed() -> bool:
            found = lane.tables.files("team", purpose="batch_output", after=None, limit=10, newest_first=True)
            return [one.file_id for one in found] == [file_id]

        await until(is_listed)
        if rows_are_gone:  # the worker died between the rows and the status
            lane.tables.forget_rows(batch_id)
        lane.tables.delete_file(file_id, "team", wall())
        await lane.kill(number)
        monkeypatch.delattr(FakeBatchStore, "forget_rows")
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert (batch.status, batch.completed, batch.output_file_id) == (BatchStatus.COMPLETED, ROWS, file_id)
        with pytest.raises(KeyError):  # it stays deleted, as one that is deleted after the end
            lane.tables.file(file_id, None)
        assert not lane.rows_left(batch_id)
        lane.tables.delete_file(batch.input_file_id, "team", wall())  # no batch reads it any more
        await lane.end()

    scenario(play)


def test_a_file_whose_record_is_removed_while_it_is_written_is_written_again(
    tmp_path: Path, stop_before: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        file_id = result_file_id(batch_id, failed=False)
        stop_before("finish_file")
        number = lane.start()
        await until(lambda: file_id in lane.files.files)
        lane.tables.delete_file(file_id, "team", wall())  # as what sweeps up incomplete uploads after a week
        await lane.kill(number)
        monkeypatch.delattr(FakeBatchStore, "finish_file")
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.COMPLETED
        assert batch.output_file_id not in (None, file_id)  # what removes the old content cannot remove this one
        lane.assert_complete(batch, ROWS)
        await lane.end()

    scenario(play)


def fails(message: str) -> Callable[..., Awaitable[Any]]:
    async def call(store: FakeBatchStore, *arguments: Any, **named: Any) -> Any:
        raise KeyError(message)

    return call


@pytest.mark.parametrize(("method", "status"), [("add_file", "finalizing"), ("add_rows", "validating")])
def test_a_batch_that_meets_the_same_error_again_and_again_fails_and_says_why(
    method: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        other = lane.submit([], name="other")
        monkeypatch.setattr(FakeBatchStore, method, fails("no such thing"), raising=False)
        lane.start()
        [batch, _] = await lane.ended(batch_id, other, bound_s=GIVEN_UP_S)
        assert batch.status is BatchStatus.FAILED
        [error] = batch.errors
        assert error.code == "internal_error"
        assert f"the status {status} in {ATTEMPTS} attempts" in error.message
        assert "KeyError: 'no such thing'" in error.message
        assert not lane.rows_left(batch_id)
        lane.tables.delete_file(batch.input_file_id, "team", wall())
        await lane.end()

    scenario(play)


def test_an_error_that_passes_costs_a_batch_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        monkeypatch.setattr(FakeBatchStore, "add_file", fails("no such thing"), raising=False)
        lane.start()
        await time_passes(GIVEN_UP_S / 4)
        assert lane.batch(batch_id).status is BatchStatus.FINALIZING
        monkeypatch.delattr(FakeBatchStore, "add_file")
        [batch] = await lane.ended(batch_id, bound_s=GIVEN_UP_S)
        lane.assert_complete(batch, ROWS)
        await lane.end()

    scenario(play)


def test_a_batch_without_its_rows_and_its_files_fails_and_does_not_stay(
    tmp_path: Path, stop_before: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        stop_before("add_file")
        number = lane.start()
        await until(lambda: lane.batch(batch_id).status is BatchStatus.FINALIZING)
        lane.tables.forget_rows(batch_id)
        await lane.kill(number)
        monkeypatch.delattr(FakeBatchStore, "add_file")
        lane.start()
        [batch] = await lane.ended(batch_id, bound_s=GIVEN_UP_S)
        assert batch.status is BatchStatus.FAILED
        assert f"0 results are left of {ROWS}" in batch.errors[0].message
        await lane.end()

    scenario(play)


def test_a_batch_is_cancelled_while_it_is_finalized_and_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        lane = Lane(folder=tmp_path)
        batch_id = lane.submit([{}] * ROWS)
        monkeypatch.setattr(FakeBatchStore, "finish_file", fails("no such thing"), raising=False)
        lane.start()
        await time_passes(GIVEN_UP_S / 4)  # by now its next attempt is half a minute away
        monkeypatch.delattr(FakeBatchStore, "finish_file")
        lane.tables.change_batch(
            batch_id, if_status=[BatchStatus.FINALIZING], status=BatchStatus.CANCELLING, cancelling_at=wall()
        )
        [batch] = await lane.ended(batch_id, bound_s=10.0)
        assert batch.status is BatchStatus.CANCELLED
        lane.assert_complete(batch, ROWS)
        await lane.end()

    scenario(play)
