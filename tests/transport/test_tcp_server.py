"""The replica's end of the wire runs what is handed in, and tells its end to the call that holds it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.transport import tcp_server
from serve_app.transport.tcp import CANCEL
from tests.fakes.engines import FakeCluster, model, until
from tests.fakes.router import LONG, SOON_S, said, text
from tests.fakes.tcp import Loop, Peer, encoded, holding, known, loops, run, started

MANY = 1500  # tokens, some 250 kB of frames: several times what the small buffers below and the reader take in


@loops
@pytest.mark.parametrize("held_first", [False, True])
def test_a_request_and_the_call_that_holds_it_may_come_in_any_order(held_first: bool, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        if held_first:
            call = holding(replica, 1)
            await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
            peer.hand_in(1, 5)
        else:
            peer.hand_in(1, 5)
            await peer.read_until(1)
            assert known(replica) == {"connections": 1, "requests": 1}  # kept for the call to learn its end
            call = holding(replica, 1)
        await call
        await peer.read_until(1)
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario, loop=loop)


def test_a_call_whose_request_never_comes_fails_as_one_that_can_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1)  # nobody was ever there
        peer = await Peer.enter(replica)
        with pytest.raises(EngineUnreachable, match="did not arrive"):
            await holding(replica, 1)
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1, "another router")
        peer.leave()
        await until(lambda: not known(replica), SOON_S, "it left")
        with pytest.raises(EngineUnreachable, match="no channel"):
            await holding(replica, 1)

    run(scenario, waits={(tcp_server, "HOLD_WAIT_S"): 0.05})


@loops
@pytest.mark.parametrize("by", ["the call", "the wire"])
@pytest.mark.parametrize("when", ["before it came", "while it runs", "after it ended"])
def test_cancelling_aborts_the_request_and_no_other(by: str, when: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        peer.hand_in(9, 60)
        kept = holding(replica, 9)
        tokens = 3 if when == "after it ended" else LONG
        call = holding(replica, 1)
        await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
        if when != "before it came":
            peer.hand_in(1, tokens)
            if when == "while it runs":
                await until(lambda: replica.work == 2, SOON_S, "both run")
            else:
                await call
        if by == "the call":
            call.cancel()
        else:
            peer.send(CANCEL + msgspec.msgpack.encode(1))
        if when == "before it came":  # as the router sends them: a hand-in is never behind its cancellation
            peer.hand_in(1, tokens)
            peer.send(CANCEL + msgspec.msgpack.encode(1))
        ended = await asyncio.wait({call}, timeout=SOON_S)
        assert ended[0]
        assert call.cancelled() is (when != "after it ended")
        await kept
        assert await until(lambda: not replica.work, SOON_S, "aborted") < 1.0
        await until(lambda: known(replica) == {"connections": 1}, SOON_S, "forgotten")
        await peer.read_until(9)
        peer.leave()

    run(scenario, loop=loop)


def test_a_request_that_is_cancelled_in_the_piece_it_came_in_leaves_its_call_nothing_to_trip_over() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        call = holding(replica, 1)
        await until(lambda: known(replica).get("held") == 1, SOON_S, "the call waits")
        peer.send(encoded(1, prompt="a", max_tokens=LONG), CANCEL + msgspec.msgpack.encode(1))
        await asyncio.wait({call}, timeout=SOON_S)
        assert call.cancelled()
        peer.leave()

    run(scenario)


def test_the_engines_failure_reaches_the_call_and_one_that_nobody_holds_is_forgotten() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer = await Peer.enter(replica)
        for number in (1, 2):
            peer.hand_in(number, LONG)
        await until(lambda: replica.work == 2, SOON_S, "both run")
        call = holding(replica, 1)
        await asyncio.sleep(0)
        await replica.engine.backend.shutdown()
        with pytest.raises(EngineFailed):
            await call
        peer.send(CANCEL + msgspec.msgpack.encode(2))
        await until(lambda: known(replica) == {"connections": 1}, SOON_S, "forgotten")
        peer.leave()

    run(scenario)


@loops
def test_a_request_of_30_mib_arrives_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        replica = await started(cluster)
        peer, other = await Peer.enter(replica), await Peer.enter(replica, "other")
        other.hand_in(1, 100)
        peer.hand_in(1, 3, prompt="x" * 30 * 2**20)
        await asyncio.gather(peer.read_until(1), other.read_until(1))
        assert peer.frames(1)[0].status == 200
        assert text(other.frames(1)) == said("prompt 1", 100)
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
        calls = [holding(replica, number) for number in numbers]
        await peer.read_until(*numbers)
        await asyncio.gather(*calls)
        assert {number: text(peer.frames(number)) for number in numbers} == {
            number: said(f"prompt {number}", 1 + number % 7) for number in numbers
        }
        assert known(replica) == {"connections": 1}
        peer.leave()

    run(scenario, model(slots=64), loop=loop)
