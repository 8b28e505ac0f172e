"""Rows of batches in the simulator: each is answered once, tenants share, and rows are no load for scaling."""

from __future__ import annotations

from dataclasses import replace

from autoscaling.simulator import BatchPlan, ScalingPlan
from autoscaling.simulator.world import ReplicaDeath
from serve_app.types import Outcome, RequestClass
from tests.autoscaling.simulator.worlds import MODEL, request, simulated, world

ROW = (20, 50)


def plans(rows: int, *tenants: str) -> tuple[BatchPlan, ...]:
    return tuple(BatchPlan(f"b-{tenant}", 0.0, tenant, MODEL, [ROW] * rows) for tenant in tenants)


def test_every_row_is_answered_once_though_a_replica_dies() -> None:
    simulation, ends = simulated(world(batches=plans(40, "t"), faults=(ReplicaDeath(3.0, MODEL),)), [])
    assert [batch.answered for batch in simulation.batches.batches] == [40]
    assert [end.outcome for end in ends].count(Outcome.OK) == 40
    assert {end.request_class for end in ends} == {RequestClass.LOW}


def test_tenants_share_what_is_free() -> None:
    simulation, ends = simulated(world(batches=plans(40, "a", "b")), [])
    assert all(batch.ended_s is not None for batch in simulation.batches.batches)
    first = [end.tenant for end in sorted(ends, key=lambda end: end.ended_s)[:40]]
    assert abs(first.count("a") - first.count("b")) <= 8  # a wave of the slots


def test_rows_of_which_some_fail_are_sent_again() -> None:
    """A row that cannot run on any engine ends at the door; the others' ends are not its own."""
    faults = tuple(ReplicaDeath(1.0 + at, MODEL) for at in range(0, 24, 2))
    slow = replace(world().models[0].profile, start_s=0.5)
    simulation, ends = simulated(world(batches=plans(12, "t"), faults=faults, profile=slow), [])
    assert [batch.answered for batch in simulation.batches.batches] == [12]
    assert len(ends) >= 12


def test_rows_start_the_first_replica_and_no_more() -> None:
    plan = world(ScalingPlan(0, 3, target_ongoing=2.0), batches=plans(60, "t"))
    simulation, _ = simulated(plan, [])
    assert {change.target for change in simulation.scalings[0].changes} <= {0, 1}


def test_a_client_that_asks_while_it_runs_is_told_the_end() -> None:
    simulation, _ = simulated(world(), [request(0.0)])
    told = []
    simulation.offer(request(0.0), told.append)
    simulation.run()
    assert [end.outcome for end in told] == [Outcome.OK]
