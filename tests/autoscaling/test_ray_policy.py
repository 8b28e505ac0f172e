"""The adapter in Serve's controller: which numbers it believes, and that nothing gets out of it but decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve import autoscaling_policy

from autoscaling import ray_policy, readings
from autoscaling.policies import STALE_INTERVALS
from autoscaling.ray_policy import ScalingPolicy, newest_reports
from autoscaling.unplaced import ReplicaCounts
from serve_app.names import ROUTER
from tests.autoscaling.fake_serve import ENGINE, GARBAGE, MODEL, Controller, FakeServe, Point, quick


def test_the_lines_and_the_engines_are_counted_over_all_routers() -> None:
    serve = quick(routers=("r1", "r2", "r3"))
    for router in serve.routers:
        serve.router_tells(router, waiting=5, granted=4)
    serve.engine_tells("e1", ongoing=12)
    assert Controller(serve).tick() == 3  # 27 requests, 10 each


def test_serves_own_count_of_channels_and_rings_is_not_used() -> None:
    serve = quick(served_total=50.0, queued=3.0)
    serve.router_tells("r1", waiting=0, granted=7)
    serve.engine_tells("e1", ongoing=7)
    assert Controller(serve).tick() == 1


def test_what_leaving_routers_still_run_is_counted_by_the_engines() -> None:
    serve = quick()
    serve.router_tells("r1", waiting=0, granted=2)
    serve.engine_tells("e1", ongoing=35)
    assert Controller(serve).tick() == 4


def test_a_start_without_a_place_ends_with_its_load_and_another_does_not() -> None:
    for unplaced, replicas in ((1, 1), (0, 2)):
        serve = quick(target=2)
        serve.router_tells("r1", waiting=0, granted=2)
        counts = {ENGINE: ReplicaCounts(unplaced), "another model": ReplicaCounts(9)}
        found = SimpleNamespace(tick=lambda applications, counts=counts: counts)
        assert Controller(serve, unplaced=found).tick() == replicas


def test_another_models_requests_are_not_ours() -> None:
    serve = quick()
    serve.router_tells("r1", waiting=0, granted=3)
    serve.router_tells("r1", waiting=90, granted=9, model="org/other")
    assert Controller(serve).tick() == 1


def test_serve_is_given_our_count() -> None:
    serve = quick(served_total=50.0)
    serve.router_tells("r1", waiting=4, granted=7)
    contexts = serve.contexts()
    ScalingPolicy(clock=serve.clock)(contexts)
    assert contexts[ENGINE].total_num_requests == 11.0


def test_while_a_replica_waits_for_memory_the_target_stays_and_rises_when_it_has_it() -> None:
    """Each router tells the same number; that of one that has just come up and does not know yet counts for nothing."""
    serve = quick(routers=("r1", "r2"), target=2)
    serve.router_tells("r1", waiting=70, granted=10)
    serve.router_tells("r2", waiting=0, granted=0)
    serve.router_tells_blocked("r1", 1)
    serve.router_tells_blocked("r2", 0)
    controller = Controller(serve)
    assert {controller.tick() for _ in range(20)} == {2}
    assert "wait for memory" in controller.reasons[-1]
    serve.router_tells_blocked("r1", 0)
    assert controller.tick() == 8


@pytest.mark.parametrize("blocked", GARBAGE)
def test_a_count_of_blocked_replicas_that_is_none_counts_for_nothing(blocked: Any) -> None:
    serve = quick()
    serve.router_tells("r1", waiting=25, granted=10)
    serve.router_tells_blocked("r1", blocked)
    assert Controller(serve).tick() == 4


# From zero, with Serve's own fast path in the way.


def at_zero(**more: Any) -> FakeServe:
    return FakeServe(target=0, engines=(), **more)


def test_from_zero_all_that_is_needed_starts_at_once() -> None:
    serve = at_zero()
    serve.router_tells("r1", waiting=35, granted=0)
    assert Controller(serve).tick() == 4


def test_a_ring_starts_one_and_the_count_that_follows_the_rest() -> None:
    serve = at_zero()
    serve.router_tells("r1", waiting=0, granted=0)
    controller = Controller(serve)
    assert controller.tick() == 0
    serve.queued = serve.served_total = 1.0
    assert controller.tick() == 1
    serve.router_tells("r1", waiting=35, granted=0)
    assert controller.tick() == 4
    assert controller.tick() == 4


def test_a_day_of_one_model_with_serves_own_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 -> 3 -> 1 -> 0 as Serve carries it out: nothing wanted for less than its delay is done."""
    serve = at_zero(config={"upscale_delay_s": 4.0, "downscale_delay_s": 6.0, "downscale_to_zero_delay_s": 2.0})
    monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=serve.clock))
    controller = Controller(serve)

    def run(seconds: float, waiting: int = 0, granted: int = 0) -> list[int | None]:
        targets = []
        for _ in range(round(seconds / 0.5)):
            serve.router_tells("r1", waiting=waiting, granted=granted)
            targets.append(controller.tick(0.5))
            if serve.engines or serve.target:
                serve.engines = tuple(f"e{number}" for number in range(serve.target))
        return targets

    assert set(run(20.0)) == {0}
    assert run(0.5, waiting=25) == [3]  # from zero no delay holds
    assert set(run(10.0, granted=25)) == {3}
    assert set(run(2.0, granted=5)) == {3}
    assert set(run(5.0, granted=25)) == {3}  # a dip shorter than the delay
    down = run(20.0, granted=5)
    assert (down[11], down[-1], set(down)) == (3, 1, {3, 1})
    assert set(run(6.0)) == {1}  # the look-back, and all but the last of the delay to zero
    assert run(2.0)[-1] == 0
    assert set(run(20.0)) == {0}


