"""A router's requests over a connection end once each, whatever becomes of their clients and of its call."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import BodyTooLarge
from serve_app.transport import channel, tcp, tcp_server
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import REPLICA, SOON_S, answer, expected_text, opened, text
from tests.fakes.tcp import Loop, failures, known, loops, running


@loops
def test_every_request_of_a_crowd_gets_its_own_frames_whole_and_in_order(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        sizes = [1 + number % 23 for number in range(300)]
        reported = await asyncio.gather(*(answer(link, f"prompt {n}", tokens) for n, tokens in enumerate(sizes)))
        for number, (tokens, frames) in enumerate(zip(sizes, reported, strict=True)):
            assert text(frames) == expected_text(f"prompt {number}", tokens)
            assert [frame.status for frame in frames] == [200] + [0] * (len(frames) - 1)
            assert sum(len(group) - 1 for frame in frames for group in frame.groups) == tokens
        assert [method for method, _ in handle.calls] == ["open_wire", "hold"]

    run(scenario, model(slots=64), loop=loop)


@loops
def test_a_client_that_leaves_takes_its_request_with_it_and_no_other(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        left = await running(link, cluster)
        stays = asyncio.create_task(answer(link, "b", 200))
        left[0].cancel()
        assert await until(lambda: cluster[REPLICA].work <= 1, SOON_S, "aborted") < 1.0
        assert text(await stays) == expected_text("b", 200)

    run(scenario, loop=loop)


@loops
def test_a_request_of_30_mib_passes_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        other = asyncio.create_task(answer(link, "b", 100))
        prompt = "x" * 30 * 2**20
        assert text(await answer(link, prompt, 3)) == expected_text(prompt, 3)
        assert text(await other) == expected_text("b", 100)

    run(scenario, loop=loop)


@loops
def test_a_thousand_requests_at_once_of_which_every_third_leaves(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        requests = [asyncio.create_task(answer(link, f"prompt {n}", 1 + n % 7)) for n in range(1000)]
        await until(lambda: cluster[REPLICA].work > 0, SOON_S, "they run")
        for number in range(0, 1000, 3):
            requests[number].cancel()
        reported = await asyncio.gather(*requests, return_exceptions=True)
        for number, frames in enumerate(reported):
            if number % 3:
                assert not isinstance(frames, BaseException), frames
                assert text(frames) == expected_text(f"prompt {number}", 1 + number % 7)
        await until(lambda: "requests" not in known(cluster[REPLICA]), SOON_S, "all forgotten")
        await until(lambda: not link.requests, SOON_S, "the router, too")

    run(scenario, model(slots=64), waits={(channel, "IDLE_CLOSE_S"): 1.0}, loop=loop)


@loops
def test_serve_counts_one_call_for_as_long_as_the_channel_is_open(loop: Loop) -> None:
    """So a drain waits for it; the channel closes itself a while after its last request."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        requests = await running(link, cluster, 3)
        await until(lambda: list(cluster[REPLICA].calls.values()) == ["hold"], SOON_S, "one call")
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
        await until(lambda: known(cluster[REPLICA]) == {"connections": 1}, SOON_S, "no request is known")
        assert list(cluster[REPLICA].calls.values()) == ["hold"]
        assert await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed") < 1.0
        assert await until(lambda: not cluster[REPLICA].calls, SOON_S, "the call ended") < 1.0
        assert link.connection is None
        await answer(link, "again", 3)

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 0.2}, loop=loop)


@loops
def test_a_call_that_is_lost_breaks_the_channel_and_aborts_its_requests(loop: Loop) -> None:
    """A connection without its call would not hold up a drain."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        requests = await running(link, cluster, 3)
        await until(lambda: cluster[REPLICA].count("hold") == 1, SOON_S, "it is held")
        cluster[REPLICA].fail_calls("hold")
        assert await until(lambda: not cluster[REPLICA].work, SOON_S, "aborted") < 1.0
        assert await failures(requests) == {"EngineFailed"}
        assert text(await answer(link, "next", 3)) == expected_text("next", 3)
        assert [method for method, _ in handle.calls].count("open_wire") == 2

    run(scenario, loop=loop)


@loops
def test_a_request_longer_than_the_connection_takes_is_refused_and_the_others_go_on(loop: Loop) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, _ = opened(cluster)
        other = asyncio.create_task(answer(link, "b", 100))
        await until(lambda: cluster[REPLICA].work == 1, SOON_S, "it runs")
        with pytest.raises(BodyTooLarge):
            await answer(link, "x" * tcp.MAX_MESSAGE_BYTES, 3)
        assert text(await other) == expected_text("b", 100)
        assert cluster.submits == [REPLICA]

    limit = 2**20
    run(scenario, waits={(tcp, "MAX_MESSAGE_BYTES"): limit, (tcp_server, "MAX_MESSAGE_BYTES"): limit}, loop=loop)


@loops
def test_a_call_that_never_arrives_ends_with_the_channel(loop: Loop) -> None:
    """Serve without the fast path looks for a replica for ever, and one that has left is never found."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add(REPLICA)
        link, handle = opened(cluster)
        handle.turns = lambda method: 10**9 if method == "hold" else 1
        assert text(await answer(link, "a", 3)) == expected_text("a", 3)
        held = [task for task in asyncio.all_tasks() if task.get_name().startswith("hold")]
        assert len(held) == 1
        link.retire()
        await until(lambda: not known(cluster[REPLICA]), SOON_S, "the channel closed")
        await until(held[0].done, SOON_S, "the call is given up")

    run(scenario, loop=loop)
