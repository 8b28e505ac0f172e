"""Streams that are cut and requests that are stopped, on one vLLM engine beside a router and the quota actor in one
process: `python -m tests.e2e.continuations` prints both as JSON."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from serve_app.http import engine_calls
from serve_app.settings.settings import BUILT_IN_MODEL
from tests.e2e import one_engine
from tests.e2e.continued_streams import CREATED, cut_streams
from tests.e2e.ended_core import end_core
from tests.e2e.stopped_requests import ENGINE_S, REPLICA, SLOTS, stop_requests
from tests.fakes.asgi_client import started
from tests.fakes.engines import MODEL, FakeCluster, run, until


@functools.cache
def found() -> dict[str, Any]:
    """What such a process has printed."""
    return one_engine.run_module("tests.e2e.continuations")


async def scenario(cluster: FakeCluster) -> None:
    client = await started(cluster, REPLICA)
    await until(lambda: client.model.replica_set.info is not None, ENGINE_S, "the engine's limits")
    info = client.model.replica_set.info
    assert info is not None
    cut = await cut_streams(cluster[REPLICA].engine.backend)
    stopped = await stop_requests(client)
    ended = await end_core(cluster[REPLICA].engine.backend)  # the last: no engine is left
    print(json.dumps({"continues": info.continues, "cut": cut, "ended": ended} | stopped), flush=True)


def main() -> None:
    settings = BUILT_IN_MODEL.model_copy(update={"name": MODEL, "enforce_eager": True, "max_num_seqs": SLOTS})
    clock = SimpleNamespace(time=lambda: CREATED, monotonic=time.monotonic)
    with mock.patch.object(engine_calls, "time", clock):
        run(scenario, settings, loop=asyncio.new_event_loop, bound_s=ENGINE_S)


if __name__ == "__main__":
    main()
