"""The end of a worker is bounded, and no process around it cuts it earlier."""

from __future__ import annotations

import asyncio

from ray.serve._private.build_app import build_app

from serve_app.app import build
from serve_app.batch.deployment import WORKER_END_S
from serve_app.cluster.local.remote_driver import SERVE_SHUTDOWN_S
from serve_app.core.times import DRAIN_POLL_S
from serve_app.names import BATCH_WORKER
from tests.batch.lane import Lane
from tests.fakes.virtual_time import run_in_virtual_time, time_passes


def test_serve_waits_for_the_end_of_a_worker_and_down_for_serve() -> None:
    application = build({"models": [{"name": "tiny"}], "auth": {"keys": [{"key": "sk-0123456789abcdef"}]}})
    built = build_app(application, name="serve_app")
    [worker] = [one for one in built.deployments if one.name == BATCH_WORKER]
    bound_s = worker._deployment_config.graceful_shutdown_timeout_s
    assert DRAIN_POLL_S + WORKER_END_S <= bound_s < SERVE_SHUTDOWN_S


def test_a_worker_ends_within_its_bound_though_its_rows_run_on_and_the_store_is_away() -> None:
    async def play() -> None:
        lane = Lane({"small": 4})
        lane.submit([{"seconds": 3.0}] * 4 + [{"seconds": 1000.0}] * 4)
        worker, store = lane.workers[lane.start()]
        await time_passes(4.0)
        assert worker.feed.in_flight == 4
        store.is_away = True
        began = asyncio.get_running_loop().time()
        await worker.close()
        assert asyncio.get_running_loop().time() - began < WORKER_END_S - 1.0
        lane.workers.clear()
        await lane.end()

    run_in_virtual_time(play(), bound_s=1e6)
