"""A worker brings batches to their ends: results, refusals, failures, cancel, expiry, shares."""

from __future__ import annotations

import json
from typing import Any

from serve_app.batch import row_feed
from serve_app.core.batches import BatchRecord, BatchStatus, RowError
from tests.batch.lane import BEGIN, ENDPOINT, Lane, scenario, wall
from tests.fakes.virtual_time import time_passes

MINUTES_S = 300.0


def test_a_batch_runs_to_its_output_file() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}] * 50)
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.COMPLETED
        output, errors = lane.assert_complete(batch, 50)
        assert output[0] == {
            "id": output[0]["id"],
            "custom_id": "a-0",
            "response": {
                "status_code": 200,
                "request_id": output[0]["response"]["request_id"],
                "body": {"name": "a-0", "text": "x" * 10},
            },
            "error": None,
        }
        assert not errors
        assert batch.error_file_id is None
        assert batch.output_file_id is not None
        record = lane.tables.files_[batch.output_file_id]
        assert (record.purpose, record.filename) == ("batch_output", f"{batch_id}_output.jsonl")
        assert batch.finalizing_at is not None
        assert record.expires_at == batch.finalizing_at + 1000.0
        assert max(lane.router.runs.values()) == 1
        await lane.end()

    scenario(play)


def test_rows_fill_the_slots_and_the_queue_stays_short() -> None:
    async def play() -> None:
        lane = Lane({"small": 16}, max_rows=3000)
        batch_id = lane.submit([{"seconds": 1.0}] * 800)
        lane.start()
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 800)
        assert batch.finalizing_at is not None
        assert batch.in_progress_at is not None
        assert (800 / 16) / (batch.finalizing_at - batch.in_progress_at) >= 0.9
        assert lane.router.max_waiting["small"] <= 4
        await lane.end()

    scenario(play)


def test_a_wrong_line_fails_the_batch_with_its_number_and_leaves_no_row() -> None:
    async def play() -> None:
        lane = Lane()
        good = json.dumps({"custom_id": "x", "method": "POST", "url": ENDPOINT, "body": {"model": "small"}})
        lines = [good, "", "{", good, good.replace('"x"', '"y"').replace("/chat", "")]
        batch_id = lane.submit_text("\n".join(lines))
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.FAILED
        assert batch.failed_at is not None
        assert [(error.code, error.line) for error in batch.errors] == [
            ("invalid_json_line", 3),
            ("duplicate_custom_id", 4),
            ("invalid_url", 5),
        ]
        assert lane.tables.rows.get(batch_id) is None
        await lane.end()

    scenario(play)


def test_a_batch_without_rows_with_too_many_or_without_its_file_fails() -> None:
    async def play() -> None:
        lane = Lane(max_rows=3)
        many = lane.submit([{}] * 4, name="m")
        empty = lane.submit_text("\n\n", name="e")
        lost = lane.submit([{}])
        del lane.files.files["file-a"]
        lane.start()
        batches = await lane.ended(many, empty, lost)
        assert [batch.errors[0].code for batch in batches] == ["too_many_rows", "empty_file", "input_file_not_found"]
        await lane.end()

    scenario(play)


def test_a_model_that_the_key_may_not_use_fails_the_batch() -> None:
    class Models:
        async def refusal(self, batch: BatchRecord, model: str) -> RowError | None:
            return None if model == "small" else RowError("model_not_found", f"there is no model {model}")

    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}, {"model": "none"}])
        lane.start(models=Models())
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.FAILED
        assert batch.errors == (RowError("model_not_found", "there is no model none", 2, "body.model"),)
        await lane.end()

    scenario(play)


def test_a_model_that_is_not_served_gives_its_rows_the_answer_of_the_router() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}, {"model": "gone", "answers": [404]}, {}])
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.COMPLETED
        _, errors = lane.assert_complete(batch, 3)
        assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("a-1", 404)]
        await lane.end()

    scenario(play)


