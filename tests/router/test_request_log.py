"""A router's request log: every ended request once, written beside the event loop, and read again from the node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from autoscaling.operations import EventFilter
from autoscaling.operations.node_records import NodeRecords
from serve_app.core.receipts import Receipt
from serve_app.core.records import Group, HistoryQuestion, HistorySum, RecordFilter
from serve_app.router import RequestLog, RouterMetrics
from serve_app.system import DurationSketch, RecordBounds, record_files
from serve_app.types import Outcome, RequestClass

BOUNDS = RecordBounds(keep_s=1000.0, max_bytes=2**30)
NOW = 1_700_000_010.0  # 30 s into a minute


class Clock:
    """A wall clock that stands still."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def receipt(
    request: str, outcome: Outcome = Outcome.OK, total_s: float = 2.0, tenant: str = "acme", **more: Any
) -> Receipt:
    return Receipt(
        *(request, RequestClass.HIGH, tenant, "chat", outcome, 5.0, 0.25, total_s),
        granted=True,
        first_token_s=0.5,
        prompt_tokens=3,
        output_tokens=4,
        **more,
    )


def run(folder: Path, scenario: Callable[[RequestLog, Clock], Awaitable[None]], router: str = "a") -> RequestLog:
    async def whole() -> RequestLog:
        clock = Clock()
        log = RequestLog(folder, router, "node", clock)
        log.configure(BOUNDS, 20, lambda: 1)
        await scenario(log, clock)
        await log.close()
        return log

    return asyncio.run(whole())


def ids(folder: Path, **wanted: Any) -> list[str]:
    return [record["request_id"] for record in NodeRecords(folder).requests(RecordFilter(**wanted))]


def history(folder: Path, **question: Any) -> list[dict[str, Any]]:
    total = HistorySum(HistoryQuestion(NOW - 3600, **question), DurationSketch)
    total.add_rows(NodeRecords(folder).history(HistoryQuestion(NOW - 3600, **question)))
    return list(total.rows())


