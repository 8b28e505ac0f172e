"""Entries of Redis Streams become rows, and end with a reply: on a real Redis server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.batch import stream_intake
from serve_app.batch.interfaces import RowAnswer
from serve_app.batch.model_paces import ModelPaces
from serve_app.core.batches import ModelFigures, ModelPace
from tests.batch.conftest import NewStreams
from tests.batch.streams import MODEL, SOON_S, FixedPaces, KeyedRouter, Streams, ok
from tests.fakes.until import until


def test_every_entry_gets_the_answer_of_its_request(streams: Streams) -> None:
    entries = streams.add(50)
    entries += streams.add(1, id=None)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await streams.replied(51)
        assert router.owners == {"ops"}

    asyncio.run(scenario())
    replies = streams.replies()
    assert {reply["entry"] for reply in replies} == set(entries)
    assert {reply["status"] for reply in replies} == {"200"}
    keys = [*(f"row-{number}" for number in range(50)), f"{streams.settings.stream}-{entries[-1]}"]
    assert {reply["id"]: json.loads(reply["body"])["key"] for reply in replies} == {key: key for key in keys}
    assert streams.dead() == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"body": "{"}, "400 invalid_json_line: This body is not"),
        ({"body": "[]"}, "400 invalid_json_line: This body must"),
        ({"body": None}, "400 invalid_value: The entry has no"),
        ({"endpoint": "/v1/made-up"}, "400 invalid_value: The endpoint"),
        ({"body": '{"model": "other"}'}, "404 model_not_found"),
    ],
)
def test_an_entry_that_cannot_be_run_is_a_dead_letter_with_its_reason(
    streams: Streams, fields: dict[str, Any], reason: str
) -> None:
    (entry,) = streams.add(1, trace="t-1", reason="mine", **fields)

    def run(key: str, body: dict[str, Any]) -> RowAnswer:
        return ok(key, body) if body["model"] == MODEL else RowAnswer(404, b'{"error": {"code": "model_not_found"}}')

    async def scenario() -> None:
        async with streams.consumed(KeyedRouter(run)):
            await streams.replied(1)

    asyncio.run(scenario())
    (dead,) = streams.dead()
    (reply,) = streams.replies()
    assert dead["reason"].startswith(reason)
    assert (dead["deliveries"], dead["entry"], dead["stream"]) == ("1", entry, streams.settings.stream)
    given = {name: value for name, value in fields.items() if value is not None}
    assert {"id": "row-0", "trace": "t-1", "entry.reason": "mine"}.items() <= dead.items()
    assert given.items() <= dead.items()
    assert (reply["id"], reply["entry"]) == ("row-0", entry)
    assert int(reply["status"]) in (400, 404)
    assert "error" in json.loads(reply["body"])


def test_no_more_entries_are_taken_than_the_figures_of_the_queue_allow(streams: Streams) -> None:
    """With 4 slots, of which one is busy with a person's request."""
    streams.add(60)

    class Figures(FixedPaces):
        def __init__(self) -> None:
            super().__init__()
            self.pace = ModelPace(512)
            self.tell()

        def tell(self) -> None:
            self.pace.on_figures(ModelFigures(4, 1 + self.in_flight, 0, 0), self.in_flight, 0.0, 0.0)

        def may_start(self, model: str) -> int:
            return self.pace.may_start(0.0)

        def on_start(self, model: str) -> None:
            super().on_start(model)
            self.pace.on_start(0.0)

        def on_end(self, model: str) -> None:
            self.pace.on_end(0.0)
            super().on_end(model)

    async def scenario() -> None:
        router = KeyedRouter()
        held = []
        router.on_run = lambda: held.append(len(streams.pending()))
        async with streams.consumed(router, Figures()):
            await streams.replied(60)
        assert router.most == 3
        assert max(held) <= 3 + 3, "three that run, and three whose replies are on the way"

    asyncio.run(scenario())


def test_entries_run_beside_rows_of_files_that_take_every_place_they_may(streams: Streams) -> None:
    streams.add(60)

    class Queues:
        async def get(self) -> dict[str, ModelFigures]:
            return {MODEL: ModelFigures(100, 0, 0, 0)}

    async def scenario() -> None:
        paces = ModelPaces(Queues(), 8, 1)
        files = paces.sender()
        entries = paces.sender()
        most = 0

        def start() -> None:
            nonlocal most
            for _ in range(files.may_start(MODEL)):
                files.on_start(MODEL)
            files.wait(MODEL, 1000)
            most = max(most, files.in_flight[MODEL] + entries.in_flight[MODEL])

        async def run_files() -> None:
            start()
            while True:
                await asyncio.sleep(0.005)  # a row of a file; ended with the test
                files.on_end(MODEL)

        files.on_change = start
        running = [asyncio.create_task(run_files()), asyncio.create_task(paces.run())]
        router = KeyedRouter()
        async with streams.consumed(router, entries):
            await streams.replied(60)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert (router.most <= 8, most) == (True, 8)
        assert not any(task.exception() for task in running if not task.cancelled())

    asyncio.run(scenario())


