"""A run over time: every request is counted once, in the step of its arrival, and a missed one has a reason."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autoscaling.simulator import (
    ClassPlan,
    NodePlan,
    Obstacle,
    RunSeries,
    ScalingPlan,
    ServeDelays,
    SimulatedRequest,
    Simulation,
    World,
    step_for,
)
from autoscaling.simulator.profiles import GB
from serve_app.core.limits import Limits
from serve_app.types import RequestClass
from tests.autoscaling.simulator.worlds import PROFILE, request, world

NORMAL = RequestClass.NORMAL
LEVEL = {NORMAL: ClassPlan(0.5)}
AT_ONCE = ServeDelays(upscale_s=0.0)


def series_of(plan: World, requests: Iterable[SimulatedRequest], step_s: float = 10.0) -> RunSeries:
    """The series of a run to the end of all requests."""
    series = RunSeries(step_s)
    simulation = Simulation(plan, requests, series.add)
    series.watch(simulation)
    simulation.run()
    return series


def test_each_request_is_counted_in_the_step_of_its_arrival() -> None:
    series = series_of(world(), [request(0.0), request(9.9), request(10.1), request(35.0)])
    assert {number: step.arrivals[NORMAL] for number, step in series.steps.items()} == {0: 2, 1: 1, 3: 1}
    assert series.steps[3].quantile(NORMAL, 0.5) == pytest.approx(0.03, abs=0.03)
    assert series.steps[3].quantile(RequestClass.HIGH, 0.5) is None


def test_each_step_has_looks_at_the_replicas() -> None:
    load = [request(0.1 * number, output=200) for number in range(40)]
    scaling = ScalingPlan(1, 3, target_ongoing=4.0, delays=AT_ONCE)
    series = series_of(world(scaling), [*load, request(60.0)], step_s=5.0)
    steps = list(series.looks_by_step("m"))
    assert len(steps) == series.count == 13
    assert all(len(looks) == 1 for looks in steps)
    assert steps[0][0].running == 1
    assert max(looks[0].running for looks in steps) == 3
    assert max(looks[0].placed for looks in steps) == 3
    assert max(looks[0].waiting for looks in steps) > 0


def burst(count: int = 40) -> list[SimulatedRequest]:
    """More requests than a replica has slots, all within a second, then a late one."""
    return [*(request(0.02 * number, output=200) for number in range(count)), request(60.0)]


@pytest.mark.parametrize(
    ("why", "scaling", "nodes"),
    [
        (Obstacle.MAX_REPLICAS, ScalingPlan(1, 1), None),
        (Obstacle.DECISION, ScalingPlan(1, 4, target_ongoing=1000.0), None),
        (Obstacle.GPUS, ScalingPlan(1, 4, target_ongoing=4.0, delays=AT_ONCE), NodePlan(1, GB)),
        (Obstacle.STARTS, ScalingPlan(1, 4, target_ongoing=4.0, delays=AT_ONCE), None),
    ],
)
def test_a_request_that_waited_too_long_has_met_what_its_model_lacked(
    why: Obstacle, scaling: ScalingPlan, nodes: NodePlan | None
) -> None:
    plan = world(scaling, classes=LEVEL, **({} if nodes is None else {"nodes": nodes}))
    found = series_of(plan, burst()).obstacles(NORMAL)
    assert found.most_common(1)[0][0] == (why, "m")
    assert 30 <= found.total() <= 40


def test_a_request_that_waited_has_met_the_bound_of_all_models_together() -> None:
    plan = world(ScalingPlan(1, 4, target_ongoing=4.0, delays=AT_ONCE), classes=LEVEL, max_gpus=1.0)
    assert series_of(plan, burst()).obstacles(NORMAL).most_common(1)[0][0] == (Obstacle.MAX_GPUS, "m")


def test_a_long_prompt_has_met_the_engine_and_a_limited_tenant_its_limits() -> None:
    long_one = request(0.0, prompt=4_000)
    slow = series_of(world(classes={NORMAL: ClassPlan(0.03)}), [long_one])
    assert slow.obstacles(NORMAL) == {(Obstacle.ENGINE, "m"): 1}
    limited = world(classes=LEVEL, limits={"t": Limits(max_concurrent=1)})
    refused = series_of(limited, [request(0.0), request(0.5)])
    assert refused.obstacles(NORMAL) == {(Obstacle.LIMITS, "m"): 1}
    assert refused.obstacles(RequestClass.HIGH) == {}


def test_a_request_no_system_could_serve_is_no_arrival() -> None:
    series = series_of(world(), [request(0.0), request(1.0, prompt=PROFILE.kv_tokens)])
    assert series.steps[0].arrivals[NORMAL] == 1


@pytest.mark.parametrize(("span_s", "step_s"), [(60.0, 5.0), (3600.0, 30.0), (86_400.0, 900.0), (1e9, 86_400.0)])
def test_a_long_load_has_long_steps(span_s: float, step_s: float) -> None:
    assert step_for(span_s) == step_s
