"""A channel that breaks, or never stands, ends the requests on it at once; none goes on with a hole in it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.errors import EngineFailed, EngineUnreachable, RequestFailed, ServeAppError
from serve_app.transport import channel, stream
from serve_app.transport.messages import Batch, Frame, Submit, TokenUsage, batch_encoder
from serve_app.transport.stream import ResponseStream, UnreadBytes
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import (
    LONG,
    REPLICA,
    SOON_S,
    Slots,
    answer,
    asked,
    expected_text,
    nothing,
    opened,
    received_text,
    text,
)


@pytest.mark.parametrize("loss", ["break_channels", "kill"])
def test_a_lost_channel_fails_every_request_on_it_after_the_frames_that_arrived(loss: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)

        async def ask(number: int) -> int:
            async with link.run(asked(f"prompt {number}", LONG), nothing) as stream:
                frames = await stream.next()
                with contextlib.suppress(EngineFailed):
                    while frames[-1].usage is None:
                        frames += await stream.next()
                with pytest.raises(EngineFailed, match=REPLICA):
                    await stream.next()
                return sum(len(group) - 1 for frame in frames for group in frame.groups)

        requests = [asyncio.create_task(ask(number)) for number in range(20)]
        await until(lambda: cluster[REPLICA].work == 20, SOON_S, "all run")
        await asyncio.sleep(0.02)  # some tokens
        getattr(cluster, loss)(REPLICA)
        assert all(await asyncio.wait_for(asyncio.gather(*requests), SOON_S))
        assert link.connection is None
        if loss == "break_channels":
            assert await until(lambda: not cluster[REPLICA].work, SOON_S, "the engine aborted them") < 1.0
            assert text(await answer(link, "again", 4)) == expected_text("again", 4)

    run(scenario, model(slots=64))


def test_an_attach_that_is_never_answered_fails_in_time_and_leaves_nothing_behind() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        cluster[REPLICA].mute = True
        link, handle = opened(cluster)
        reported = await asyncio.gather(*(answer(link, f"p{n}", 3) for n in range(5)), return_exceptions=True)
        assert [type(error) for error in reported] == [EngineUnreachable] * 5
        assert link.connection is None
        assert [method for method, _ in handle.calls] == ["open_wire"]
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "the call cancelled")
        cluster[REPLICA].mute = False
        assert text(await answer(link, "b", 3)) == expected_text("b", 3)

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 0.2})


def test_an_answer_in_the_turn_of_the_timeout_leaves_no_request_without_a_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        """A connection that is accepted after `turns_late` turns of the loop, and answers at once."""

        turns_late = 0

        def __init__(self, *arguments: Any) -> None:
            self._on_message = arguments[3]
            self.is_closed = False

        async def open(self) -> None:
            await turns(self.turns_late)
            self._on_message(batch_encoder.encode(Batch([], 4)))

        def submit(self, submit: Submit) -> None:
            assert not self.is_closed
            self._on_message(batch_encoder.encode(Batch([Frame(submit.number, b"whole", 200, usage=TokenUsage())])))

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(channel, "ReplicaConnection", Late)

    async def scenario(cluster: FakeCluster) -> None:
        counter: Counter[str] = Counter()
        for Late.turns_late in range(16):  # one of them meets the timeout
            link, _ = opened(cluster)
            first = asyncio.create_task(answer(link, "a", 3))
            await turns(1)
            time.sleep(0.6 * channel.CHANNEL_ATTACH_S)  # noqa: ASYNC251  the loop is busy, as on a loaded machine
            second = asyncio.create_task(answer(link, "b", 3))
            await turns(1)
            time.sleep(0.5 * channel.CHANNEL_ATTACH_S)  # noqa: ASYNC251  the first one's time is over, not the second's
            for result in await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), SOON_S):
                counter["unreachable" if isinstance(result, EngineUnreachable) else result[0].body.decode()] += 1
            link.retire()
        assert set(counter) == {"unreachable", "whole"}

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 0.02}, loop=asyncio.new_event_loop)  # it blocks: in real time


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("a bug"), asyncio.CancelledError()], ids=repr)
def test_an_attach_that_fails_in_an_unexpected_way_fails_its_requests_at_once(error: BaseException) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)

        async def fails(*_: Any, **__: Any) -> None:
            raise error

        handle.call = fails  # type: ignore[assignment]
        asyncio.get_running_loop().set_exception_handler(lambda _, context: None)  # the bug is logged by the loop
        reported = await asyncio.wait_for(asyncio.gather(answer(link, "a", 3), return_exceptions=True), SOON_S)
        assert [type(one) for one in reported] == [EngineUnreachable]
        assert link.connection is None

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 60.0})


def test_a_request_cancelled_while_it_attaches_does_not_keep_the_channel_open() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        cluster[REPLICA].mute = True
        link, _ = opened(cluster)
        requests = [asyncio.create_task(answer(link, "a", 3)) for _ in range(3)]
        await turns(10)
        assert link.requests
        for request in requests:
            request.cancel()
        assert {type(e) for e in await asyncio.gather(*requests, return_exceptions=True)} == {asyncio.CancelledError}
        assert not link.requests
        await until(lambda: link.connection is None, SOON_S, "the channel closed")

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 60.0})


@pytest.mark.parametrize(
    ("raised", "kind", "match"),
    [
        (EngineFailed("no KV left"), EngineFailed, "no KV left"),
        (ValueError("a bug"), RequestFailed, "ValueError: a bug"),
        (None, EngineFailed, "dropped"),
    ],
)
def test_whatever_ends_a_request_on_the_replica_ends_its_stream(
    raised: Exception | None, kind: type[ServeAppError], match: str
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)

        async def fails(*_: Any, **__: Any) -> None:
            if raised is None:
                raise asyncio.CancelledError  # of a task that the engine itself cancelled
            raise raised

        cluster[REPLICA].engine.server.run = fails
        async with link.run(asked("a", 3), nothing) as stream:
            with pytest.raises(kind, match=match):
                await asyncio.wait_for(stream.next(), SOON_S)

    run(scenario)


def test_a_client_that_does_not_read_is_cut_and_its_neighbours_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BUFFERED_BYTES", 20_000)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        ends: list[int] = []
        async with link.run(asked("slow", LONG), lambda: ends.append(1)) as stream:
            frames = await stream.next()
            neighbour = asyncio.create_task(answer(link, "quick", 300))
            await until(lambda: bool(ends), SOON_S, "the slow one cut")
            await until(lambda: cluster[REPLICA].work <= 1, SOON_S, "its request aborted")
            assert text(await neighbour) == expected_text("quick", 300)
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
            await until(lambda: link.connection is None, SOON_S, "the break seen")
            assert not link.requests  # nor may its reader hold up a drain
            await answer(link, "quick", 30)  # over the next channel, while the one that lost frames has not looked yet
            with contextlib.suppress(EngineFailed):
                while frames[-1].usage is None:
                    frames += await stream.next()
            assert expected_text("slow", LONG).startswith(received_text(frames))
            with pytest.raises(EngineFailed, match="broke"):
                await asyncio.wait_for(stream.next(), SOON_S)
            await until(lambda: not cluster[REPLICA].work, 1.0, "aborted, though the router is attached again")
            link.retire()

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0})


def test_what_a_dropped_channel_still_brings_is_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[Callable[[bytes], None]] = []

    class Silent:
        """A connection that is never accepted."""

        def __init__(self, *arguments: Any) -> None:
            arrived.append(arguments[3])

        async def open(self) -> None:
            await asyncio.Event().wait()

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(channel, "ReplicaConnection", Silent)

    async def scenario(cluster: FakeCluster) -> None:
        slots = Slots()
        link, _ = opened(cluster, slots=slots)
        first = asyncio.create_task(answer(link, "a", 3))
        await turns(5)
        link.retire()  # before it stood
        with pytest.raises(EngineUnreachable):
            await asyncio.wait_for(first, SOON_S)
        arrived[0](batch_encoder.encode(Batch([], 7)))  # it came in the turn in which the channel was dropped
        assert (slots.reported, link.connection) == ([], None)

    run(scenario)


def test_frames_that_come_after_a_failure_are_dropped() -> None:
    stream = ResponseStream(UnreadBytes(), nothing, nothing)
    assert stream.push(Frame(1, b"a", 200, "sse", events=1))
    stream.fail(EngineFailed("first"))
    stream.fail(EngineFailed("second"))
    assert stream.push(Frame(1, b"b", usage=TokenUsage()))

    async def scenario() -> None:
        assert [frame.body for frame in await stream.next()] == [b"a"]
        with pytest.raises(EngineFailed, match="first"):
            await stream.next()

    asyncio.run(scenario())
