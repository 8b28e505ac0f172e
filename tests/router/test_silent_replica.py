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

QUICK = {(silence, "SILENCE_FLOOR_S"): 0.3, (channel, "SILENCE_CHECK_S"): 0.05}


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
