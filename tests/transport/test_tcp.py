"""A router's requests over the wire end once each, whatever becomes of their clients and of their calls."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import BodyTooLarge
from serve_app.transport import channel, tcp, tcp_server
from tests.fakes.engines import FakeCluster, model, until
from tests.fakes.router import LONG, REPLICA, SOON_S, answer, asked, nothing, said, text
from tests.fakes.tcp import Loop, failures, known, loops, run, running, wired


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
        assert link.is_open
        channel.IDLE_CLOSE_S = 0.05  # of the next request; `run` puts the constant back
        await answer(link, "a", 3)
        assert await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed") < 1.0
        assert not link.is_open
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
def test_a_request_longer_than_the_wire_takes_is_refused_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        other = asyncio.create_task(answer(link, "b", 100))
        await until(lambda: cluster[REPLICA].work == 1, SOON_S, "it runs")
        async with link.run(asked("x" * tcp.MAX_MESSAGE_BYTES, 3), nothing) as stream:
            with pytest.raises(BodyTooLarge):
                await asyncio.wait_for(stream.next(), SOON_S)
        assert text(await other) == said("b", 100)
        assert [method for method, _ in handle.calls].count("hold") == 1

    limit = 2**20
    run(scenario, waits={(tcp, "MAX_MESSAGE_BYTES"): limit, (tcp_server, "MAX_MESSAGE_BYTES"): limit}, loop=loop)


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
        await until(lambda: not (link.requests or link.tasks), SOON_S, "the router, too")

    run(scenario, model(slots=64), waits={(channel, "IDLE_CLOSE_S"): 1.0}, loop=loop)


@loops
def test_a_call_that_never_arrives_ends_with_the_channel_though_its_request_is_long_over(loop: Loop) -> None:
    """Serve without the fast path looks for a replica for ever, and one that has left is never found."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = wired(cluster)
        handle.turns = lambda method: 10**9 if method == "hold" else 1
        assert text(await answer(link, "a", 3)) == said("a", 3)
        assert len(link.tasks) == 1
        link.retire()
        await until(lambda: not link.tasks, SOON_S, "the call given up")
        await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed")

    run(scenario, loop=loop)
