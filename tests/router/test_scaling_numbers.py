"""What routers and engines tell Serve for scaling, the settings of it, and what becomes of a start in the router."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from serve_app.errors import ConfigError, Unavailable
from serve_app.names import KV_USE, ONGOING, SLOT_USE, SLOTS, START_S
from serve_app.settings import AutoscaleSettings, parse
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, Router

FROM_ZERO = AutoscaleSettings(min_replicas=0, max_replicas=2)


def test_an_engine_tells_its_requests() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        engine = cluster["r1"].engine
        reported = await engine.record_autoscaling_stats()
        info = engine.engine_info
        assert reported == {ONGOING: 0, SLOTS: info.slots, START_S: info.start_s, KV_USE: 0.0, SLOT_USE: 0.0}
        routers = [await Router(cluster, name, routers=2).start() for name in ("a", "b")]
        asked = [router.asking(LONG) for router in routers for _ in range(2)]
        await until(lambda: cluster["r1"].work == 4, SOON_S, "two of each run")
        reported = await engine.record_autoscaling_stats()
        assert (reported[ONGOING], reported[SLOT_USE]) == (4, 4 / info.slots)
        assert 0.0 < reported[KV_USE] <= 1.0
        for request in asked:
            request.cancel()
        await asyncio.wait(asked)
        await until(lambda: not cluster["r1"].work, SOON_S, "they are aborted")
        assert (await engine.record_autoscaling_stats())[ONGOING] == 0

    run(scenario)


def test_a_router_counts_each_request_once_from_its_arrival_to_its_end() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        counts: set[int] = set()

        async def look() -> None:
            counts.add(router.model.waiting + router.model.queue.granted)

        asked = [router.asking(50, then=look) for _ in range(9)]
        await until(lambda: router.model.waiting == 5, SOON_S, "four run, five wait")
        assert router.model.queue.granted == 4
        await asyncio.gather(*asked)
        assert counts <= set(range(1, 10))
        assert max(counts) == 9
        await router.settled()
        assert (router.model.waiting, router.model.queue.granted) == (0, 0)

    run(scenario)


@pytest.mark.parametrize(("count_batch_rows", "rows"), [(False, 3), (True, 0)])
def test_a_router_tells_its_rows_of_batches_apart_unless_they_count(count_batch_rows: bool, rows: int) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        asked = [router.asking(LONG, is_row=number < 3) for number in range(6)]
        await until(lambda: router.model.waiting + router.model.queue.granted == 6, SOON_S, "all have arrived")
        assert (router.model.active[False], router.model.active[True]) == (rows, 6 - rows)
        for request in asked:
            request.cancel()
        await asyncio.wait(asked)
        assert not router.model.active.total()

    run(scenario, model(replicas=AutoscaleSettings(count_batch_rows=count_batch_rows)))


def test_an_engine_tells_how_long_its_start_took_and_a_refusal_at_zero_says_so() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        cluster["r1"].engine.engine_info = type(info := cluster["r1"].engine.engine_info)(  # a start that took minutes
            info.model, info.tasks, info.max_model_len, info.slots, 0, 0, start_s=240.0
        )
        router = await Router(cluster, no_replica_wait_s=0.2).start()
        await until(lambda: router.model.replica_set.info is not None, SOON_S, "the engine has told")
        cluster.remove("r1")
        refusal = router.asking()
        await turns(5)
        assert router.model.waiting == 1
        assert 239.0 < router.model.queue.expected_start_s() <= 240.0  # counted from when somebody needed it
        with pytest.raises(Unavailable) as refused:
            await asyncio.wait_for(refusal, SOON_S)
        assert refused.value.code == "no_replica"
        assert refused.value.retry_after_s == pytest.approx(240.0, abs=SOON_S)

    run(scenario, model(replicas=FROM_ZERO))


def test_a_start_that_outlasts_its_requests_is_the_operators_to_know_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        router = await Router(cluster, no_replica_wait_s=0.02).start()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(router.ask(), SOON_S)
        await cluster.add("r1")
        await until(lambda: router.model.ready, SOON_S, "a replica runs")
        await cluster.add("r2")
        await router.ask()
        await router.settled()

    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        run(scenario, model(replicas=FROM_ZERO))
    reported = [record.getMessage() for record in caplog.records if "no_replica_wait_s" in record.getMessage()]
    assert len(reported) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": [{"name": "m", "replicas": {"look_back_s": 1.0, "metrics_interval_s": 1.0}}]}, "look_back_s"),
        ({"models": [{"name": "m", "replicas": {"downscale_to_zero_delay_s": -1}}]}, "downscale_to_zero_delay_s"),
        ({"models": [{"name": "m", "replicas": {"min_replicas": 0}}], "admission": {"max_queued": 0}}, "max_queued"),
    ],
)
def test_scaling_that_could_not_work_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(changes)


def test_the_shipped_example_of_scaling() -> None:
    """Twenty requests a replica, 2 to 8 replicas, 30 s up, 120 s down."""
    scale = AutoscaleSettings(min_replicas=2, max_replicas=8)
    assert scale.autoscaled
    assert (scale.target_ongoing_requests, scale.upscale_delay_s, scale.downscale_delay_s) == (20.0, 30.0, 120.0)
    assert scale.look_back_s > scale.metrics_interval_s
