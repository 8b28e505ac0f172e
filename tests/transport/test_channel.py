"""One channel carries all requests of a router on a replica, and ends each of them exactly once."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import EngineFailed
from serve_app.transport import channel
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, REPLICA, SOON_S, Slots, answer, asked, expected_text, nothing, opened, read, text
from tests.fakes.tcp import known


def test_every_request_of_a_crowd_gets_its_own_frames_whole_and_in_order() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        sizes = [1 + number % 23 for number in range(120)]
        reported = await asyncio.gather(*(answer(link, f"prompt {n}", tokens) for n, tokens in enumerate(sizes)))
        for number, (tokens, frames) in enumerate(zip(sizes, reported, strict=True)):
            assert text(frames) == expected_text(f"prompt {number}", tokens)
            assert [frame.status for frame in frames] == [200] + [0] * (len(frames) - 1)
            assert [frame.usage is not None for frame in frames] == [False] * (len(frames) - 1) + [True]
            assert sum(len(group) - 1 for frame in frames for group in frame.groups) == tokens
        assert [method for method, _ in handle.calls] == ["open_wire", "hold"]
        await until(lambda: "hold" in cluster[REPLICA].ended, SOON_S, "the channel closed")

    run(scenario, model(slots=64))


def test_leaving_the_block_early_aborts_the_request_in_the_engine() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        ends: list[int] = []
        async with link.run(asked("a", LONG), lambda: ends.append(1)) as stream:
            assert (await stream.next())[0].status == 200
            assert cluster[REPLICA].work == 1
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "the request aborted") < 1.0
        assert known(cluster[REPLICA]) == {"connections": 1}
        assert ends == []  # whoever leaves knows it

    run(scenario)


def test_an_error_in_the_block_aborts_the_request_and_goes_on() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)

        async def fail() -> None:
            async with link.run(asked("a", LONG), nothing) as stream:
                await stream.next()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await until(lambda: not cluster[REPLICA].work, SOON_S, "the request aborted")

    run(scenario)


def test_the_channel_closes_a_while_after_the_last_request_and_opens_again() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        slots = Slots()
        link, handle = opened(cluster, slots=slots)
        assert link.connection is None
        await answer(link, "a", 3)
        await answer(link, "b", 3)
        assert link.connection is not None
        assert not link.requests
        waited_s = await until(lambda: link.connection is None, SOON_S, "the channel closed")
        assert waited_s > 0.5 * channel.IDLE_CLOSE_S
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "nothing held on the replica")
        await until(lambda: not known(cluster[REPLICA]), SOON_S, "nothing known there")
        assert text(await answer(link, "c", 3)) == expected_text("c", 3)
        assert [method for method, _ in handle.calls] == ["open_wire", "hold"] * 2
        assert slots.reported == [4, 4]

    run(scenario)


def test_a_request_keeps_the_channel_open_however_long_it_takes() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        async with link.run(asked("a", LONG), nothing) as stream:
            await stream.next()
            await asyncio.sleep(3 * channel.IDLE_CLOSE_S)  # nothing to wait for: that nothing happens is the point
            assert link.connection is not None
            await stream.next()
        assert [method for method, _ in handle.calls] == ["open_wire", "hold"]

    run(scenario)


def test_a_channel_reopened_while_its_old_one_still_closes_misses_nothing() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        await answer(link, "a", 3)
        handle.turns = lambda method: 30  # the news that the old stream is closed is long on its way
        await until(lambda: link.connection is None, SOON_S, "the channel closed")
        handle.turns = lambda method: 1
        assert text(await answer(link, "b", 20)) == expected_text("b", 20)

    run(scenario)


def test_a_replica_that_leaves_closes_an_idle_channel_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        await answer(link, "a", 3)
        link.retire()
        assert await until(lambda: not cluster[REPLICA].calls, SOON_S, "the replica drained") < 1.0

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0})


def test_requests_of_a_replica_that_leaves_finish_and_then_its_channel_closes_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        async with link.run(asked("a", 200), nothing) as stream:
            frames = await stream.next()
            cluster.remove(REPLICA)
            link.retire()
            while frames[-1].usage is None:
                frames += await stream.next()
            assert text(frames) == expected_text("a", 200)
            # Its reader is still in the block: the drain does not wait for it.
            assert await until(lambda: not cluster[REPLICA].calls, SOON_S, "the replica drained") < 1.0

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0})


def test_a_request_submitted_as_its_replica_leaves_is_still_answered() -> None:
    """It needs no call of Serve's, and the open connection holds up the drain."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        await answer(link, "a", 3)
        async with link.run(asked("b", 3), nothing) as stream:
            cluster.remove(REPLICA)
            link.retire()
            assert text(await read(stream)) == expected_text("b", 3)

    run(scenario)


def test_a_replica_that_leaves_while_it_is_attached_to_fails_the_attach_at_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        cluster[REPLICA].mute = True
        link, _ = opened(cluster)
        request = asyncio.create_task(answer(link, "a", 3))
        await turns(10)
        link.retire()
        with pytest.raises(EngineFailed, match="has left"):
            await asyncio.wait_for(request, SOON_S)
        assert link.connection is None

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 60.0})
