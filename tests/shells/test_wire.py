"""A router's requests over the wire end once each, whatever happens to the connection or to the call that holds one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from serve_app import channel, replica_set, wire
from serve_app.channel import Channel
from serve_app.engine import deployment, wire_server
from serve_app.engine.protocol import WireAddress
from serve_app.errors import BodyTooLarge, EngineFailed, EngineUnreachable
from serve_app.serve_adapter import EngineHandle
from serve_app.wire import WiredHandle
from tests.shells.fake_engines import FakeCluster, model, turns, until
from tests.shells.fake_router import (
    LONG,
    REPLICA,
    SOON_S,
    Router,
    answer,
    asked,
    freeze,
    heard,
    nothing,
    said,
    text,
    thaw,
)
from tests.shells.fake_wire import LOOPS, Loop, Relay, known, run, wired

loops = pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
SHORT_GRACE = {(deployment, "BREAK_GRACE_S"): 0.05}


async def running(link: Channel, cluster: FakeCluster, count: int = 1) -> list[asyncio.Task[str]]:
    """Requests without an end in sight, their first frames read; each tells how it failed."""

    async def one(number: int) -> str:
        async with link.run(asked(f"prompt {number}", LONG), nothing) as stream:
            frames = await stream.next()
            begun.append(number)
            try:
                while frames[-1].usage is None:
                    frames += await stream.next()
            except EngineFailed as error:
                assert said(f"prompt {number}", LONG).startswith(heard(frames))
                return type(error).__name__
            return "ended"

    begun: list[int] = []
    requests = [asyncio.create_task(one(number)) for number in range(count)]
    await until(lambda: len(begun) == count, SOON_S, "all run")
    return requests


async def failures(requests: list[asyncio.Task[str]]) -> set[str]:
    return set(await asyncio.wait_for(asyncio.gather(*requests), SOON_S))


@loops
def test_every_request_of_a_crowd_gets_its_own_frames_whole_and_in_order(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        sizes = [1 + number % 23 for number in range(300)]
        told = await asyncio.gather(*(answer(link, f"prompt {n}", tokens) for n, tokens in enumerate(sizes)))
        for number, (tokens, frames) in enumerate(zip(sizes, told, strict=True)):
            assert text(frames) == said(f"prompt {number}", tokens)
            assert [frame.status for frame in frames] == [200] + [0] * (len(frames) - 1)
            assert sum(len(group) - 1 for frame in frames for group in frame.groups) == tokens
        assert [method for method, _ in handle.calls] == ["open_wire"] + ["hold"] * len(sizes)

    run(scenario, model(slots=64), loop=loop)


@loops
def test_what_serve_counts_is_the_requests_and_nothing_while_the_channel_idles(loop: Loop) -> None:
    """So a drain waits for requests alone; the channel closes itself a while after the last one."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        requests = await running(link, cluster, 3)
        await until(lambda: cluster[REPLICA].count("hold") == 3, SOON_S, "three are held")
        assert list(cluster[REPLICA].calls.values()) == ["hold"] * 3
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "none")
        await until(lambda: known(cluster[REPLICA]) == {"connections": 1}, SOON_S, "and none is known")
        assert link.open
        channel.IDLE_CLOSE_S = 0.05  # of the next request; `run` puts the constant back
        await answer(link, "a", 3)
        assert await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed") < 1.0
        assert not link.open
        await answer(link, "again", 3)

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0}, loop=loop)


@loops
@pytest.mark.parametrize("late", [0, 200], ids=["early", "late"])  # turns of the loop that the call is on its way
def test_a_request_runs_whether_its_call_overtakes_it_or_comes_after_its_end(late: int, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        handle.turns = lambda method: late if method == "hold" else 1
        for number in range(20):
            assert text(await answer(link, f"prompt {number}", 2)) == said(f"prompt {number}", 2)
        await until(lambda: not cluster[REPLICA].calls and handle.calls[-1][0] == "hold", SOON_S, "all held")

    run(scenario, loop=loop)


@loops
def test_a_client_that_leaves_before_the_call_arrives_takes_its_request_with_it(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        handle.turns = lambda method: 10**9 if method == "hold" else 1  # it never arrives
        async with link.run(asked("a", LONG), nothing) as stream:
            await stream.next()
            assert not cluster[REPLICA].calls
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        await until(lambda: known(cluster[REPLICA]) == {"connections": 1}, SOON_S, "forgotten")

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 0.5}, loop=loop)


