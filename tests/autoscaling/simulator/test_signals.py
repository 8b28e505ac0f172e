"""The signals of the simulator against a count of its state."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoscaling.simulator import ScalingPlan, Simulation
from autoscaling.simulator.replica import ReplicaState
from autoscaling.simulator.world import ClassPlan
from serve_app.types import RequestClass
from tests.autoscaling.simulator.worlds import MODEL, request, world

CLASSES = (RequestClass.LOW, RequestClass.NORMAL, RequestClass.HIGH)
LEVELS = {level: ClassPlan(ttft_slo_s=2.0 * (level + 1)) for level in CLASSES}
SCALING = ScalingPlan(1, 4, target_ongoing=4.0)


def at(second: float) -> Simulation:
    """Ten requests a second of three classes, some rows among them, for two replicas' worth of slots."""
    load = [
        request(0.1 * number, 30 + number % 50, CLASSES[number % 3], is_row=number % 7 == 0) for number in range(300)
    ]
    simulation = Simulation(world(SCALING, classes=LEVELS), load, lambda end: None)
    simulation.run_for(second)
    scaling = simulation.scalings[0]
    for place in range(len(scaling.routers)):  # as if all reported in this moment
        scaling.report_router(place)
    scaling.report_engines()
    return simulation


@pytest.mark.parametrize("second", [3.0, 9.0, 17.0, 29.0])
def test_signals_have_what_a_count_of_all_requests_and_replicas_has(second: float) -> None:
    simulation = at(second)
    scaling = simulation.scalings[0]
    now = simulation.clock.now
    found = scaling.signals()
    queues = [router.queue for router in scaling.routers]
    waiting = [one for queue in queues for one in queue.pending.by_request_id.values()]
    running = [run for queue in queues for run in queue.in_flight.running.values()]
    assert found.waiting == len(waiting) == sum(one.waiting for one in found.classes)
    assert found.granted == len(running) == sum(one.granted for one in found.classes)
    assert found.waiting_tokens == sum(one.arrival.cost for one in waiting)
    names = [one.request_class for one in found.classes]
    assert names == [level.label for level in reversed(CLASSES) if level.label in names]
    for counts in found.classes:
        level = next(level for level in CLASSES if level.label == counts.request_class)
        waits = [now - each.arrived_s for each in waiting if each.arrival.request_class is level]
        assert counts.waiting == len(waits)
        assert counts.granted == sum(run.arrival.request_class is level for run in running)
        assert counts.oldest_wait_s == pytest.approx(max(waits, default=0.0))
        assert 0.0 <= counts.in_time <= counts.waiting
    assert found.in_time == pytest.approx(sum(one.in_time for one in found.classes))
    replicas = list(simulation.fleet.replicas.values())
    ready = [one for one in replicas if one.state is ReplicaState.RUNNING]
    assert found.kv_use == pytest.approx(
        math.fsum(one.batch.kv_used / one.plan.profile.kv_tokens for one in ready) / len(ready)
    )
    assert found.slot_use == pytest.approx(
        math.fsum(len(one.batch.running) / one.plan.profile.slots for one in ready) / len(ready)
    )
    starting = [now - one.placed_s for one in replicas if one.state in (ReplicaState.WAITING, ReplicaState.STARTING)]
    assert found.starting_s == max(starting, default=0.0)
    assert found.room == 8 - len([one for one in replicas if one.place is not None])


def test_an_overload_has_waits_forecasts_and_starts() -> None:
    found = at(9.0).scalings[0].signals()
    assert found.oldest_wait_s > 1.0
    assert any(one.forecast_s is not None for one in found.classes if one.waiting)
    assert found.served_tokens_s > 0.0
    assert found.kv_use > 0.0
    assert found.slot_use == 1.0


def test_arrived_tokens_are_those_of_requests_without_rows() -> None:
    simulation = at(20.0)
    for router in simulation.scalings[0].routers:
        assert router.flows[MODEL].arrived > 0
    load = [replace(request(0.1 * number), is_row=True) for number in range(100)]
    rows = Simulation(world(SCALING), load, lambda end: None)
    rows.run_for(15.0)
    flows = [router.flows[MODEL] for router in rows.scalings[0].routers]
    assert [(flow.arrived, flow.served) for flow in flows] == [(0, 0), (0, 0)]


def test_rates_end_with_the_load() -> None:
    simulation = at(9.0)
    simulation.run()
    simulation.run_for(120.0)
    found = simulation.scalings[0].signals()
    assert (found.arrived_tokens_s, found.served_tokens_s, found.classes, found.waiting_tokens) == (0.0, 0.0, (), 0.0)
