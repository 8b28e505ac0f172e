"""One channel carries all requests of a router on a replica, and ends each of them exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app import channel
from serve_app.channel import Channel, Stream
from serve_app.engine import deployment
from serve_app.engine.protocol import Frame, Submit, Usage
from serve_app.engine.simulated.text import text_key, text_of
from serve_app.errors import EngineFailed
from serve_app.types import Operation
from tests.shells.fake_engines import FakeCluster, FakeHandle, model, run, turns, until

REPLICA = "r1"
SOON_S = 5.0  # for what takes milliseconds on an idle machine
LONG = 5000  # tokens: 5 s at the fake's rate, longer than any scenario lets a request live


class Slots:
    """What a channel tells of its router's share, in order."""

    def __init__(self) -> None:
        self.told: list[int | None] = []

    def __call__(self, slots: int | None) -> None:
        self.told.append(slots)


def opened(cluster: FakeCluster, router: str = "router", slots: Slots | None = None) -> tuple[Channel, FakeHandle]:
    handle = cluster.handle()
    return Channel(handle, router, REPLICA, itertools.count(1), slots or Slots()), handle  # type: ignore[arg-type]


def asked(prompt: str, tokens: int) -> Callable[[int], Submit]:
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    return lambda number: Submit(number, f"id-{number}", Operation.COMPLETION, body)


def nothing() -> None:
    """No news wanted of the end."""


async def read(stream: Stream) -> list[Frame]:
    frames = await stream.next()
    while frames[-1].usage is None:
        frames += await stream.next()
    return frames


async def answer(link: Channel, prompt: str, tokens: int) -> list[Frame]:
    async with link.run(asked(prompt, tokens), nothing) as stream:
        return await read(stream)


def heard(frames: list[Frame]) -> str:
    """The text so far."""
    events = b"".join(frame.body for frame in frames).split(b"\n\n")[:-1]
    told = [json.loads(event.removeprefix(b"data: ")) for event in events if event != b"data: [DONE]"]
    return "".join(choice["text"] for event in told for choice in event["choices"])


def text(frames: list[Frame]) -> str:
    """The text of an answer that is whole."""
    assert frames[-1].usage is not None
    assert frames[-1].body.endswith(b"data: [DONE]\n\n")
    return heard(frames)


def said(prompt: str, tokens: int) -> str:
    """What the simulated engine has to say."""
    return text_of(text_key(0, 0, prompt), 0, tokens)


def test_every_request_of_a_crowd_gets_its_own_frames_whole_and_in_order() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        sizes = [1 + number % 23 for number in range(120)]
        told = await asyncio.gather(*(answer(link, f"prompt {n}", tokens) for n, tokens in enumerate(sizes)))
        for number, (tokens, frames) in enumerate(zip(sizes, told, strict=True)):
            assert text(frames) == said(f"prompt {number}", tokens)
            assert [frame.status for frame in frames] == [200] + [0] * (len(frames) - 1)
            assert [frame.usage is not None for frame in frames] == [False] * (len(frames) - 1) + [True]
            assert sum(len(group) - 1 for frame in frames for group in frame.groups) == tokens
        assert [method for method, _ in handle.calls] == ["attach"] + ["submit"] * len(sizes)
        await until(lambda: "attach" in cluster[REPLICA].ended, SOON_S, "the channel closed")
        assert sorted(cluster[REPLICA].ended) == ["attach"] + ["submit"] * len(sizes)

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
        await until(lambda: not cluster[REPLICA].count("submit"), SOON_S, "the call ended")
        assert cluster[REPLICA].ended.count("submit") == 1
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


def test_a_call_that_ended_by_itself_is_not_cancelled() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        handle.turns = lambda method: 40 if method == "submit" else 1  # the reply comes long after the last frame
        ends: list[bool] = []
        async with link.run(asked("a", 5), lambda: ends.append(link.busy)) as stream:
            await read(stream)
            assert ends == [False]  # told once, when the channel was done with it
        calls = [task for task in asyncio.all_tasks() if task.get_name().startswith("submit-")]
        assert len(calls) == 1
        await calls[0]  # raises CancelledError if it was cancelled

    run(scenario)


