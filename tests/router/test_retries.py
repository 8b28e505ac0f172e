"""A request survives the loss of its replica: it starts again, or is continued, and no part comes twice."""

from __future__ import annotations

import asyncio
import time

import pytest

from serve_app.core.queue.admission import Arrival
from serve_app.core.routing import outliers
from serve_app.errors import EngineFailed, EngineUnreachable
from serve_app.router import runs
from serve_app.transport import channel
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, NORMAL, SOON_S, Router, Uses, freeze, held, thaw


@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize("loss", ["kill", "break_channels"])
def test_requests_without_a_first_frame_run_elsewhere_when_their_replica_is_lost(loss: str, reported: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        freeze(cluster, "r1", "r2")
        requests = [router.asking() for _ in range(8)]
        await until(lambda: cluster["r1"].work == cluster["r2"].work == 4, SOON_S, "four on each")
        if loss == "kill":
            cluster.kill("r1", reported=reported)
        else:
            cluster.break_channels("r1")
        thaw(cluster, "r1", "r2")
        await asyncio.gather(*requests)
        assert sorted(router.relayed) == [f"{n}" for n in range(1, 9)]  # nobody was answered twice
        assert len(cluster.submits) == 12
        await router.settled()
        if loss == "kill" and reported:
            assert set(router.used) == {"r2"}

    run(scenario)


def test_a_loss_after_the_first_frame_is_the_clients_if_no_engine_can_continue_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()

        async def lose() -> None:
            router.model.replica_set.info = None
            cluster.kill(router.places["1"])

        with pytest.raises(EngineFailed, match=r"failed|broke"):
            await router.ask(LONG, then=lose)
        assert (router.relayed, len(cluster.submits)) == (["1"], 1)
        await router.settled()

    run(scenario)


def test_streams_that_lose_their_replica_continue_elsewhere_and_each_token_is_counted_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        used = Uses(router)
        requests = [router.asking(300) for _ in range(6)]
        await until(lambda: len(router.relayed) == 6, SOON_S, "all run")
        cluster.kill("r1")
        await asyncio.gather(*requests)  # `ask` compares the whole text
        assert len(cluster.submits) == 9
        await router.settled()
        assert used.output_tokens == 6 * 300

    run(scenario, model(slots=8))


def test_a_stream_that_lost_its_replica_waits_ahead_of_what_has_arrived_since() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        stream = router.asking(200)
        await until(lambda: router.relayed == ["1"], SOON_S, "it runs")
        await cluster.add("r2")
        async with held(router, Arrival("holder", NORMAL, "tenant", slots=4, affinity="r2")):
            later = router.asking(slots=4)
            await until(lambda: router.waiting == 1, SOON_S, "a later request waits")
            cluster.kill("r1")
            await until(lambda: router.waiting == 2, SOON_S, "the stream waits, too")
        await asyncio.gather(stream, later)
        assert router.relayed == ["1", "1", "2"]
        await router.settled()

    run(scenario)


def test_a_request_gives_up_when_nobody_may_wait_longer_and_gives_its_slot_back() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_wait_s=0.2).start()
        await cluster.stop_engines()  # the engine is dead, its replica is not
        with pytest.raises(EngineFailed, match="is ending"):
            await router.ask()
        assert len(router.handle.calls) > runs.MAX_LOSSES  # an engine that never had the request does not count
        assert router.relayed == []
        await router.settled()

    run(scenario, waits={(outliers, "FIRST_EJECTION_S"): 0.02})


def test_a_request_on_a_replica_that_is_frozen_for_longer_than_anyone_waits_runs_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_wait_s=0.1).start()
        freeze(cluster, "r1")
        request = router.asking()
        await until(lambda: cluster["r1"].work == 1, SOON_S, "handed in")
        await cluster.add("r2")
        await asyncio.sleep(0.2)  # twice what it may wait
        cluster.kill("r1")
        await asyncio.wait_for(request, SOON_S)
        assert cluster.submits == ["r1", "r2"]
        await router.settled()

    run(scenario)


