"""A replica that takes requests and answers none: its requests go on elsewhere, and it gets no others for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.core.body_bounds import LARGE_TEXT_CHARS
from serve_app.core.routing import silence
from serve_app.transport import channel
from tests.fakes.engines import FakeCluster, model, run, until
from tests.fakes.router import SOON_S, Router

FLOOR_S = 0.3
TOKENS = 500  # half a second
QUICK = {
    (silence, "SILENCE_FLOOR_S"): FLOOR_S,
    (channel, "SILENCE_FLOOR_S"): FLOOR_S,
    (channel, "SILENCE_CHECK_S"): 0.05,
}


async def with_history(cluster: FakeCluster, *replicas: str) -> Router:
    await cluster.add(*replicas)
    router = await Router(cluster).start()
    await asyncio.gather(*(router.ask(2) for _ in range(4 * silence.MIN_FRAMES)))
    return router


def test_requests_on_a_replica_that_answers_none_run_elsewhere_and_it_is_ejected() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await with_history(cluster, "r1", "r2")
        cluster["r1"].freeze()
        asked = [router.asking(3) for _ in range(6)]
        await until(lambda: all(one.done() for one in asked), SOON_S, "all are answered")
        await asyncio.gather(*asked)
        assert cluster.submits[-1] == "r2"
        assert router.model.replica_set.ejections["lost"] == 1
        cluster["r1"].thaw()

    run(scenario, model(slots=32), waits=QUICK)


@pytest.mark.parametrize("more", [{}, {"batching": {"max_size": 4, "max_wait_s": 0.01}}], ids=["only one", "batches"])
def test_a_silent_replica_is_waited_for_where_giving_it_up_gains_nothing(more: dict[str, Any]) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await with_history(cluster, *(["r1", "r2"] if more else ["r1"]))
        for replica in cluster.replicas.values():
            replica.freeze()
        before = len(cluster.submits)
        asked = [router.asking(3) for _ in range(4)]
        await until(lambda: len(cluster.submits) == before + 4, SOON_S, "they are there")
        await asyncio.sleep(3 * silence.SILENCE_FLOOR_S)  # in which it would be given up
        assert not sum(router.model.replica_set.ejections.values())
        for replica in cluster.replicas.values():
            replica.thaw()
        await asyncio.gather(*asked)

    run(scenario, model(slots=32, **more), waits=QUICK)


def test_a_replica_that_reads_a_large_request_is_not_silent() -> None:
    """Its helper process reads one at a time, and starts with the first of them."""

    async def scenario(cluster: FakeCluster) -> None:
        router = await with_history(cluster, "r1", "r2")
        for replica in cluster.replicas.values():
            replica.freeze()
        before = len(cluster.submits)
        asked = [router.asking(3, padding="x" * LARGE_TEXT_CHARS) for _ in range(4)]
        await until(lambda: len(cluster.submits) == before + 4, SOON_S, "they are there")
        await asyncio.sleep(3 * silence.SILENCE_FLOOR_S)  # in which it would be given up
        assert len(cluster.submits) == before + 4
        assert not sum(router.model.replica_set.ejections.values())
        for replica in cluster.replicas.values():
            replica.thaw()
        await asyncio.gather(*asked)

    run(scenario, model(slots=32), waits=QUICK)


async def in_the_middle(cluster: FakeCluster) -> tuple[Router, asyncio.Task[Any]]:
    """The first stream of all, which has begun on `r1`; no replica has a history."""
    await cluster.add("r1")
    router = await Router(cluster).start()
    asked = router.asking(TOKENS)
    await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
    await cluster.add("r2")
    return router, asked


def test_a_stream_in_its_middle_goes_on_elsewhere_once_the_process_of_its_replica_stands_still() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, asked = await in_the_middle(cluster)
        cluster["r1"].stand_still()
        await until(asked.done, SOON_S, "it is answered")
        await asked
        assert cluster.submits == ["r1", "r2"]
        assert router.model.replica_set.ejections["lost"] == 1
        cluster.kill("r1")

    run(scenario, model(slots=32), waits=QUICK)


def test_a_stream_without_a_frame_for_long_stays_while_the_process_of_its_replica_answers() -> None:
    """A parser may keep what is no event yet, and a frozen engine is its own replica's to find."""

    async def scenario(cluster: FakeCluster) -> None:
        router, asked = await in_the_middle(cluster)
        cluster["r1"].freeze()
        await asyncio.sleep(10 * FLOOR_S)  # in which it would be given up
        assert not sum(router.model.replica_set.ejections.values())
        cluster["r1"].thaw()
        await asked
        assert cluster.submits == ["r1"]

    run(scenario, model(slots=32), waits=QUICK)


def test_a_replica_that_drains_is_not_asked_and_keeps_its_stream() -> None:
    """Serve takes no call for it any more; how long it may take is its drain's."""

    async def scenario(cluster: FakeCluster) -> None:
        router, asked = await in_the_middle(cluster)
        cluster["r1"].freeze()
        cluster.remove("r1")
        await asyncio.sleep(5 * FLOOR_S)  # in which it would be given up
        assert not sum(router.model.replica_set.ejections.values())
        cluster["r1"].thaw()
        await asked
        assert cluster.submits == ["r1"]

    run(scenario, model(slots=32), waits=QUICK)


def test_replicas_whose_processes_stand_still_together_keep_their_requests() -> None:
    """As those of a host that swaps: none of them could take the other's."""

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        asked = [router.asking(TOKENS) for _ in range(2)]
        await until(lambda: len(router.relayed) == 2, SOON_S, "they run")
        assert sorted(cluster.submits) == ["r1", "r2"]
        for name in ("r1", "r2"):
            cluster[name].stand_still()
        await asyncio.sleep(6 * FLOOR_S)  # in which one alone would be given up
        for name in ("r1", "r2"):
            cluster[name].thaw()
        await asyncio.gather(*asked)
        assert len(cluster.submits) == 2
        assert not sum(router.model.replica_set.ejections.values())

    run(scenario, model(slots=32), waits=QUICK)


def test_a_process_that_stands_still_is_given_up_though_its_clients_come_and_go() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, asked = await in_the_middle(cluster)
        cluster["r1"].stand_still()
        await asyncio.sleep(1.2 * FLOOR_S)  # it has been asked
        asked.cancel()
        later = [router.asking(3) for _ in range(4)]
        await until(lambda: all(one.done() for one in later), SOON_S, "others are answered")
        await asyncio.gather(*later)
        cluster.kill("r1")

    run(scenario, model(slots=32), waits=QUICK)


def test_a_process_that_goes_on_before_its_time_is_over_keeps_its_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router, asked = await in_the_middle(cluster)
        cluster["r1"].stand_still()
        await asyncio.sleep(1.5 * FLOOR_S)  # it has been asked
        cluster["r1"].thaw()
        await asked
        assert cluster.submits == ["r1"]
        assert not sum(router.model.replica_set.ejections.values())

    run(scenario, model(slots=32), waits=QUICK)