def test_the_channel_closes_a_while_after_the_last_request_and_opens_again() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        slots = Slots()
        link, handle = opened(cluster, slots=slots)
        assert not link.open
        await answer(link, "a", 3)
        await answer(link, "b", 3)
        assert link.open
        assert not link.busy
        waited_s = await until(lambda: not link.open, SOON_S, "the channel closed")
        assert waited_s > 0.5 * channel.IDLE_CLOSE_S
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "nothing held on the replica")
        assert text(await answer(link, "c", 3)) == said("c", 3)
        assert [method for method, _ in handle.calls] == ["attach", "submit", "submit", "attach", "submit"]
        assert slots.told == [4, None, 4]  # without a channel the share is not ours

    run(scenario)


def test_a_request_keeps_the_channel_open_however_long_it_takes() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        async with link.run(asked("a", LONG), nothing) as stream:
            await stream.next()
            await asyncio.sleep(3 * channel.IDLE_CLOSE_S)  # nothing to wait for: that nothing happens is the point
            assert link.open
            await stream.next()
        assert [method for method, _ in handle.calls] == ["attach", "submit"]

    run(scenario)


def test_a_channel_reopened_while_its_old_one_still_closes_misses_nothing() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        await answer(link, "a", 3)
        handle.turns = lambda method: 30  # the news that the old stream is closed is long on its way
        await until(lambda: not link.open, SOON_S, "the channel closed")
        handle.turns = lambda method: 1
        assert text(await answer(link, "b", 20)) == said("b", 20)

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
            assert text(frames) == said("a", 200)
            # Its reader is still in the block: the drain does not wait for it.
            assert await until(lambda: not cluster[REPLICA].calls, SOON_S, "the replica drained") < 1.0

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0})


def test_a_request_on_its_way_to_a_replica_that_leaves_fails_instead_of_waiting_for_ever() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        await answer(link, "a", 3)
        handle.turns = lambda method: 10
        async with link.run(asked("b", 3), nothing) as stream:
            cluster.remove(REPLICA)
            await turns()
            link.retire()
            with pytest.raises(EngineFailed, match="has left"):
                await asyncio.wait_for(stream.next(), SOON_S)

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
        assert not link.open

    run(scenario, waits={(channel, "ATTACH_TIMEOUT_S"): 60.0})


@pytest.mark.parametrize("loss", ["break_channels", "kill"])
def test_a_lost_channel_fails_every_request_on_it_after_the_frames_that_arrived(loss: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)

        async def one(number: int) -> int:
            async with link.run(asked(f"prompt {number}", LONG), nothing) as stream:
                frames = await stream.next()
                with contextlib.suppress(EngineFailed):
                    while frames[-1].usage is None:
                        frames += await stream.next()
                with pytest.raises(EngineFailed, match=REPLICA):
                    await stream.next()
                return sum(len(group) - 1 for frame in frames for group in frame.groups)

        requests = [asyncio.create_task(one(number)) for number in range(20)]
        await until(lambda: cluster[REPLICA].work == 20, SOON_S, "all run")
        await asyncio.sleep(0.02)  # some tokens
        getattr(cluster, loss)(REPLICA)
        assert all(await asyncio.wait_for(asyncio.gather(*requests), SOON_S))
        assert not link.open
        if loss == "break_channels":
            assert await until(lambda: not cluster[REPLICA].work, SOON_S, "the engine aborted them") < 1.0
            assert text(await answer(link, "again", 4)) == said("again", 4)

    run(scenario, model(slots=64))


def test_an_attach_that_is_never_answered_fails_in_time_and_leaves_nothing_behind() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        cluster[REPLICA].mute = True
        link, handle = opened(cluster)
        told = await asyncio.gather(*(answer(link, f"p{n}", 3) for n in range(5)), return_exceptions=True)
        assert [type(error) for error in told] == [EngineFailed] * 5
        assert not link.open
        assert [method for method, _ in handle.calls] == ["attach"]
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "the attach cancelled")
        cluster[REPLICA].mute = False
        assert text(await answer(link, "b", 3)) == said("b", 3)

    run(scenario)