def test_a_refused_row_comes_again_after_its_time_and_no_attempt_is_counted() -> None:
    async def play() -> None:
        lane = Lane()
        lane.router.retry_after_s = 7.0
        batch_id = lane.submit([{"answers": [429, 429, 503, 429, 200]}])
        lane.start()
        [batch] = await lane.ended(batch_id)
        output, _ = lane.assert_complete(batch, 1)
        assert output[0]["response"]["status_code"] == 200
        waits = [
            after - before for before, after in zip(lane.router.refused_at, lane.router.refused_at[1:], strict=False)
        ]
        assert all(7.0 <= wait_s <= 9.0 for wait_s in waits)
        await lane.end()

    scenario(play)


def test_a_refused_tenant_pauses_and_another_one_goes_on() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        lane.router.retry_after_s = MINUTES_S
        refused = lane.submit([{"answers": [429, 200]}] * 20, name="a", tenant="a")
        served = lane.submit([{}] * 200, name="b", tenant="b")
        lane.start()
        [batch] = await lane.ended(served)
        lane.assert_complete(batch, 200)
        assert wall() - BEGIN < 60.0
        assert len(lane.router.refused_at) <= 8
        [batch] = await lane.ended(refused)
        lane.assert_complete(batch, 20)
        await lane.end()

    scenario(play)


def test_a_key_over_its_limits_pauses_and_another_one_of_its_tenant_goes_on() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        lane.router.retry_after_s = MINUTES_S
        refused = lane.submit([{"answers": [429, 200]}] * 20, name="a", key_id="a")
        served = lane.submit([{}] * 200, name="b", key_id="b")
        lane.start()
        [batch] = await lane.ended(served)
        lane.assert_complete(batch, 200)
        assert wall() - BEGIN < 60.0
        [batch] = await lane.ended(refused)
        lane.assert_complete(batch, 20)
        await lane.end()

    scenario(play)


def test_an_engine_that_fails_three_times_on_a_row_is_its_result() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{"answers": [502]}, {"answers": [500, 502, 200]}, {}])
        lane.start()
        [batch] = await lane.ended(batch_id)
        output, errors = lane.assert_complete(batch, 3)
        assert [line["custom_id"] for line in output] == ["a-1", "a-2"]
        assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [("a-0", 502)]
        assert lane.router.runs == {"a-0": 3, "a-1": 3, "a-2": 1}
        await lane.end()

    scenario(play)


def test_a_row_that_a_living_engine_fails_at_is_a_result_at_once() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{"answers": [500], "code": "request_failed"}, {}])
        lane.start()
        [batch] = await lane.ended(batch_id)
        _, errors = lane.assert_complete(batch, 2)
        assert [line["response"]["body"]["error"]["code"] for line in errors] == ["request_failed"]
        assert lane.router.runs == {"a-0": 1, "a-1": 1}
        await lane.end()

    scenario(play)


def test_a_cancelled_batch_lets_its_rows_in_flight_end_and_keeps_their_results() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        batch_id = lane.submit([{"seconds": 30.0}] * 20)
        lane.start()
        await time_passes(10.0)
        lane.tables.change_batch(
            batch_id, if_status=[BatchStatus.IN_PROGRESS], status=BatchStatus.CANCELLING, cancelling_at=wall()
        )
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.CANCELLED
        assert wall() - BEGIN < 60.0
        output, errors = lane.assert_complete(batch, 20)
        assert 4 <= len(output) <= 6
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert {line["response"] for line in errors} == {None}
        await lane.end()

    scenario(play)


def test_a_batch_cancelled_before_its_rows_are_known_has_no_files() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}] * 5, status=BatchStatus.CANCELLING, cancelling_at=BEGIN)
        lane.tables.add_rows(batch_id, [])
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert (batch.status, batch.total, batch.output_file_id, batch.error_file_id) == (
            BatchStatus.CANCELLED,
            0,
            None,
            None,
        )
        await lane.end()

    scenario(play)


def test_rows_that_a_batch_has_not_run_in_its_window_expire() -> None:
    async def play() -> None:
        lane = Lane({"small": 2})
        batch_id = lane.submit([{"seconds": 100.0}] * 20, window_s=350.0)
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert batch.status is BatchStatus.EXPIRED
        assert batch.expired_at is not None
        assert batch.expires_at <= batch.expired_at <= batch.expires_at + 5.0
        output, errors = lane.assert_complete(batch, 20)
        assert len(output) == 6
        assert {line["error"]["code"] for line in errors} == {"batch_expired"}
        await lane.end()

    scenario(play)


