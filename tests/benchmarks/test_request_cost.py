"""The cost of a request is measured on both loads."""

from __future__ import annotations

import uvloop

from benchmarks import request_cost
from tests.fakes.engines import FakeCluster, model, run


def test_each_load_has_a_cost_in_every_round() -> None:
    async def scenario(cluster: FakeCluster) -> dict[str, list[float]]:
        return await request_cost.measure(cluster, requests=20)

    found = run(scenario, model(slots=request_cost.SLOTS), loop=uvloop.new_event_loop)
    assert found.keys() == request_cost.LOADS.keys()
    assert all(len(rounds) == request_cost.ROUNDS and min(rounds) > 0 for rounds in found.values())
