"""The cost of traces: it measures each way in each round, and its collector gets what was sampled."""

from __future__ import annotations

import pytest
import uvloop

from benchmarks import trace_cost
from tests.fakes.engines import FakeCluster, model, run

REQUESTS = 20
ROUNDS = 2
SPANS = 4  # of an answered request


@pytest.mark.long
def test_each_way_is_measured_in_each_round_and_sampled_spans_arrive() -> None:
    with trace_cost.collector() as (url, connection):

        async def scenario(cluster: FakeCluster) -> tuple[dict[float | None, list[float]], int]:
            return await trace_cost.measure(cluster, url, REQUESTS, ROUNDS)

        found, dropped = run(scenario, model(slots=trace_cost.SLOTS), loop=uvloop.new_event_loop)
        connection.send(None)
        spans = connection.recv() if connection.poll(trace_cost.START_S) else 0
    assert found.keys() == {None, *trace_cost.RATIOS}
    assert all(len(rounds) == ROUNDS and min(rounds) > 0 for rounds in found.values())
    assert dropped == 0
    assert SPANS * REQUESTS * ROUNDS <= spans <= SPANS * REQUESTS * ROUNDS * 2


def test_a_ratio_is_of_rounds_that_were_measured_beside_each_other() -> None:
    off = [100.0, 200.0, 100.0]
    found = {None: off, 0.01: off, 1.0: [110.0, 240.0, 130.0]}
    result = trace_cost.ratios(found)
    assert result["0.01"] == {"cpu_ratio": 1.0, "interval": [1.0, 1.0], "added_us": 0.0}
    assert result["1"] == {"cpu_ratio": 1.2, "interval": [1.1, 1.3], "added_us": 30.0}
