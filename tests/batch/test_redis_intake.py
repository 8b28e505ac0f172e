"""Entries of Redis Streams become rows, and end with a reply: on a real Redis server."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.batch import redis_intake
from serve_app.batch.interfaces import RowAnswer
from serve_app.core.batches import ModelFigures, ModelPace
from tests.batch.streams import CLAIM_IDLE_S, MODEL, SOON_S, FixedPaces, KeyedRouter, Streams, ok
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.until import until

NewStreams = Callable[..., Streams]
NUMBERS = itertools.count()
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as found:
        yield found


@pytest.fixture
def new_streams(server: RedisServer) -> NewStreams:
    """Makes streams with names of their own, with these settings."""
    return lambda **settings: Streams(server, f"test-{next(NUMBERS)}", **settings)


@pytest.fixture
def streams(new_streams: NewStreams) -> Streams:
    return new_streams()


async def replied(streams: Streams, count: int) -> None:
    await until(lambda: len(streams.replies()) >= count, SOON_S, f"{count} replies")
    await until(lambda: not streams.pending(), SOON_S, "nothing is pending")


def test_every_entry_gets_the_answer_of_its_request(streams: Streams) -> None:
    entries = streams.add(50)
    entries += streams.add(1, id=None)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await replied(streams, 51)
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
        ({"body": "{"}, "body: not JSON"),
        ({"body": "[]"}, "body: an object is wanted"),
        ({"body": None}, "body: the entry has no such field"),
        ({"endpoint": "/v1/made-up"}, "endpoint: one of"),
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
            await replied(streams, 1)

    asyncio.run(scenario())
    (dead,), (reply,) = streams.dead(), streams.replies()
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
            super().on_end(model)
            self.pace.on_end(0.0)

    async def scenario() -> None:
        router, held = KeyedRouter(), []
        router.on_run = lambda: held.append(len(streams.pending()))
        async with streams.consumed(router, Figures()):
            await replied(streams, 60)
        assert router.most == 3
        assert max(held) <= 3 + 3, "three that run, and three whose replies are on the way"

    asyncio.run(scenario())


def test_a_busy_model_delays_an_entry_and_counts_no_delivery(streams: Streams) -> None:
    streams.add(1)
    answers = [RowAnswer(429, b"{}", 0.01), RowAnswer(503, b"{}", 0.01)] * 4

    async def scenario() -> None:
        router = KeyedRouter(lambda key, body: answers.pop() if answers else ok(key, body))
        seen: list[dict[str, int]] = []
        router.on_run = lambda: seen.append(streams.pending())
        async with streams.consumed(router):
            await replied(streams, 1)
        assert router.calls == {"row-0": 9}
        assert {count for one in seen for count in one.values()} == {1}

    asyncio.run(scenario())
    assert streams.dead() == []


def test_an_entry_that_engines_fail_on_dies_after_its_last_delivery(
    new_streams: NewStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_intake, "FAILED_WAIT_S", (0.01, 0.01))
    streams = new_streams(max_deliveries=3)
    streams.add(2)

    def run(key: str, body: dict[str, Any]) -> RowAnswer:
        failed = RowAnswer(502, b'{"error": {"code": "engine_failed"}}')
        return failed if key == "row-0" else ok(key, body)

    async def scenario() -> None:
        router = KeyedRouter(run)
        async with streams.consumed(router):
            await replied(streams, 2)
        assert router.calls == {"row-0": 3, "row-1": 1}

    asyncio.run(scenario())
    (dead,) = streams.dead()
    assert (dead["id"], dead["reason"], dead["deliveries"]) == ("row-0", "502 engine_failed", "3")
    assert {reply["id"]: reply["status"] for reply in streams.replies()} == {"row-0": "502", "row-1": "200"}


def test_a_run_that_was_lost_is_run_again_under_another_key(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_intake, "FAILED_WAIT_S", (0.01, 0.01))
    streams.add(1)
    lost = RowAnswer(409, b'{"error": {"code": "idempotency_run_lost"}}')

    async def scenario() -> None:
        router = KeyedRouter(lambda key, body: lost if key == "row-0" else ok(key, body))
        async with streams.consumed(router):
            await replied(streams, 1)
        assert router.calls == {"row-0": 1, "row-0~1": 1}

    asyncio.run(scenario())
    assert [(reply["id"], reply["status"]) for reply in streams.replies()] == [("row-0", "200")]


def test_entries_of_a_cancelled_consumer_are_claimed_and_its_runs_joined(streams: Streams) -> None:
    streams.add(30)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router, FixedPaces(10)) as (_, task):
            await until(lambda: len(streams.replies()) >= 5, SOON_S, "some replies")
            router.gate.clear()
            await until(lambda: router.running > 0, SOON_S, "rows run")
            task.cancel()
            await asyncio.wait({task})
        left = streams.pending()
        assert left
        async with streams.consumed(router, name="two"):
            router.gate.set()
            await replied(streams, 30)
        assert set(router.runs.values()) == {1}, "a run that went on was joined"

    asyncio.run(scenario())
    by_id: dict[str, set[str]] = {}
    for reply in streams.replies():
        by_id.setdefault(reply["id"], set()).add(reply["body"])
    assert len(by_id) == 30
    assert {len(bodies) for bodies in by_id.values()} == {1}


def test_entries_of_a_killed_process_are_claimed(streams: Streams) -> None:
    """The process answers half of its entries and holds the others until it is killed."""
    streams.add(20)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.batch.consumer_process", str(streams.server.port), streams.settings.stream],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"holds 10\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert len(streams.replies()) == 10
    assert len(streams.pending()) == 10

    async def scenario() -> None:
        async with streams.consumed(KeyedRouter()):
            await replied(streams, 20)

    asyncio.run(scenario())
    bodies = {reply["id"]: json.loads(reply["body"])["key"] for reply in streams.replies()}
    assert bodies == {f"row-{number}": f"row-{number}" for number in range(20)}


def test_a_restart_of_redis_loses_no_entry() -> None:
    with redis_server() as server:
        streams = Streams(server, "restart")
        streams.add(200)

        async def scenario() -> None:
            router = KeyedRouter()
            async with streams.consumed(router):
                await until(lambda: len(streams.replies()) >= 40, SOON_S, "some replies")
                server.kill()
                router.gate.clear()
                server.start()
                router.gate.set()
                await replied(streams, 200)

        asyncio.run(scenario())
        assert {reply["id"] for reply in streams.replies()} == {f"row-{number}" for number in range(200)}
        assert len({(reply["id"], reply["body"]) for reply in streams.replies()}) == 200


def test_a_stream_that_was_deleted_with_its_group_is_made_again(streams: Streams) -> None:
    async def scenario() -> None:
        async with streams.consumed(KeyedRouter()):
            streams.add(1)
            await replied(streams, 1)
            streams.redis.delete(streams.settings.stream)
            streams.add(1, id="later")
            await replied(streams, 2)

    asyncio.run(scenario())
    assert [reply["id"] for reply in streams.replies()] == ["row-0", "later"]


def test_an_entry_that_runs_longer_than_the_idle_time_is_not_claimed(streams: Streams) -> None:
    """A real wait of three idle times."""
    streams.add(1, body=json.dumps({"model": MODEL, "sleep_s": 3 * CLAIM_IDLE_S}))

    async def scenario() -> None:
        router, other = KeyedRouter(), KeyedRouter()
        async with streams.consumed(router):
            await until(lambda: router.running == 1, SOON_S, "the row runs")
            async with streams.consumed(other, name="two"):
                await replied(streams, 1)
        assert not other.calls

    asyncio.run(scenario())


def test_a_closed_consumer_gives_back_what_it_holds_and_counts_no_delivery(streams: Streams) -> None:
    streams.add(5)

    async def scenario() -> None:
        router = KeyedRouter()
        router.gate.clear()
        async with streams.consumed(router):
            await until(lambda: router.running == 5, SOON_S, "all run")
        assert set(streams.pending().values()) == {0}
        router.gate.set()
        async with streams.consumed(router, name="two"):
            await replied(streams, 5)
        assert set(router.runs.values()) == {1}

    asyncio.run(scenario())


def test_an_entry_whose_consumers_die_again_and_again_is_a_dead_letter(
    new_streams: NewStreams,
) -> None:
    streams = new_streams(max_deliveries=2)
    streams.add(1)
    redis, settings = streams.redis, streams.settings
    redis.xgroup_create(settings.stream, settings.group, id="0")
    redis.xreadgroup(settings.group, "dead-1", {settings.stream: ">"})
    redis.xautoclaim(settings.stream, settings.group, "dead-2", 0)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await replied(streams, 1)
        assert not router.calls

    asyncio.run(scenario())
    (dead,) = streams.dead()
    assert (dead["deliveries"], dead["reason"]) == ("3", "delivered 2 times, and no consumer has ended it")


def test_a_consumer_leaves_an_entry_to_another_that_claimed_it(streams: Streams) -> None:
    (entry,) = streams.add(1)

    async def scenario() -> None:
        router = KeyedRouter()
        router.gate.clear()
        async with streams.consumed(router):
            await until(lambda: router.running == 1, SOON_S, "the row runs")
            streams.redis.xclaim(streams.settings.stream, streams.settings.group, "other", 0, [entry])
            paces = FixedPaces()
            async with streams.consumed(router, paces, name="two"):
                await until(lambda: router.calls["row-0"] == 2, SOON_S, "the third one claims it")
                router.gate.set()
                await replied(streams, 1)
        assert router.runs == {"row-0": 1}

    asyncio.run(scenario())
    assert len(streams.replies()) == 1


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
    streams.add(350)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await until(lambda: len(router.calls) == 350 and not streams.pending(), SOON_S, "all have their reply")

    asyncio.run(scenario())
    assert 10 <= len(streams.replies()) < 250
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
            await replied(streams, 1)

    asyncio.run(scenario())
    assert len(streams.replies()) == 1