def test_an_orderly_end_loses_no_request_and_no_count(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        for number in range(500):
            log.arrived("chat", "high", "acme")
            log.ended(receipt(f"r{number}", waits={"slots": 0.25}), {"key_id": "k"})

    log = run(tmp_path, scenario)
    assert sorted(ids(tmp_path, limit=1000)) == sorted(f"r{number}" for number in range(500))
    (row,) = history(tmp_path)
    assert (row["arrivals"], row["ok"], row["output_tokens"], row["waits"]) == (500, 500, 2000, {"slots": 125.0})
    assert log.lost_lines == 0


def test_what_was_handed_over_before_a_flush_can_be_read_after_it(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        for number in range(3):
            log.ended(receipt(f"r{number}"), {})
            assert await log.flush() == 0
            assert len(ids(tmp_path)) == number + 1
            assert [row["ok"] for row in history(tmp_path)] == [number + 1]

    run(tmp_path, scenario)


def test_a_minute_is_written_when_the_next_one_begins_and_counts_what_ended_in_it(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("a"), {})
        clock.now += 60.0
        log.ended(receipt("b"), {})
        log.waiting([Group("chat", "high", "acme")])
        await log.flush()

    run(tmp_path, scenario)
    assert [(row["time"], row["ok"], row["waiting_max"]) for row in history(tmp_path)] == [
        (NOW - 30.0, 1, 0),
        (NOW + 30.0, 1, 1),
    ]
    (hour,) = history(tmp_path, step_s=86_400)
    assert (hour["ok"], hour["waiting_max"]) == (2, 1)


def test_a_record_has_its_arrival_its_place_and_what_is_its_own(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("a", waits={"slots": 0.25}), {"key_id": "k", "prefix_blocks": ["ab", "cd"]})

    run(tmp_path, scenario)
    (record,) = NodeRecords(tmp_path).requests(RecordFilter())
    assert (record["at"], record["router"], record["node"], record["key_id"]) == (NOW - 2.0, "a", "node", "k")
    assert (record["prefix_blocks"], record["waits"]) == (["ab", "cd"], {"slots": 0.25})


def test_records_of_all_routers_come_by_their_arrival_and_failures_are_found_by_themselves(tmp_path: Path) -> None:
    async def of_a(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("late and short", total_s=1.0), {})
        log.ended(receipt("early and long", Outcome.ENGINE_FAILED, total_s=100.0), {})

    async def of_b(log: RequestLog, clock: Clock) -> None:
        clock.now -= 50.0
        log.ended(receipt("between", Outcome.REFUSED, total_s=5.0, tenant="other"), {})

    run(tmp_path, of_a, "a")
    run(tmp_path, of_b, "b")
    assert ids(tmp_path) == ["late and short", "between", "early and long"]
    for limit in (1, 2):
        assert ids(tmp_path, limit=limit) == ["late and short", "between", "early and long"][:limit]
    assert ids(tmp_path, is_slow=True, limit=2) == ["early and long", "between"]
    assert ids(tmp_path, is_failed=True) == ["early and long"]
    assert ids(tmp_path, tenant="other") == ["between"]
    assert ids(tmp_path, since=NOW - 60.0) == ["late and short", "between"]
    assert ids(tmp_path, request="between") == ["between"]


def test_the_event_loop_does_not_wait_for_a_disk_that_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    append = record_files.RecordFile.write
    monkeypatch.setattr("serve_app.router.request_log.FLUSH_S", 0.1)

    def stands_still(file: record_files.RecordFile, lines: list[bytes]) -> None:
        goes_on.wait(30.0)
        append(file, lines)

    monkeypatch.setattr(record_files.RecordFile, "write", stands_still)

    async def scenario(log: RequestLog, clock: Clock) -> None:
        monkeypatch.setattr("serve_app.router.request_log.MAX_HANDED_OVER", 5)
        log.ended(receipt("first"), {})
        assert await log.flush() is None, "it says so"
        for number in range(10):
            log.ended(receipt(f"r{number}"), {})
        goes_on.set()

    log = run(tmp_path, scenario)
    assert log.lost_lines == 5
    assert len(ids(tmp_path)) == 6


def test_records_that_no_disk_took_are_a_metric_of_the_router(tmp_path: Path) -> None:
    metrics = RouterMetrics()

    def lost() -> float | None:
        families = text_string_to_metric_families(metrics.render().decode())
        found = [one.value for family in families for one in family.samples if family.name == "serve_app_records_lost"]
        return found[0] if found else None

    async def scenario() -> None:
        log = RequestLog(tmp_path / "full", clock=Clock(), count_lost=metrics.count_lost_records)
        log.configure(BOUNDS, 20, lambda: 1)
        log.ended(receipt("a"), {})
        assert await log.flush() == 0
        assert lost() == 0, "the series is there before anything is lost"
        (tmp_path / "full").rename(tmp_path / "moved")
        (tmp_path / "full").write_text("no folder")  # as a disk that takes no new file
        log.configure(RecordBounds(1000.0, 1), 20, lambda: 1)  # a segment has room for one record
        for number in range(3):
            log.ended(receipt(f"r{number}"), {})
        assert await log.flush() == lost() == 3
        await log.close()

    asyncio.run(scenario())


def test_what_was_lost_is_reported_for_as_long_as_it_would_have_been_kept(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("a"), {})
        assert (await log.flush(), await log.flush(NOW), await log.flush(NOW + 1.0)) == (2, 2, 0)
        clock.now = NOW + 1001.0
        assert await log.flush() == 0
        assert log.lost_lines == 2

    (tmp_path / "full").write_text("no folder")  # as a disk that takes no new file
    run(tmp_path / "full", scenario)


def test_no_days_switch_the_log_off_and_on_again(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("a"), {})
        log.configure(RecordBounds(0.0, 2**30), 20, lambda: 1)
        log.arrived("chat", "high", "acme")
        log.ended(receipt("b"), {})
        log.configure(BOUNDS, 20, lambda: 1)
        log.ended(receipt("c"), {})

    run(tmp_path, scenario)
    assert sorted(ids(tmp_path)) == ["a", "c"]


def test_without_a_folder_nothing_is_kept() -> None:
    async def scenario() -> None:
        log = RequestLog()
        log.configure(BOUNDS, 20, lambda: 1)
        log.ended(receipt("a"), {})
        assert await log.flush() == 0
        await log.close()
        assert log.lost_lines == 0

    asyncio.run(scenario())


def test_half_a_line_that_a_lost_machine_has_left_hides_nothing_else(tmp_path: Path) -> None:
    async def scenario(log: RequestLog, clock: Clock) -> None:
        log.ended(receipt("a"), {})

    run(tmp_path, scenario)
    for kind in ("requests", "minutes", "events"):
        path = tmp_path / f"{kind}.b.000001.jsonl"
        path.write_bytes(b'{"at": 17\n')
    assert ids(tmp_path) == ["a"]
    assert [row["ok"] for row in history(tmp_path)] == [1]
    assert NodeRecords(tmp_path).events(EventFilter()) == []


def test_a_node_without_a_folder_has_no_records(tmp_path: Path) -> None:
    records = NodeRecords(tmp_path / "none")
    assert records.place == ""
    assert (records.requests(RecordFilter()), records.events(EventFilter())) == ([], [])
    assert records.history(HistoryQuestion(0.0)) == {"rows": [], "has_others": False}
