"""Replicas follow the load by the policy of production, with Serve's delays, on the nodes there are."""

from __future__ import annotations

from dataclasses import replace

from autoscaling.policies import Cause
from autoscaling.simulator import NodePlan, ScalingPlan, Simulation
from autoscaling.simulator.profiles import GB
from autoscaling.simulator.requests import RequestEnd
from autoscaling.simulator.serve_delays import ServeDelays
from autoscaling.simulator.world import RouterSilence
from serve_app.types import Outcome
from tests.autoscaling.simulator.worlds import MODEL, PROFILE, request, simulated, world

QUICK = ServeDelays(upscale_s=2.0, downscale_s=10.0, to_zero_s=15.0)
SCALING = ScalingPlan(0, 4, target_ongoing=4.0, delays=QUICK)


def test_a_model_starts_from_zero_grows_and_ends_at_zero_without_losing_a_request() -> None:
    ends: list[RequestEnd] = []
    load = [request(5.0), *(request(20.0 + 0.1 * at) for at in range(300))]
    simulation = Simulation(world(SCALING), load, ends.append)
    simulation.run()
    assert {end.outcome for end in ends} == {Outcome.OK}
    assert ends[0].first_s is not None
    assert PROFILE.start_s < ends[0].first_s - ends[0].offered_s < PROFILE.start_s + 3.0
    simulation.run_for(60.0)
    targets = [change.target for change in simulation.use()[0].changes]
    assert targets[0] == 1
    assert max(targets) >= 3
    assert targets[-2:] == [1, 0]
    assert simulation.fleet.replicas == {}


def test_a_target_changes_only_after_the_delay_of_serve() -> None:
    plan = world(replace(SCALING, min_replicas=1, delays=replace(QUICK, upscale_s=8.0)))
    simulation, _ = simulated(plan, [request(0.05 * at) for at in range(400)])
    first = simulation.use()[0].changes[0]
    assert first.target > 1
    assert 8.0 <= first.at_s - simulation.began_s <= 12.0


def test_replicas_without_room_wait_for_further_nodes_which_are_given_back() -> None:
    nodes = NodePlan(gpus=1, gpu_bytes=GB, least=1, most=2, start_s=20.0, idle_s=10.0)
    plan = world(replace(SCALING, min_replicas=1), nodes=nodes)
    ends: list[RequestEnd] = []
    simulation = Simulation(plan, [request(0.1 * at) for at in range(500)], ends.append)
    simulation.run_for(15.0)
    assert simulation.fleet.counts(MODEL).running == 1
    assert simulation.fleet.counts(MODEL).unplaced >= 1
    simulation.run_for(25.0)
    assert simulation.fleet.counts(MODEL).running == 2
    simulation.run()
    simulation.run_for(60.0)
    assert len(simulation.nodes.devices()) == 1
    one_node_hours = simulation.clock.now / 3600.0
    assert one_node_hours < simulation.node_hours < 2 * one_node_hours
    assert {end.outcome for end in ends} == {Outcome.OK}
    assert len({end.replica for end in ends}) == 2


def test_no_replica_is_removed_while_a_router_is_silent() -> None:
    silence = RouterSilence(at_s=5.0, for_s=60.0)
    plan = world(replace(SCALING, min_replicas=1, initial_replicas=3), faults=(silence,))
    load = [*(request(0.2 * at) for at in range(20)), request(50.0)]
    simulation = Simulation(plan, load, lambda end: None)
    simulation.run_for(50.0)
    assert simulation.fleet.counts(MODEL).target == 3
    assert simulation.scalings[0].causes[Cause.UNREPORTED] > 100
    simulation.run_for(40.0)
    assert simulation.fleet.counts(MODEL).target == 1


def test_gpu_hours_count_from_the_place_to_the_end() -> None:
    profile = replace(PROFILE, gpus=2, gpu_hour_price=3.0)
    simulation = Simulation(world(ScalingPlan(2, 2), profile=profile), [request(0.0)], lambda end: None)
    simulation.run_for(36.0 - simulation.clock.now)
    use = simulation.use()[0]
    assert round(use.gpu_hours, 6) == 0.04
    assert round(use.cost, 5) == 0.12


def test_one_bound_of_gpus_holds_for_all_models_together() -> None:
    single = world(replace(SCALING, min_replicas=1))
    (plan,) = single.models
    both = replace(single, models=(plan, replace(plan, name="other")), max_gpus=5.0)
    load = [replace(request(0.05 * at), model=MODEL if at % 2 else "other") for at in range(1200)]
    simulation = Simulation(both, load, lambda end: None)
    targets: list[int] = []
    for _ in range(60):
        simulation.run_for(1.0)
        targets.append(sum(simulation.fleet.counts(model.name).target for model in both.models))
    assert max(targets) == 5
    assert Cause.MAX_GPUS in {cause for scaling in simulation.scalings for cause in scaling.causes}
    free = Simulation(replace(both, max_gpus=None), load, lambda end: None)
    free.run_for(60.0)
    assert sum(free.fleet.counts(model.name).target for model in both.models) > 5
