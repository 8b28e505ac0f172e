"""Whole runs: each request ends once, one seed gives one history, and what waits waits as theory says."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.simulator import BatchPlan, ModelPlan, NodePlan, ScalingPlan, SimulatedRequest, World
from autoscaling.simulator.profiles import GB
from autoscaling.simulator.world import ClassPlan, ReplicaDeath, RouterSilence
from serve_app.core.limits import Limits
from serve_app.core.queue import QueuePolicy
from serve_app.errors import ConfigError
from serve_app.types import Outcome, RequestClass
from tests.autoscaling.simulator.worlds import MODEL, NODES, POLICY, PROFILE, STEP_S, request, simulated, world
from tests.effort import effort, examples

LOW, NORMAL, HIGH, _ = RequestClass


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[SimulatedRequest]]:
    """Up to two models whose replicas die, with clients who leave, and tenants with limits."""
    names = draw(st.sampled_from([("a",), ("a", "b")]))
    plans = tuple(
        ModelPlan(
            name,
            replace(
                PROFILE, kv_tokens=draw(st.sampled_from([150, 400, 8_000])), start_s=draw(st.sampled_from([0.5, 8]))
            ),
            QueuePolicy(max_queued=draw(st.sampled_from([3, 100])), max_wait_s=20.0, no_replica_wait_s=20.0),
            ScalingPlan(draw(st.integers(0, 1)), draw(st.integers(1, 3)), target_ongoing=3.0),
        )
        for name in names
    )
    faults = draw(st.lists(st.builds(ReplicaDeath, st.floats(0.0, 10.0), st.sampled_from(names)), max_size=3))
    level = st.builds(
        ClassPlan,
        ttft_slo_s=st.none() | st.just(1.0),
        patience_s=st.none() | st.floats(0.1, 5.0),
        deadline_s=st.none() | st.floats(0.1, 5.0),
    )
    plan = World(
        plans,
        NodePlan(gpus=1, gpu_bytes=GB, least=1, most=4, start_s=2.0, idle_s=10.0),
        classes=draw(st.dictionaries(st.sampled_from(RequestClass), level)),
        limits=draw(st.sampled_from([{}, {"t1": Limits(requests_per_minute=30.0, max_concurrent=2)}])),
        faults=tuple(faults),
        routers=draw(st.integers(1, 3)),
        request_s=draw(st.sampled_from([0.0, 0.2])),
        progress_s=draw(st.sampled_from([0.0, 0.5])),
    )
    requests = draw(
        st.lists(
            st.builds(
                SimulatedRequest,
                at_s=st.floats(0.0, 12.0),
                tenant=st.sampled_from(["t0", "t1"]),
                request_class=st.sampled_from(RequestClass),
                model=st.sampled_from(names),
                prompt_tokens=st.integers(1, 90),
                output_tokens=st.integers(1, 200),
                session=st.none() | st.just("s"),
                max_tokens=st.none() | st.just(200),
            ),
            min_size=1,
            max_size=30,
        )
    )
    return plan, sorted(requests, key=lambda asked: asked.at_s)


@settings(max_examples=examples(40))
@given(worlds())
def test_every_request_ends_exactly_once_and_leaves_nothing(made: tuple[World, list[SimulatedRequest]]) -> None:
    plan, requests = made
    simulation, ends = simulated(plan, requests)
    assert [end.number for end in ends] == list(range(len(requests)))
    for end, asked in zip(ends, requests, strict=True):
        moments = [end.offered_s, end.granted_s, end.first_s, end.ended_s]
        known = [moment for moment in moments if moment is not None]
        assert known == sorted(known)
        assert end.output_tokens <= asked.output_tokens
        assert (end.outcome is Outcome.OK) == (end.output_tokens == asked.output_tokens)
        assert bool(end.refused) == (end.outcome in (Outcome.REFUSED, Outcome.BAD_REQUEST))
    for router in simulation.routers:
        assert router.queue.in_flight.running == {}
        assert router.queue.pending.by_request_id == {}
    assert not any(replica.runs or replica.batch.running for replica in simulation.fleet.replicas.values())


def test_one_seed_gives_one_history() -> None:
    plan = world(
        ScalingPlan(0, 3, target_ongoing=3.0),
        profile=replace(PROFILE, start_sigma=0.3),
        faults=(ReplicaDeath(8.0, MODEL),),
    )
    draw = random.Random(3)
    requests = [request(0.1 * at, draw.randrange(1, 120), draw.choice([LOW, NORMAL, HIGH])) for at in range(150)]
    first, ends = simulated(plan, requests)
    again, ends_again = simulated(plan, requests)
    other, _ends = simulated(replace(plan, seed=2), requests)
    assert ends == ends_again
    assert first.use() == again.use()
    assert first.use() != other.use()


COUNT = effort(2_500, 4_000)  # of requests: enough for a mean within a quarter


def test_waits_are_those_of_erlang_c() -> None:
    """Four servers, Poisson arrivals, exponential answers: 4 slots, 80% of them busy."""
    servers = 4
    load = 3.2
    draw = random.Random(5)
    at_s = 0.0
    requests = []
    for _ in range(COUNT):
        at_s += draw.expovariate(load)
        requests.append(request(at_s, max(1, round(draw.expovariate(STEP_S)))))
    _, ends = simulated(world(routers=1), requests)
    waits = [end.granted_s - end.offered_s for end in ends if end.granted_s is not None]
    assert len(waits) == COUNT
    blocked = load**servers / math.factorial(servers) * servers / (servers - load)
    all_busy = blocked / (sum(load**n / math.factorial(n) for n in range(servers)) + blocked)
    assert fmean(waits) == pytest.approx(all_busy / (servers - load), rel=0.25)
    assert sum(wait > 0.05 for wait in waits) / len(waits) == pytest.approx(all_busy, abs=0.08)
    # Little's law: what runs at once in the mean is the rate times the time of an answer
    busy = sum(end.ended_s - end.granted_s for end in ends if end.granted_s is not None) / ends[-1].ended_s
    assert busy == pytest.approx(load, rel=0.1)


def test_requests_of_a_dead_replica_go_on_elsewhere_with_what_they_have() -> None:
    plan = world(ScalingPlan(2, 2), faults=(ReplicaDeath(2.0, MODEL),))
    simulation, ends = simulated(plan, [request(0.1 * at, 200) for at in range(4)])
    assert {end.outcome for end in ends} == {Outcome.OK}
    moved = [end for end in ends if end.runs > 1]
    assert moved
    for end in moved:  # 4 s of steps and little more: nothing was produced twice
        assert end.ended_s - end.offered_s < 6.0
    assert simulation.fleet.counts(MODEL).running + simulation.fleet.counts(MODEL).unplaced >= 1


def test_low_requests_stop_for_high_ones_and_lose_no_token() -> None:
    low = [request(0.0, 300, LOW) for _ in range(4)]
    high = [request(2.0 + 0.01 * at, 20, HIGH) for at in range(2)]
    _, ends = simulated(world(), [*low, *high])
    assert {end.outcome for end in ends} == {Outcome.OK}
    for end in ends[4:]:
        assert end.first_s is not None
        assert end.first_s - end.offered_s < 0.5
    stopped = [end for end in ends[:4] if end.runs > 1]
    assert stopped
    assert all(20 < end.again_tokens < end.runs * (20 + 300) for end in stopped)
    assert not any(end.again_tokens for end in ends if end.runs == 1)


def test_in_a_world_without_preemption_high_ones_wait_for_an_end() -> None:
    low = [request(0.0, 300, LOW) for _ in range(4)]
    _, ends = simulated(world(preempts=False), [*low, request(2.0, 20, HIGH)])
    assert {end.runs for end in ends} == {1}
    assert ends[4].granted_s is not None
    assert ends[4].granted_s >= min(end.ended_s for end in ends[:4])


def test_a_request_that_cannot_start_by_its_deadline_is_refused_and_an_impatient_client_leaves() -> None:
    classes = {NORMAL: ClassPlan(deadline_s=0.5), LOW: ClassPlan(patience_s=0.7)}
    held = [request(0.0, 400, HIGH) for _ in range(4)]
    _, ends = simulated(world(classes=classes), [*held, request(1.0), request(1.0, level=LOW)])
    assert (ends[4].outcome, ends[4].refused) == (Outcome.REFUSED, "deadline")
    assert ends[5].outcome is Outcome.CANCELLED_QUEUED
    assert ends[5].ended_s - ends[5].offered_s == pytest.approx(0.7)
    assert ends[4].ended_s - ends[4].offered_s <= 1.1


def test_a_request_takes_its_way_to_the_queue_and_an_impatient_client_leaves_on_it() -> None:
    _, (near,) = simulated(world(), [request(0.0)])
    _, (far,) = simulated(world(request_s=0.25), [request(0.0)])
    assert near.first_s is not None
    assert far.first_s is not None
    assert far.first_s - near.first_s == pytest.approx(0.25, abs=1e-6)
    _, (left,) = simulated(world(request_s=0.25, classes={NORMAL: ClassPlan(patience_s=0.1)}), [request(0.0)])
    assert (left.outcome, left.granted_s, left.runs) == (Outcome.CANCELLED_QUEUED, None, 0)
    assert left.ended_s - left.offered_s == pytest.approx(0.1)


def test_a_client_that_bounds_its_answer_reserves_no_more() -> None:
    plan = world(profile=replace(PROFILE, kv_tokens=400), routers=1)

    def granted(max_tokens: int | None) -> int:
        _, ends = simulated(plan, [request(0.0, max_tokens=max_tokens) for _ in range(4)])
        return sum(end.granted_s is not None and end.granted_s - end.offered_s < 0.1 for end in ends)

    assert granted(50) == 4
    assert granted(None) == 1


def test_a_tenant_over_its_limit_is_refused_and_others_are_not() -> None:
    plan = world(limits={"limited": Limits(max_concurrent=1)})
    _, ends = simulated(plan, [*(request(0.0, tenant="limited") for _ in range(3)), request(0.0)])
    assert [end.outcome for end in ends].count(Outcome.REFUSED) == 2
    assert {end.refused for end in ends if end.tenant == "limited"} == {"", "concurrency"}
    assert ends[3].outcome is Outcome.OK


def test_a_request_that_no_engine_could_hold_ends_at_the_door() -> None:
    _, ends = simulated(world(), [request(0.0, output=PROFILE.kv_tokens), request(0.0)])
    assert [end.outcome for end in ends] == [Outcome.BAD_REQUEST, Outcome.OK]


def test_requests_of_a_session_stay_on_one_replica() -> None:
    plan = world(ScalingPlan(3, 3))
    _, ends = simulated(plan, [request(0.6 * at, 10, session="s") for at in range(12)])
    assert len({end.replica for end in ends}) == 1


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: World(()), "models"),
        (lambda: world(nodes=replace(NODES, gpu_bytes=GB // 2)), "nodes"),
        (lambda: world(faults=(ReplicaDeath(1.0, "x"),)), "faults"),
        (lambda: world(batches=(BatchPlan("b", 0.0, "t", "x", [(1, 1)]),)), "batches"),
        (lambda: world(faults=(RouterSilence(1.0, 1.0, 7),)), "faults"),
        (lambda: world(ScalingPlan(2, 1)), "min_replicas"),
        (lambda: simulated(world(), [request(0.0, model="x")]), "model"),
    ],
)
def test_a_world_that_cannot_be_is_refused_by_the_field(make: object, param: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.param == param


def test_a_queue_that_is_full_refuses() -> None:
    plan = world(queue=replace(POLICY, max_queued=2), routers=1)
    _, ends = simulated(plan, [request(0.001 * at, 300) for at in range(12)])
    assert {end.refused for end in ends} == {"", "queue_full"}