def test_a_request_cancelled_while_it_attaches_does_not_keep_the_channel_open() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        cluster[REPLICA].mute = True
        link, _ = opened(cluster)
        requests = [asyncio.create_task(answer(link, "a", 3)) for _ in range(3)]
        await turns(10)
        assert link.busy
        for request in requests:
            request.cancel()
        assert {type(e) for e in await asyncio.gather(*requests, return_exceptions=True)} == {asyncio.CancelledError}
        assert not link.busy
        await until(lambda: not link.open, SOON_S, "the channel closed")

    run(scenario, waits={(channel, "ATTACH_TIMEOUT_S"): 60.0})


@pytest.mark.parametrize(
    ("raised", "match"),
    [(EngineFailed("no KV left"), "no KV left"), (ValueError("a bug"), "ValueError: a bug"), (None, "dropped")],
)
def test_whatever_ends_a_call_on_the_replica_ends_its_stream(raised: Exception | None, match: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)

        async def submit(*_: Any, **__: Any) -> None:
            if raised is None:
                raise asyncio.CancelledError  # as the replica's own `_detach` does to a request
            raise raised

        cluster[REPLICA].engine.submit = submit  # type: ignore[method-assign]
        async with link.run(asked("a", 3), nothing) as stream:
            with pytest.raises(EngineFailed, match=match):
                await asyncio.wait_for(stream.next(), SOON_S)

    run(scenario)


def test_a_client_that_does_not_read_is_cut_and_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_BUFFERED_BYTES", 20_000)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        ends: list[int] = []
        async with link.run(asked("slow", LONG), lambda: ends.append(1)) as stream:
            frames = await stream.next()
            neighbour = asyncio.create_task(answer(link, "quick", 300))
            await until(lambda: bool(ends), SOON_S, "the slow one cut")
            await until(lambda: cluster[REPLICA].work <= 1, SOON_S, "its request aborted")
            assert text(await neighbour) == said("quick", 300)
            frames += await stream.next()  # what had arrived is still delivered
            with pytest.raises(EngineFailed, match="too slowly") as cut:
                await stream.next()
            assert cut.value.code == "slow_client"
            assert ends == [1]
        size = sum(len(frame.body) for frame in frames)
        assert 20_000 < size < 25_000  # no more is kept than what made it too much

    run(scenario)


def test_a_request_that_lost_frames_does_not_go_on_over_the_next_channel() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        async with link.run(asked("slow", LONG), nothing) as stream:
            frames = await stream.next()
            cluster.break_channels(REPLICA)
            await until(lambda: not link.open, SOON_S, "the break seen")
            assert not link.busy  # nor may its reader hold up a drain
            await answer(link, "quick", 30)  # over the next channel, while the one that lost frames has not looked yet
            with contextlib.suppress(EngineFailed):
                while frames[-1].usage is None:
                    frames += await stream.next()
            assert said("slow", LONG).startswith(heard(frames))
            with pytest.raises(EngineFailed, match="broke"):
                await asyncio.wait_for(stream.next(), SOON_S)
            await until(lambda: not cluster[REPLICA].work, 1.0, "aborted")  # though the router is attached again

    run(scenario, waits={(deployment, "BREAK_GRACE_S"): 0.5})


def test_frames_that_come_after_a_failure_are_dropped() -> None:
    stream = Stream()
    assert stream.push(Frame(1, b"a", 200, "sse"))
    stream.fail(EngineFailed("first"))
    stream.fail(EngineFailed("second"))
    assert stream.push(Frame(1, b"b", usage=Usage()))

    async def scenario() -> None:
        assert [frame.body for frame in await stream.next()] == [b"a"]
        with pytest.raises(EngineFailed, match="first"):
            await stream.next()

    asyncio.run(scenario())