@loops
def test_a_client_that_leaves_takes_its_request_with_it_and_no_other(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        left, stays = await running(link, cluster), asyncio.create_task(answer(link, "b", 200))
        left[0].cancel()
        assert await until(lambda: cluster[REPLICA].work <= 1, SOON_S, "aborted") < 1.0
        assert text(await stays) == said("b", 200)

    run(scenario, loop=loop)


@loops
def test_a_lost_call_aborts_its_request_though_the_connection_stands(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        requests = await running(link, cluster, 3)
        cluster[REPLICA].fail_calls("hold")
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert await failures(requests) == {"EngineFailed"}
        assert known(cluster[REPLICA]) == {"connections": 1}
        assert text(await answer(link, "next", 3)) == said("next", 3)
        assert [method for method, _ in handle.calls].count("open_wire") == 1

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 0.5}, loop=loop)


@loops
@pytest.mark.parametrize("loss", ["hold", "connection", "both", "kill"])
def test_requests_without_a_first_frame_run_elsewhere_whatever_was_lost(loss: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await wired_router(cluster)
        freeze(cluster, "r1", "r2")
        requests = [router.asking() for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        if loss == "kill":
            cluster.kill("r1")
        if loss in ("hold", "both"):
            cluster["r1"].fail_calls("hold")
        if loss in ("connection", "both"):
            cluster["r1"].cut_wire()
        await until(lambda: cluster["r1"].dead or not cluster["r1"].work, 1.0, "r1 has aborted them")
        thaw(cluster, "r1", "r2")
        await asyncio.gather(*requests)
        assert sorted(router.relayed) == [f"{n}" for n in range(1, 9)]  # nobody was answered twice
        await router.settled()

    run(scenario, loop=loop)


async def wired_router(cluster: FakeCluster, handle: Callable[[Any], Any] = lambda below: below) -> Router:
    return await Router(cluster, over=lambda below: WiredHandle(handle(below))).start()


@loops
def test_a_lost_connection_fails_every_stream_on_it_and_the_next_one_serves(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        requests = await running(link, cluster, 20)
        cluster[REPLICA].cut_wire()
        assert await failures(requests) == {"EngineFailed"}
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert not link.open
        assert text(await answer(link, "again", 4)) == said("again", 4)

    run(scenario, model(slots=64), loop=loop)


@loops
def test_a_half_open_connection_holds_nothing_once_the_router_is_back(loop: Loop) -> None:
    """The router has seen the end of it, the replica has not, and hears of no cancelled call either."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        relays: list[Relay] = []

        def through(below: Any) -> EngineHandle:
            relays.append(Relay(below))
            return relays[0]  # type: ignore[return-value]

        link, _ = wired(cluster, handle=through)
        requests = await running(link, cluster, 3)
        relays[0].cut_near()
        cluster[REPLICA].engine.hold = _never_cancelled  # type: ignore[method-assign]  # cancellations do not arrive
        assert await failures(requests) == {"EngineFailed"}
        del cluster[REPLICA].engine.hold
        relays[0].go_on()
        assert text(await answer(link, "back", 4)) == said("back", 4)
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "the old ones aborted") < 1.0
        relays[0].close()

    run(scenario, loop=loop)


async def _never_cancelled(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


@loops
def test_a_connection_that_stands_still_and_goes_on_loses_nothing(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        relays: list[Relay] = []

        def through(below: Any) -> EngineHandle:
            relays.append(Relay(below))
            return relays[0]  # type: ignore[return-value]

        link, _ = wired(cluster, handle=through)
        requests = [asyncio.create_task(answer(link, f"p{n}", 100)) for n in range(4)]
        await until(lambda: cluster[REPLICA].work == 4, SOON_S, "all run")
        relays[0].stand_still()
        await until(lambda: not cluster[REPLICA].work, SOON_S, "all is made, nothing has come")
        late = asyncio.create_task(answer(link, "late", 5))
        await turns(50)
        assert not late.done()
        relays[0].go_on()
        told = await asyncio.wait_for(asyncio.gather(*requests, late), SOON_S)
        assert [text(frames) for frames in told[:4]] == [said(f"p{n}", 100) for n in range(4)]
        assert text(told[4]) == said("late", 5)
        relays[0].close()

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"\x91\x01"], ids=["empty", "opcode", "types"])
def test_nonsense_from_a_replica_is_a_broken_channel(nonsense: bytes, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        requests = await running(link, cluster, 3)
        (visitor,) = cluster[REPLICA].engine._wire._visitors  # type: ignore[union-attr]
        visitor.framing.send(nonsense)
        assert await failures(requests) == {"EngineFailed"}
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert len(unhandled) == 1  # and the loop says what it was
        assert text(await answer(link, "next", 3)) == said("next", 3)

    run(scenario, loop=loop)


@loops
@pytest.mark.parametrize("fault", ["refused", "no ticket", "silent", "has left"])
def test_a_channel_that_cannot_be_opened_fails_as_one_that_was_never_there(fault: str, loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        if fault == "silent":
            silent.listen()

        class Faulty:
            def __init__(self, below: Any) -> None:
                self.below = below

            async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
                address: WireAddress = await self.below.call(method, *arguments, replica_id=replica_id)
                if fault == "has left":
                    raise EngineUnreachable("engine replica r1 has left")
                if fault == "no ticket":
                    return WireAddress(address.host, address.port, b"?" * 32)
                return WireAddress(*silent.getsockname(), address.ticket)

        link, handle = wired(cluster, handle=Faulty)
        told = await asyncio.gather(*(answer(link, "a", 3) for _ in range(3)), return_exceptions=True)
        silent.close()
        assert [type(error) for error in told] == [EngineUnreachable] * 3, told
        assert not link.open
        assert [method for method, _ in handle.calls] == ["open_wire"]

    short = {(channel, "ATTACH_TIMEOUT_S"): 0.2, (wire_server, "TICKET_LIFE_S"): 0.1}
    run(scenario, waits=short, loop=loop)


def test_a_connection_that_does_not_come_about_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        loop = asyncio.get_running_loop()

        async def never(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(loop, "create_connection", never)  # a packet filter that drops looks like this
        link, _ = wired(cluster)
        with pytest.raises(EngineUnreachable, match="no connection to"):
            await answer(link, "a", 3)
        assert not link.open

    run(scenario, waits={(wire, "CONNECT_TIMEOUT_S"): 0.05, (wire_server, "TICKET_LIFE_S"): 0.1})


@loops
def test_a_request_longer_than_the_wire_takes_is_refused_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        other = asyncio.create_task(answer(link, "b", 100))
        await until(lambda: cluster[REPLICA].work == 1, SOON_S, "it runs")
        async with link.run(asked("x" * wire.MAX_MESSAGE_BYTES, 3), nothing) as stream:
            with pytest.raises(BodyTooLarge):
                await asyncio.wait_for(stream.next(), SOON_S)
        assert text(await other) == said("b", 100)
        assert [method for method, _ in handle.calls].count("hold") == 1

    limit = 2**20
    run(scenario, waits={(wire, "MAX_MESSAGE_BYTES"): limit, (wire_server, "MAX_MESSAGE_BYTES"): limit}, loop=loop)


@loops
def test_a_request_of_30_mib_passes_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        other = asyncio.create_task(answer(link, "b", 100))
        prompt = "x" * 30 * 2**20
        assert text(await answer(link, prompt, 3)) == said(prompt, 3)
        assert text(await other) == said("b", 100)

    run(scenario, loop=loop)


@loops
def test_a_thousand_requests_at_once_of_which_every_third_leaves(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = wired(cluster)
        requests = [asyncio.create_task(answer(link, f"prompt {n}", 1 + n % 7)) for n in range(1000)]
        await until(lambda: cluster[REPLICA].work > 0, SOON_S, "they run")
        for number in range(0, 1000, 3):
            requests[number].cancel()
        told = await asyncio.gather(*requests, return_exceptions=True)
        for number, frames in enumerate(told):
            if number % 3:
                assert not isinstance(frames, BaseException), frames
                assert text(frames) == said(f"prompt {number}", 1 + number % 7)
        await until(lambda: not cluster[REPLICA].calls, SOON_S, "no call open")
        await until(lambda: known(cluster[REPLICA]) == {"connections": 1}, SOON_S, "all forgotten")
        await until(lambda: not (link._calls or link._tasks), SOON_S, "the router, too")

    run(scenario, model(slots=64), waits={(channel, "IDLE_CLOSE_S"): 1.0}, loop=loop)


def test_a_replica_that_leaves_serves_set_finishes_what_runs_and_then_knows_nobody() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await wired_router(cluster)
        requests = [router.asking(300) for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        await until(lambda: cluster["r1"].count("hold") == 4, SOON_S, "all held")
        await until(lambda: len(router.relayed) == 8, SOON_S, "their first frames are there")
        cluster.remove("r1")
        await asyncio.gather(*requests)
        assert await until(lambda: not cluster["r1"].calls, SOON_S, "Serve sees it idle") < 1.0
        await until(lambda: not known(cluster["r1"]), SOON_S, "its channel is closed")
        await router.settled()
        cluster.remove("r2")  # else its channel would stand for IDLE_CLOSE_S

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 60.0, (replica_set, "EJECT_S"): 0.1})


@loops
def test_a_call_that_never_arrives_ends_with_the_channel_though_its_request_is_long_over(loop: Loop) -> None:
    """Serve without the fast path looks for a replica for ever, and one that has left is never found."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        handle.turns = lambda method: 10**9 if method == "hold" else 1
        assert text(await answer(link, "a", 3)) == said("a", 3)
        assert len(link._tasks) == 1
        link.retire()
        await until(lambda: not link._tasks, SOON_S, "the call given up")
        await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed")

    run(scenario, loop=loop)