def test_a_busy_model_delays_an_entry_and_counts_no_delivery(streams: Streams) -> None:
    streams.add(1)
    answers = [RowAnswer(429, b"{}", 0.01), RowAnswer(503, b"{}", 0.01)] * 4

    async def scenario() -> None:
        router = KeyedRouter(lambda key, body: answers.pop() if answers else ok(key, body))
        seen: list[dict[str, int]] = []
        router.on_run = lambda: seen.append(streams.pending())
        async with streams.consumed(router):
            await streams.replied(1)
        assert router.calls == {"row-0": 9}
        assert {count for one in seen for count in one.values()} == {1}

    asyncio.run(scenario())
    assert streams.dead() == []


def test_an_entry_that_engines_fail_on_dies_after_its_last_delivery(
    new_streams: NewStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_intake, "FAILED_WAIT_S", (0.01, 0.01))
    streams = new_streams(max_deliveries=3)
    streams.add(2)

    def run(key: str, body: dict[str, Any]) -> RowAnswer:
        failed = RowAnswer(502, b'{"error": {"code": "engine_failed"}}')
        return failed if key == "row-0" else ok(key, body)

    async def scenario() -> None:
        router = KeyedRouter(run)
        async with streams.consumed(router):
            await streams.replied(2)
        assert router.calls == {"row-0": 3, "row-1": 1}

    asyncio.run(scenario())
    (dead,) = streams.dead()
    assert (dead["id"], dead["reason"], dead["deliveries"]) == ("row-0", "502 engine_failed", "3")
    assert {reply["id"]: reply["status"] for reply in streams.replies()} == {"row-0": "502", "row-1": "200"}


def test_a_run_that_was_lost_is_run_again_under_another_key(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_intake, "FAILED_WAIT_S", (0.01, 0.01))
    streams.add(1)
    lost = RowAnswer(409, b'{"error": {"code": "idempotency_run_lost"}}')

    async def scenario() -> None:
        router = KeyedRouter(lambda key, body: lost if key == "row-0" else ok(key, body))
        async with streams.consumed(router):
            await streams.replied(1)
        assert router.calls == {"row-0": 1, "row-0~1": 1}

    asyncio.run(scenario())
    assert [(reply["id"], reply["status"]) for reply in streams.replies()] == [("row-0", "200")]


@pytest.mark.parametrize(
    ("prefix", "reply_to", "goes_to"),
    [
        ("replies:", "replies:me", "replies:me"),
        ("replies:", "other:me", None),
        (None, "replies:me", None),
        ("replies:", "replies:text", None),
    ],
)
def test_a_reply_goes_where_its_entry_may_say(
    new_streams: NewStreams, prefix: str | None, reply_to: str, goes_to: str | None
) -> None:
    streams = new_streams(reply_prefix=prefix)
    streams.redis.set("replies:text", "no stream")
    streams.redis.delete("replies:me")
    streams.add(1, reply_to=reply_to)

    async def scenario() -> None:
        async with streams.consumed(KeyedRouter()):
            await until(lambda: len(streams.replies(goes_to)) == 1, SOON_S, "the reply")

    asyncio.run(scenario())
    assert len(streams.replies()) == (goes_to is None)


def test_replies_are_trimmed_and_answered_entries_deleted_where_it_is_set(
    new_streams: NewStreams,
) -> None:
    """MAXLEN ~ trims whole nodes of 100 entries."""
    streams = new_streams(reply_maxlen=10, delete_answered=True)
    streams.add(210)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await until(lambda: len(router.calls) == 210 and not streams.pending(), SOON_S, "all have their reply")

    asyncio.run(scenario())
    assert 10 <= len(streams.replies()) < 150
    assert streams.redis.xlen(streams.settings.stream) == 0


def test_a_stream_whose_name_is_another_key_is_named_in_the_log(
    streams: Streams, caplog: pytest.LogCaptureFixture
) -> None:
    streams.redis.set(streams.settings.reply_stream, "no stream")
    streams.add(1)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await until(lambda: streams.settings.reply_stream in caplog.text, SOON_S, "the log names it")
            assert not router.calls
            streams.redis.delete(streams.settings.reply_stream)
            await streams.replied(1)

    asyncio.run(scenario())
    assert len(streams.replies()) == 1