def test_a_burst_shorter_than_the_upscale_delay_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = FakeServe(config={"upscale_delay_s": 9.0})
    monkeypatch.setattr(autoscaling_policy, "time", SimpleNamespace(time=serve.clock))
    controller = Controller(serve)
    targets = []
    for tick in range(40):
        serve.router_tells("r1", waiting=30 if 10 <= tick < 16 else 0, granted=5)
        targets.append(controller.tick(0.5))
    assert set(targets) == {1}


# Numbers that are missing, old or wrong.


def test_a_silent_routers_numbers_do_not_linger_and_nothing_is_taken_away() -> None:
    serve = quick(routers=("r1", "r2"), target=4, engines=("e1", "e2", "e3", "e4"))
    controller = Controller(serve)
    serve.router_tells("r2", waiting=35, granted=0)
    for _ in range(int(STALE_INTERVALS * 10 * 3)):
        serve.router_tells("r1", waiting=0, granted=3)
        assert controller.tick() == 4
    assert "kept, because not every router" in controller.reasons[-1]
    assert "3.0 requests" in controller.reasons[-1]  # r2's 35 are not among them any more
    serve.routers = ("r1",)  # Serve has noticed: r2 is dead
    serve.router_tells("r1", waiting=0, granted=3)
    assert controller.tick() == 1


def test_a_router_that_has_just_started_holds_the_target_until_it_tells() -> None:
    serve = quick(target=3, engines=("e1", "e2", "e3"))
    controller = Controller(serve)
    serve.router_tells("r1", waiting=0, granted=1)
    assert controller.tick() == 1
    serve.target = 3
    serve.routers = ("r1", "r2")
    assert controller.tick() == 3
    serve.router_tells("r2", waiting=0, granted=1)
    assert controller.tick() == 1


def test_a_silent_engines_numbers_do_not_linger() -> None:
    serve = quick(target=7, engines=tuple(f"e{number}" for number in range(1, 8)))
    controller = Controller(serve)
    serve.engine_tells("e1", ongoing=70)
    asked = []
    for _ in range(200):
        serve.router_tells("r1", waiting=0, granted=5)
        asked.append(controller.tick())
    assert asked[0] == 7
    assert asked[-1] == 1


def test_without_any_number_the_target_stays() -> None:
    serve = quick(target=5)
    assert Controller(serve).tick() == 5
    serve.seen = {ROUTER: {}, ENGINE: {}}
    serve.routers = ()
    assert Controller(serve).tick() == 5


@pytest.mark.parametrize("wrong", GARBAGE)
def test_garbage_from_a_router_is_no_number(wrong: Any) -> None:
    serve = quick(routers=("r1", "r2"), target=3)
    serve.router_tells("r1", waiting=wrong, granted=wrong)
    serve.router_tells("r2", waiting=1, granted=1)
    serve.engine_tells("e1", ongoing=wrong)
    assert Controller(serve).tick() == 3


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([f"waiting_{MODEL}", f"granted_{MODEL}", "waiting_", "granted_x", "", "x"]), st.just(0)
    ),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=6,
    ).filter(lambda value: readings.count(value) is None),
    st.sampled_from(["numbers", "series", "replicas", "all"]),
)
def test_no_garbage_whatever_gets_past_the_adapter(names: dict[str, int], wrong: Any, where: str) -> None:
    serve = quick(target=2)
    raw: Any = {
        "numbers": lambda: {name: {"r1": [Point(wrong, wrong)], "e1": [Point(wrong, wrong)]} for name in names},
        "series": lambda: {name: {"r1": wrong, "e1": wrong} for name in names},
        "replicas": lambda: dict.fromkeys(names, wrong),
        "all": lambda: wrong,
    }[where]()
    contexts = serve.contexts()
    for context in contexts.values():
        context.raw_metrics = raw
        if where == "all":
            context.total_queued_requests = wrong
    decisions, states = ScalingPolicy(clock=serve.clock)(contexts)
    assert decisions == {ENGINE: 2}
    assert set(states) <= {ENGINE}


# Errors.


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise error

    return fail


