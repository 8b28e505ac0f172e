"""A request that has begun is ended by nothing that would have refused a new one, and an engine's limits are asked for
until one has told them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from serve_app.core.queue import Preempt
from serve_app.router import replicas
from serve_app.transport import channel
from tests.fakes.engines import FakeCluster, run, turns, until
from tests.fakes.router import SOON_S, Router, freeze, thaw


def test_a_deadline_that_was_met_does_not_refuse_a_request_whose_engine_dies_later() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        router = await Router(cluster).start()
        freeze(cluster, "r1", "r2")
        asked = router.asking(deadline=time.monotonic() + 0.3)
        await until(lambda: cluster["r1"].work + cluster["r2"].work == 1, SOON_S, "it runs")
        await asyncio.sleep(0.4)  # its deadline passes; granted in time, it has no first frame yet
        dead, other = ("r1", "r2") if cluster["r1"].work else ("r2", "r1")
        cluster.kill(dead)
        thaw(cluster, other)
        await asked

    run(scenario)


def test_a_router_that_no_engine_answered_at_its_start_continues_streams_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas, "ANSWER_TIMEOUT_S", 0.1)

    async def never(replica_id: str) -> Any:
        await asyncio.Event().wait()

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1", "r2")
        engines = [cluster[name].engine for name in ("r1", "r2")]
        answers = [engine.info for engine in engines]
        for engine in engines:
            engine.info = never  # type: ignore[method-assign,assignment]
        router = await Router(cluster).start()
        await asyncio.sleep(0.3)  # until that has failed
        for engine, answer in zip(engines, answers, strict=True):
            engine.info = answer  # type: ignore[method-assign]
        await router.ask(5)
        await until(lambda: router.model.replica_set.info is not None, SOON_S, "its limits are known")
        asked = router.asking(600, preemptible=True)
        await until(lambda: len(router.relayed) == 2, SOON_S, "it runs")
        cluster.kill(router.places["2"])
        await asked

    run(scenario)


def test_a_model_that_is_taken_out_lets_its_streams_finish_whatever_is_to_stop_for_others() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        asked = router.asking(600, preemptible=True)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        closing = asyncio.create_task(router.model.close())
        await turns(1)  # so that it has begun
        router.client.apply_actions([Preempt("1", "r1")])
        await asked
        await closing

    run(scenario)


def test_a_stopped_request_is_not_tried_for_ever_at_a_replica_that_nobody_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "CHANNEL_ATTACH_S", 0.1)

    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster, max_wait_s=0.5).start()
        asked = router.asking(600, preemptible=True)
        await until(lambda: len(router.relayed) == 1, SOON_S, "it runs")
        router.client.apply_actions([Preempt("1", "r1")])
        cluster["r1"].mute = True
        await until(lambda: router.traces["1"].preempted == 1, SOON_S, "stopped")
        cluster.break_channels("r1")
        cluster["r1"].cut_connections()
        done, _ = await asyncio.wait({asked}, timeout=SOON_S)
        cluster["r1"].mute = False
        asked.cancel()
        await asyncio.wait({asked})
        assert done
        assert asked.exception() is not None

    run(scenario)