def test_the_time_to_reach_an_engine_counts_from_the_grant_however_long_the_queue_was() -> None:
    """The slots are taken for most of what a request may wait, then its first engine is out of reach for as long."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_wait_s=1.0).start()
        async with held(router, Arrival("holder", NORMAL, "tenant", slots=4)):
            request = router.asking()
            await until(lambda: router.waiting == 1, SOON_S, "it waits")
            await asyncio.sleep(0.8)  # most of what it may wait
            await cluster.stop_engines()
        await asyncio.sleep(0.6)  # with it, more than that
        assert not request.done()
        await cluster.add("r2")
        await asyncio.wait_for(request, SOON_S)
        await router.settled()

    run(scenario)


def test_a_replica_that_failed_is_used_again_after_a_while() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        await router.ask()
        freeze(cluster, "r1")
        request = router.asking()
        await until(lambda: cluster["r1"].work == 1, SOON_S, "it runs")
        cluster.break_channels("r1")
        await until(lambda: router.waiting == 1, SOON_S, "it waits again")
        thaw(cluster, "r1")
        started = time.monotonic()
        await request
        assert time.monotonic() - started > 0.5 * outliers.FIRST_EJECTION_S
        assert cluster.submits == ["r1"] * 3

    run(scenario)


def test_a_replica_that_never_answers_costs_the_attach_timeout_and_no_more() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        cluster["r1"].mute = True
        router = await Router(cluster).start()
        await asyncio.gather(*(router.ask() for _ in range(8)))
        assert set(router.places.values()) == {"r2"}
        assert cluster.submits == ["r2"] * 8
        cluster.remove("r1")
        await turns(10)
        await router.settled()
        assert set(router.used) == {"r2"}

    run(scenario, waits={(outliers, "FIRST_EJECTION_S"): 60.0, (channel, "CHANNEL_ATTACH_S"): 0.2})


@pytest.mark.parametrize("first", ["leaves", "granted"])
def test_a_replica_that_leaves_in_the_turn_of_a_grant_does_not_hold_the_request(first: str) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        async with held(router, Arrival("holder", NORMAL, "tenant", slots=4)):
            request = router.asking()
            await turns(10)
            assert router.waiting == 1
            if first == "leaves":
                cluster.remove("r1")  # the router hears of it in the next turn, before the request hears of its grant
        if first == "granted":
            cluster.remove("r1")
        await turns(10)
        assert not request.done()
        await cluster.add("r2")
        await asyncio.wait_for(request, SOON_S)
        assert router.places == {"1": "r2"}
        await router.settled()
        assert set(router.used) == {"r2"}

    run(scenario, waits={(channel, "CHANNEL_ATTACH_S"): 60.0})


def test_nothing_is_remembered_of_a_replica_that_left_and_died() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        seen = router.asking(LONG)
        await until(lambda: router.relayed == ["1"], SOON_S, "one is seen by its client")
        freeze(cluster, "r1")
        unseen = router.asking()
        await until(lambda: cluster["r1"].work == 2, SOON_S, "the other one is not")
        await cluster.add("r2")
        cluster.remove("r1")
        await turns(5)
        cluster.kill("r1")
        await until(lambda: router.places == {"1": "r2", "2": "r2"}, SOON_S, "both run elsewhere")
        seen.cancel()
        await asyncio.wait({seen})
        await unseen
        assert set(router.used) == {"r2"}

    run(scenario)


def test_requests_on_a_replica_that_leaves_finish_and_new_ones_go_elsewhere() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = [router.asking(300) for _ in range(4)]
        await until(lambda: len(router.relayed) == 4, SOON_S, "all run")
        cluster.remove("r1")
        await cluster.add("r2")
        await router.ask()
        assert router.places["5"] == "r2"
        assert router.used["r1"] == 4
        await asyncio.gather(*running)
        assert await until(lambda: not cluster["r1"].calls, SOON_S, "r1 drained") < 1.0
        assert router.used == {"r2": 0}

    run(scenario, waits={(channel, "IDLE_CLOSE_S"): 0.5})


def test_a_replica_that_returns_keeps_its_channel_open_between_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = router.asking(300)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        cluster.remove("r1")
        await turns(5)
        await cluster.add("r1")
        await running
        for _ in range(3):
            await router.ask()
        assert [method for method, _ in router.handle.calls].count("open_wire") == 1

    run(scenario)


def test_a_replica_that_leaves_while_it_is_asked_is_no_error_of_the_scrape() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()

        async def left(method: str, replica_id: str) -> None:
            raise EngineUnreachable(f"{replica_id} has left")

        router.model.replica_set.call = left  # type: ignore[method-assign]
        assert await router.model.replica_set.fetch_load("r1") is None
        await router.settled()

    run(scenario)