def test_an_error_keeps_the_target_is_counted_and_logged_once_with_the_deployment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serve = quick(target=3)
    controller = Controller(serve)
    counted: list[dict[str, str]] = []
    monkeypatch.setattr(controller.policy.errors, "inc", lambda tags: counted.append(tags))
    monkeypatch.setattr(ray_policy.OngoingRequestsPolicy, "decide", failing(ZeroDivisionError("of our own making")))
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        for _ in range(50):
            serve.router_tells("r1", waiting=50, granted=50)
            assert controller.tick() == 3
    assert counted == [{"deployment": ENGINE, "error": "ZeroDivisionError"}] * 50
    reported = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(reported) == 1
    assert ENGINE in reported[0].getMessage()
    monkeypatch.setattr(ray_policy.OngoingRequestsPolicy, "decide", failing(KeyError("another kind")))
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        controller.tick()
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2


def test_a_counter_that_fails_does_not_get_out_either(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = quick(target=3)
    policy = ScalingPolicy(clock=serve.clock)
    monkeypatch.setattr(ray_policy.OngoingRequestsPolicy, "decide", failing(ValueError()))
    monkeypatch.setattr(policy.errors, "inc", failing(RuntimeError("no metrics agent")))
    decisions, _ = policy(serve.contexts())
    assert decisions == {ENGINE: 3}


def test_one_models_error_does_not_stop_the_others() -> None:
    serve = quick()
    serve.router_tells("r1", waiting=25, granted=0)
    contexts = serve.contexts()
    broken = serve.contexts()[ENGINE]
    broken.deployment_name = "engine-broken"
    broken.config = None
    contexts["engine-broken"] = broken
    decisions, _ = ScalingPolicy(clock=serve.clock)(contexts)
    assert decisions == {"engine-broken": 1, ENGINE: 3}


@pytest.mark.parametrize("contexts", [None, {"x": None}, {"x": object()}, 7])
def test_contexts_that_are_none_give_no_decision(contexts: Any) -> None:
    assert ScalingPolicy()(contexts) == ({}, {})


def test_a_router_without_numbers_to_read_leaves_the_engines_to_be_seen() -> None:
    serve = quick(target=1)
    serve.engine_tells("e1", ongoing=35)
    contexts = serve.contexts()
    contexts[ROUTER].config = None
    decisions, _ = ScalingPolicy(clock=serve.clock)(contexts)
    assert decisions == {ENGINE: 4}


def test_a_change_of_target_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    serve = quick()
    controller = Controller(serve)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        for _ in range(10):
            serve.router_tells("r1", waiting=20, granted=10)
            controller.tick()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"Deployment {ENGINE} changed its target from 1 to 3 replicas: 30.0 requests, 20 of them waiting now"
    )


def test_a_deployment_that_leaves_is_forgotten() -> None:
    serve = quick()
    policy = ScalingPolicy(clock=serve.clock)
    policy(serve.contexts())
    assert ENGINE in policy.deployments
    contexts = serve.contexts()
    del contexts[ENGINE]
    policy(contexts)
    assert set(policy.deployments) == {ROUTER}


def test_serve_can_ship_the_policy_to_its_controller() -> None:
    """As Serve does: the module by value, the class made there."""
    cloudpickle.register_pickle_by_value(ray_policy)
    try:
        made = cloudpickle.loads(cloudpickle.dumps(ScalingPolicy))()
    finally:
        cloudpickle.unregister_pickle_by_value(ray_policy)
    serve = quick()
    serve.router_tells("r1", waiting=25, granted=0)
    assert made(serve.contexts())[0] == {ENGINE: 3}


def test_freshness_is_by_our_clock_and_theirs_need_only_move() -> None:
    seen = newest_reports({}, [("a", 5.0), ("b", 9e9), ("gone", 1.0)], ["a", "b", "mute"], 100.0)
    assert seen == {"a": (5.0, 100.0), "b": (9e9, 100.0)}
    seen = newest_reports(seen, [("a", 4.0), ("b", 9e9)], ["a", "b"], 110.0)  # a's clock was set back: it lives
    assert seen == {"a": (4.0, 110.0), "b": (9e9, 100.0)}
    assert newest_reports(seen, [], ["b"], 120.0) == {"b": (9e9, 100.0)}


def test_a_report_counts_for_five_intervals_after_it_was_seen() -> None:
    serve = quick(target=2, engines=("e1", "e2"))
    policy = ScalingPolicy(clock=serve.clock)
    serve.router_tells("r1", waiting=0, granted=1)
    serve.engine_tells("e1", ongoing=20)
    assert policy(serve.contexts())[0] == {ENGINE: 2}
    serve.now += STALE_INTERVALS
    serve.router_tells("r1", waiting=0, granted=1)
    assert "20.0 requests" in policy(serve.contexts())[1][ENGINE]["reason"]
    for _ in range(2):  # the mean over the look-back follows
        serve.now += 100.0
        serve.router_tells("r1", waiting=0, granted=1)
        decisions, _ = policy(serve.contexts())
    assert decisions == {ENGINE: 1}
