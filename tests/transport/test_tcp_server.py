"""The replica's end of a connection runs what is submitted, and ends each request with a last frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from serve_app.errors import EngineUnreachable
from serve_app.transport import STOPPED, Frame, Submit, TokenUsage
from serve_app.transport.tcp import CANCEL, STOP
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, REPLICA, SOON_S, expected_text, text
from tests.fakes.tcp import Loop, Peer, encoded, holding, known, loops, started


@loops
def test_a_call_holds_the_connection_of_its_router_until_either_ends(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        with pytest.raises(EngineUnreachable, match="no connection"):
            await replica.engine.hold(b"", REPLICA)  # nobody was ever there
        peer = await Peer.enter(replica)
        other = await Peer.enter(replica, "other")
        call = holding(replica, peer)
        cancelled = holding(replica, other)
        for side in (peer, other):
            side.hand_in(1, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        peer.leave()
        await asyncio.wait_for(call, SOON_S)
        cancelled.cancel()
        await other.cut()
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        assert known(replica) == {}

    run(scenario, loop=loop)


@loops
def test_a_late_end_of_the_call_for_a_lost_connection_does_not_end_its_routers_next_one(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        lost = await Peer.enter(replica)
        peer = await Peer.enter(replica)
        call = holding(replica, lost)  # it arrives late
        await turns()
        call.cancel()
        with pytest.raises(EngineUnreachable, match="no connection"):
            await call
        peer.hand_in(1, 20)
        await peer.read_until(1)
        assert text(peer.frames(1)) == expected_text("prompt 1", 20)
        peer.leave()

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize("when", ["in the piece it came in", "while it runs", "after it ended"])
def test_cancelling_aborts_the_request_and_no_other(when: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(9, 60)
        cancel = CANCEL + msgspec.msgpack.encode(1)
        if when == "in the piece it came in":
            peer.send(encoded(1, prompt="a", max_tokens=LONG), cancel)
        elif when == "while it runs":
            peer.hand_in(1, LONG)
            await until(lambda: replica.work == 2, SOON_S, "both run")
            peer.send(cancel)
        else:
            peer.hand_in(1, 3)
            await peer.read_until(1)
            peer.send(cancel)
        await peer.read_until(9)
        assert text(peer.frames(9)) == expected_text("prompt 9", 60)
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        assert known(replica) == {"connections": 1}
        assert (1 in peer.ended()) is (when == "after it ended")  # its router has left it: no frame says so
        peer.leave()

    run(scenario, loop=loop)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_stopped_request_ends_with_what_it_has_produced_whatever_its_engine_says_to_the_cancellation(
    stream: bool,
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        run_request = replica.engine.server.run

        async def answers_its_cancellation(submit: Submit, put: Callable[[Frame], None]) -> None:
            try:
                await run_request(submit, put)
            except asyncio.CancelledError:  # as vLLM's serving objects do it
                put(Frame(submit.number, b"disconnected", 400, "json", events=1, usage=TokenUsage()))

        replica.engine.server.run = answers_its_cancellation
        peer = await Peer.enter(replica)
        peer.hand_in(1, LONG, stream=stream)
        await until(lambda: replica.load.generated_tokens > 3, SOON_S, "some tokens")
        peer.send(STOP + msgspec.msgpack.encode(1), STOP + msgspec.msgpack.encode(2))
        await peer.read_until(1)
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        peer.hand_in(3, 3)
        await peer.read_until(3)
        peer.send(STOP + msgspec.msgpack.encode(3))
        *frames, last = peer.frames(1)
        assert last.failure is not None
        assert (last.failure.code, last.status, last.usage) == (STOPPED, 0, None)
        assert b"disconnected" not in b"".join(frame.body for frame in [*frames, last])
        made = sum(len(group) - 1 for frame in [*frames, last] for group in frame.groups)
        assert 3 < made <= replica.load.generated_tokens - 3
        assert any(frame.body for frame in frames) is stream
        assert (frames or [last])[0].prompt is not None
        peer.leave()

    run(scenario)


def test_the_engines_failure_is_the_last_frame_of_its_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        for number in (1, 2):
            peer.hand_in(number, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        await replica.engine.backend.shutdown()
        await peer.read_until(1, 2)
        for number in (1, 2):
            failure = peer.frames(number)[-1].failure
            assert failure is not None
            assert (failure.code, "shut down" in failure.message) == ("engine_failed", True)
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario)


@loops
def test_a_request_of_30_mib_arrives_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        other = await Peer.enter(replica, "other")
        other.hand_in(1, 100)
        peer.hand_in(1, 3, prompt="x" * 30 * 2**20)
        await asyncio.gather(peer.read_until(1), other.read_until(1))
        assert peer.frames(1)[0].status == 200
        assert text(other.frames(1)) == expected_text("prompt 1", 100)
        peer.leave()
        other.leave()

    run(scenario, loop=loop)


@loops
def test_a_thousand_requests_at_once_all_end_and_nothing_is_kept(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        numbers = range(1, 1001)
        for number in numbers:
            peer.hand_in(number, 1 + number % 7)
        await peer.read_until(*numbers)
        assert {number: text(peer.frames(number)) for number in numbers} == {
            number: expected_text(f"prompt {number}", 1 + number % 7) for number in numbers
        }
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario, model(slots=64), loop=loop)
