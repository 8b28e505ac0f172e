from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from serve_app.core.limits import TokenPrices
from serve_app.core.usage import RequestUse, UsageBatch
from serve_app.errors import StoreAway
from serve_app.router import UsageReporter, usage_reporter
from tests.fakes.until import until

SOON_S = 5.0  # far above what the reporter's patched waits add up to
MIDNIGHT = 1_764_115_200.0  # 2025-11-26 of UTC
USE = RequestUse(prompt_tokens=5, output_tokens=7)


class FakeStore:
    """Takes batches, once it is there; one that came twice counts once."""

    def __init__(self) -> None:
        self.calls: list[UsageBatch] = []
        self.batches: dict[int, UsageBatch] = {}
        self.failures = 0  # of the next calls
        self.answers = True

    async def add_usage(self, batch: UsageBatch) -> None:
        self.calls.append(batch)
        if self.failures:
            self.failures -= 1
            raise StoreAway("not there")
        self.batches[batch.seq] = batch
        if not self.answers:
            raise TimeoutError

    @property
    def requests(self) -> int:
        return sum(row.requests for batch in self.batches.values() for row in batch.rows)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_reporter, "USAGE_FLUSH_S", 0.01)
    monkeypatch.setattr(usage_reporter, "ACTOR_RETRY_S", 0.01)


def used(reporter: UsageReporter, *names: str, key: str = "k") -> None:
    for name in names:
        reporter.begin(name, key, "acme", "m", None)
        reporter.end(name, USE)


def test_reports_are_made_by_themselves_and_repeated_until_the_store_has_them() -> None:
    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        reporter.start()
        store.failures = 3
        used(reporter, "a", "b")
        await until(lambda: store.requests == 2, SOON_S, "both requests")
        assert [batch.seq for batch in store.calls] == [1, 1, 1, 1]
        used(reporter, "c")
        await until(lambda: store.requests == 3, SOON_S, "the third")
        await reporter.close()

    asyncio.run(main())


def test_a_report_whose_answer_is_lost_is_repeated_as_it_was() -> None:
    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        store.answers = False
        used(reporter, "a")
        assert not await reporter.flush()
        used(reporter, "b")
        store.answers = True
        assert await reporter.flush()
        assert store.calls[0] is store.calls[1]
        assert await reporter.flush()
        assert store.requests == 2

    asyncio.run(main())


def test_nothing_is_sent_while_nothing_changes_but_heartbeats_of_what_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        reporter.begin("a", "k", "acme", "m", None)
        for _ in range(3):
            assert await reporter.flush()
        assert len(store.calls) == 1
        monkeypatch.setattr(usage_reporter, "USAGE_HEARTBEAT_S", 0.0)
        assert await reporter.flush()
        assert [batch.in_flight[0].count for batch in store.calls] == [1, 1]

    asyncio.run(main())


def test_a_normal_end_reports_what_is_left_however_long_the_store_takes() -> None:
    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        reporter.start()
        store.failures = 4
        used(reporter, "a")
        assert not await reporter.flush()
        used(reporter, "b")  # not in the batch that failed
        await reporter.close()
        assert store.requests == 2
        assert store.calls[-1].in_flight == ()

    asyncio.run(main())


def test_what_a_normal_end_could_not_report_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_reporter, "CLOSE_S", 0.02)
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)

    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        store.failures = 1_000_000
        used(reporter, "a")
        await reporter.close()

    with caplog.at_level(logging.WARNING, "ray.serve"):
        asyncio.run(main())
    (last,) = [one.getMessage() for one in caplog.records if "ends without its last usage report" in one.getMessage()]
    assert "prompt_tokens=5" in last


def test_an_outage_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)

    async def main() -> None:
        store = FakeStore()
        reporter = UsageReporter("r", store.add_usage)
        store.failures = 5
        used(reporter, "a")
        for _ in range(6):
            await reporter.flush()

    with caplog.at_level(logging.INFO, "ray.serve"):
        asyncio.run(main())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_the_day_is_that_of_the_beginning_in_utc() -> None:
    now = MIDNIGHT - 1
    reporter = UsageReporter("r", FakeStore().add_usage, lambda: now)
    reporter.begin("a", "k", "acme", "m", TokenPrices(1.0))
    now = MIDNIGHT
    reporter.begin("b", "k", "acme", "m", TokenPrices(1.0))
    for name in ("a", "b"):
        reporter.end(name, USE)
    batch = reporter.meter.next_batch()
    assert batch is not None
    assert [(row.day, row.cost_micro) for row in batch.rows] == [("2025-11-25", 5), ("2025-11-26", 5)]


def test_a_router_reports_what_a_killed_one_of_its_node_left_once_the_store_takes_it(tmp_path: Path) -> None:
    async def main() -> None:
        store = FakeStore()
        dead = UsageReporter("dead", store.add_usage, folder=tmp_path)
        alive = UsageReporter("alive", store.add_usage, folder=tmp_path)
        used(dead, "a", "b")
        dead.begin("c", "k", "acme", "m", None)
        used(alive, "d")
        await alive.report_left_behind()
        assert not store.calls  # both are alive
        dead.journal.leave()
        store.failures = 1
        await alive.report_left_behind()
        await alive.report_left_behind()
        (batch,) = store.batches.values()
        assert batch.source == "dead"
        assert [(row.requests, row.unsettled) for row in batch.rows] == [(2, 1)]
        assert os.listdir(tmp_path) == ["alive.journal"]

    asyncio.run(main())


def test_a_normal_end_leaves_no_journal_and_one_that_could_not_report_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_reporter, "CLOSE_S", 0.5)

    async def main(failures: int) -> None:
        store = FakeStore()
        store.failures = failures
        reporter = UsageReporter("r", store.add_usage, folder=tmp_path)
        used(reporter, "a")
        await reporter.close()

    asyncio.run(main(0))
    assert not list(tmp_path.iterdir())
    asyncio.run(main(1_000_000))
    store = FakeStore()
    asyncio.run(UsageReporter("next", store.add_usage, folder=tmp_path).report_left_behind())
    assert store.requests == 1


@pytest.mark.parametrize("text", ["no journal\n", None])
def test_a_journal_that_cannot_be_read_or_is_too_old_is_set_aside_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    async def main() -> None:
        store = FakeStore()
        dead = UsageReporter("dead", store.add_usage, folder=tmp_path)
        used(dead, "a")
        dead.journal.leave()
        file = tmp_path / "dead.journal"
        if text is None:
            os.utime(file, (1.0, 1.0))
        else:
            file.write_text(text)
        reporter = UsageReporter("r", store.add_usage, folder=tmp_path)
        for _ in range(2):
            await reporter.report_left_behind()
        assert not store.calls

    with caplog.at_level(logging.ERROR, "ray.serve"):
        asyncio.run(main())
    assert caplog.text.count("dead.journal") == 1
    assert (tmp_path / "dead.unreported").exists()


def test_a_disk_without_room_fails_no_request_and_is_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        reporter = UsageReporter("r", FakeStore().add_usage, folder=tmp_path / "file")  # no folder can be here
        used(reporter, "a", "b")
        asyncio.run(reporter.flush())
    assert caplog.text.count("cannot be written; a kill would lose its usage") == 1
