"""Consumers, processes and Redis itself die in the middle, and no entry of a stream is lost: on a real Redis server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.batch import redis_streams
from tests.batch.conftest import NewStreams
from tests.batch.streams import CLAIM_IDLE_S, MODEL, SOON_S, FixedPaces, KeyedRouter, Streams
from tests.fakes.redis_server import redis_server
from tests.fakes.until import until

ROOT = Path(__file__).resolve().parents[2]


def test_entries_of_a_cancelled_consumer_are_claimed_and_its_runs_joined(streams: Streams) -> None:
    streams.add(30)

    async def scenario() -> None:
        router = KeyedRouter()

        def close_in_the_middle() -> None:
            if len(router.runs) == 15:
                router.gate.clear()

        router.on_run = close_in_the_middle
        async with streams.consumed(router, FixedPaces(10)) as (_, task):
            await until(lambda: len(streams.replies()) >= 5, SOON_S, "some replies")
            await until(lambda: router.running > 0, SOON_S, "rows run")
            task.cancel()
            await asyncio.wait({task}, timeout=SOON_S)
        left = streams.pending()
        assert left
        router.on_run = lambda: None
        async with streams.consumed(router, name="two"):
            router.gate.set()
            await streams.replied(30)
        assert set(router.runs.values()) == {1}, "a run that went on was joined"

    asyncio.run(scenario())
    by_id: dict[str, set[str]] = {}
    for reply in streams.replies():
        by_id.setdefault(reply["id"], set()).add(reply["body"])
    assert len(by_id) == 30
    assert {len(bodies) for bodies in by_id.values()} == {1}


@pytest.mark.parametrize("turns", range(8))
def test_a_consumer_that_is_cancelled_just_as_a_row_ends_ends(streams: Streams, turns: int) -> None:
    """`turns`: of the event loop between the end of the row and the cancellation."""
    streams.add(2)

    async def scenario() -> None:
        router = KeyedRouter()
        router.gate.clear()
        async with streams.consumed(router, FixedPaces(2)) as (_, task):
            await until(lambda: router.running == 2, SOON_S, "both run")
            router.gate.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=SOON_S)
            assert task.cancelled()

    asyncio.run(scenario())


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
            await streams.replied(20)

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
                await streams.replied(200)

        asyncio.run(scenario())
        assert {reply["id"] for reply in streams.replies()} == {f"row-{number}" for number in range(200)}
        assert len({(reply["id"], reply["body"]) for reply in streams.replies()}) == 200


def test_a_stream_that_was_deleted_with_its_group_is_made_again(streams: Streams) -> None:
    async def scenario() -> None:
        async with streams.consumed(KeyedRouter()):
            streams.add(1)
            await streams.replied(1)
            streams.redis.delete(streams.settings.stream)
            streams.add(1, id="later")
            await streams.replied(2)

    asyncio.run(scenario())
    assert [reply["id"] for reply in streams.replies()] == ["row-0", "later"]


def test_a_server_that_does_not_answer_holds_no_command_longer_than_its_bound(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "ANSWER_S", 0.2)

    async def scenario() -> None:
        client = redis_streams.connect(streams.server.url, 1)
        consumer = redis_streams.GroupConsumer(client, streams.settings, "one")
        await consumer.prepare()
        streams.redis.client_pause(2000, all=True)
        with pytest.raises(TimeoutError):
            await consumer.renew(["1-0"])
        streams.redis.client_unpause()
        await consumer.renew(["1-0"])
        await client.aclose()

    asyncio.run(scenario())


def test_an_entry_that_runs_longer_than_the_idle_time_is_not_claimed(streams: Streams) -> None:
    """A real wait of three idle times."""
    streams.add(1, body=json.dumps({"model": MODEL, "sleep_s": 3 * CLAIM_IDLE_S}))

    async def scenario() -> None:
        router = KeyedRouter()
        other = KeyedRouter()
        async with streams.consumed(router):
            await until(lambda: router.running == 1, SOON_S, "the row runs")
            async with streams.consumed(other, name="two"):
                await streams.replied(1)
        assert not other.calls

    asyncio.run(scenario())


def test_a_closed_consumer_gives_back_what_it_holds_and_counts_no_delivery(streams: Streams) -> None:
    streams.add(5)

    async def scenario() -> None:
        router = KeyedRouter()
        router.gate.clear()
        async with streams.consumed(router, paces := FixedPaces()):
            await until(lambda: router.running == 5, SOON_S, "all run")
        assert (paces.is_closed, paces.in_flight) == (True, 0)
        assert set(streams.pending().values()) == {0}
        router.gate.set()
        async with streams.consumed(router, name="two"):
            await streams.replied(5)
        assert set(router.runs.values()) == {1}

    asyncio.run(scenario())


def test_an_entry_whose_consumers_die_again_and_again_is_a_dead_letter(
    new_streams: NewStreams,
) -> None:
    streams = new_streams(max_deliveries=2)
    streams.add(1)
    redis = streams.redis
    settings = streams.settings
    redis.xgroup_create(settings.stream, settings.group, id="0")
    redis.xreadgroup(settings.group, "dead-1", {settings.stream: ">"})
    redis.xautoclaim(settings.stream, settings.group, "dead-2", 0)

    async def scenario() -> None:
        router = KeyedRouter()
        async with streams.consumed(router):
            await streams.replied(1)
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
                await streams.replied(1)
        assert router.runs == {"row-0": 1}

    asyncio.run(scenario())
    assert len(streams.replies()) == 1
