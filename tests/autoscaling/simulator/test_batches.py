"""Rows of batches in the simulator: each is answered once, tenants share, and rows are no load for scaling."""

from __future__ import annotations

from dataclasses import replace

from autoscaling.simulator import BatchPlan, RequestEnd, ScalingPlan
from autoscaling.simulator.world import ReplicaDeath
from serve_app.types import Outcome, RequestClass
from tests.autoscaling.simulator.worlds import MODEL, PROFILE, request, simulated, world

ROW = (20, 50)


def plans(rows: int, *tenants: str) -> tuple[BatchPlan, ...]:
    return tuple(BatchPlan(f"b-{tenant}", 0.0, tenant, MODEL, [ROW] * rows) for tenant in tenants)


def test_every_row_ends_once_though_a_replica_dies() -> None:
    simulation, ends = simulated(world(batches=plans(40, "t"), faults=(ReplicaDeath(3.0, MODEL),)), [])
    assert [batch.ended for batch in simulation.batches.batches] == [40]
    assert [end.outcome for end in ends].count(Outcome.OK) == 40
    assert {end.request_class for end in ends} == {RequestClass.LOW}


def test_tenants_share_what_is_free() -> None:
    simulation, ends = simulated(world(batches=plans(40, "a", "b")), [])
    assert all(batch.ended_s is not None for batch in simulation.batches.batches)
    first = [end.tenant for end in sorted(ends, key=lambda end: end.ended_s)[:40]]
    assert abs(first.count("a") - first.count("b")) <= 8  # a wave of the slots


def test_rows_that_lose_their_replica_too_often_are_sent_again() -> None:
    faults = tuple(ReplicaDeath(1.0 + at, MODEL) for at in range(0, 24, 2))
    slow = replace(world().models[0].profile, start_s=0.5)
    simulation, ends = simulated(world(batches=plans(12, "t"), faults=faults, profile=slow), [])
    assert [batch.ended for batch in simulation.batches.batches] == [12]
    assert [end.outcome for end in ends].count(Outcome.OK) == 12


def test_a_row_that_no_engine_could_hold_ends_and_the_batch_goes_on() -> None:
    rows = [(20, PROFILE.kv_tokens), ROW]
    simulation, ends = simulated(world(batches=(BatchPlan("b", 0.0, "t", MODEL, rows),)), [])
    assert [batch.ended for batch in simulation.batches.batches] == [2]
    assert {end.outcome for end in ends} == {Outcome.OK, Outcome.BAD_REQUEST}


def test_rows_start_the_first_replica_and_no_more() -> None:
    plan = world(ScalingPlan(0, 3, target_ongoing=2.0), batches=plans(60, "t"))
    simulation, _ = simulated(plan, [])
    assert {change.target for change in simulation.scalings[0].changes} <= {0, 1}


def test_a_client_may_ask_while_it_runs() -> None:
    simulation, _ = simulated(world(), [request(0.0)])
    ends: list[RequestEnd] = []
    simulation.offer(request(0.0), ends.append)
    simulation.run()
    assert [end.outcome for end in ends] == [Outcome.OK]