def test_a_batch_whose_window_ended_before_any_worker_came_expires_without_files() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{}] * 3, window_s=10.0)
        await time_passes(20.0)
        lane.start()
        [batch] = await lane.ended(batch_id)
        assert (batch.status, batch.output_file_id) == (BatchStatus.EXPIRED, None)
        await lane.end()

    scenario(play)


def test_tenants_share_by_weight_and_the_oldest_batch_of_a_tenant_is_first() -> None:
    async def play() -> None:
        lane = Lane({"small": 8}, weights={"big": 3.0}, max_in_flight=8)
        rows = [{"seconds": 1.0}] * 100
        first = lane.submit(rows, name="a", tenant="big")
        second = lane.submit(rows, name="b", tenant="big", created_at=BEGIN + 1)
        other = lane.submit(rows, name="c", tenant="one")
        lane.start()
        batches = await lane.ended(first, second, other)
        for batch in batches:
            lane.assert_complete(batch, 100)
        early = [tenant for tenant, _ in lane.router.started[16:120]]
        assert 0.7 <= early.count("big") / len(early) <= 0.8
        of_big = [name for tenant, name in lane.router.started if tenant == "big"]
        assert max(of_big.index(f"a-{n}") for n in range(100)) <= 100 + 8
        await lane.end()

    scenario(play)


def test_a_store_that_is_away_for_minutes_loses_nothing() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{"seconds": 5.0}] * 100)
        number = lane.start()
        await time_passes(12.0)
        lane.workers[number][1].is_away = True
        await time_passes(MINUTES_S)
        lane.workers[number][1].is_away = False
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 100)
        assert wall() - BEGIN < MINUTES_S + 200.0
        assert max(lane.router.runs.values()) == 1
        await lane.end()

    scenario(play)


def test_files_and_routers_that_are_away_lose_nothing() -> None:
    async def play() -> None:
        lane = Lane()
        batch_id = lane.submit([{"seconds": 2.0}] * 100)
        lane.start()
        for _ in range(6):
            await time_passes(4.0)
            lane.files.is_away = True
            await time_passes(30.0)
            lane.files.is_away = False
            lane.router.is_away = True
            await time_passes(30.0)
            lane.router.is_away = False
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 100)
        await lane.end()

    scenario(play)


def test_a_worker_that_closes_gives_its_rows_back_at_once() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        batch_id = lane.submit([{"seconds": 10.0}] * 12 + [{"seconds": 1000.0}])
        lane.start()
        await time_passes(15.0)
        await lane.close()
        held = [row for row in lane.tables.rows[batch_id].values() if row.leased_until > wall()]
        assert not held
        lane.start()
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 13)
        assert max(lane.router.runs.values()) == 1
        await lane.end()

    scenario(play)


def test_large_answers_bound_the_rows_in_flight(monkeypatch: Any) -> None:
    async def play() -> None:
        lane = Lane({"small": 64})
        batch_id = lane.submit([{"bytes": 2**18, "seconds": 1.0}] * 100)
        worker, store = lane.workers[lane.start()]
        await time_passes(10.0)
        store.is_away = True
        await time_passes(60.0)
        assert worker.feed.writer.held_bytes <= 2 * 4 * 2**20
        store.is_away = False
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 100)
        assert lane.files.largest <= 20 * 2**18 * 1.1
        assert lane.router.max_busy["small"] >= 8
        await lane.end()

    monkeypatch.setattr(row_feed, "MAX_HELD_BYTES", 4 * 2**20)
    scenario(play)


def test_a_model_without_a_replica_is_woken_by_one_row() -> None:
    async def play() -> None:
        lane = Lane({"small": 0})
        batch_id = lane.submit([{}] * 30)
        lane.start()
        await time_passes(60.0)
        assert lane.router.waiting["small"] == 1
        lane.router.set_slots("small", 8)
        [batch] = await lane.ended(batch_id)
        lane.assert_complete(batch, 30)
        await lane.end()

    scenario(play)
