"""The scaling policy with a ledger beside it: no replica beyond those that memory is kept for."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaling.policies import Decision, ScaleUpLimit, within_scale_up_limit
from autoscaling.ray_policy import ScalingPolicy
from tests.autoscaling.fake_serve import ENGINE, FakeServe


class Ledger:
    """In the place of `Placing`: memory for so many more."""

    def __init__(self, room: ScaleUpLimit | None) -> None:
        self.answer = room
        self.asked: list[tuple[Any, int, int]] = []

    def tick(self) -> None:
        """Nothing to find or hook."""

    def room(self, deployment_id: Any, target: int) -> int | None:
        return None if self.answer is None else self.answer.replicas

    def scale_up_limit(self, deployment_id: Any, target: int, more: int) -> ScaleUpLimit | None:
        self.asked.append((deployment_id, target, more))
        return self.answer


def decide(ledger: Ledger, serve: FakeServe, waiting: int) -> tuple[int, str]:
    serve.router_tells("r1", waiting=waiting, granted=0)
    policy = ScalingPolicy(clock=serve.clock, placing=ledger)  # type: ignore[arg-type]
    decisions, states = policy(serve.contexts())
    return decisions[ENGINE], states[ENGINE]["reason"]


def test_the_target_rises_only_as_far_as_memory_is_kept() -> None:
    ledger = Ledger(ScaleUpLimit(1, "memory: at least 5 GB needed on one device, 3 GB free"))
    replicas, reason = decide(ledger, FakeServe(), waiting=35)
    assert replicas == 2
    assert reason.endswith("4 wanted; 2 not started, memory: at least 5 GB needed on one device, 3 GB free")
    assert ledger.asked == [(ENGINE, 1, 3)]


def test_the_first_replica_and_the_least_there_are_to_be_are_not_held_back() -> None:
    none = Ledger(ScaleUpLimit(0, "full"))
    assert decide(none, FakeServe(target=0, engines=()), waiting=35)[0] == 1
    assert decide(none, FakeServe(target=0, engines=(), config={"min_replicas": 2}), waiting=35)[0] == 2
    assert [more for *_, more in none.asked] == [3, 2]


@pytest.mark.parametrize("room", [None, ScaleUpLimit(3, "")])
def test_where_ray_decides_or_memory_is_kept_for_all_the_load_alone_counts(room: ScaleUpLimit | None) -> None:
    assert decide(Ledger(room), FakeServe(), waiting=35)[0] == 4


def test_nothing_is_kept_for_a_model_that_wants_no_more() -> None:
    ledger = Ledger(ScaleUpLimit(0, "full"))
    assert decide(ledger, FakeServe(target=3, engines=("e1", "e2", "e3")), waiting=15)[0] == 2
    assert ledger.asked == [(ENGINE, 3, 0)]


def test_a_ledger_that_fails_keeps_the_target() -> None:
    class Broken(Ledger):
        def scale_up_limit(self, deployment_id: Any, target: int, more: int) -> ScaleUpLimit | None:
            raise KeyError(deployment_id)

    serve = FakeServe(target=2)
    serve.router_tells("r1", waiting=50, granted=0)
    policy = ScalingPolicy(clock=serve.clock, placing=Broken(None))  # type: ignore[arg-type]
    decisions, states = policy(serve.contexts())
    assert (decisions[ENGINE], states[ENGINE]["wanted"], states[ENGINE]["cause"]) == (2, 2, "failed")


def test_a_shortage_never_takes_more_away_than_is_short() -> None:
    decision = Decision(4, 35.0, "4 wanted")
    assert within_scale_up_limit(decision, 3, ScaleUpLimit(0, "full")).replicas == 1
    assert within_scale_up_limit(decision, 3, ScaleUpLimit(5, "")) == decision
    assert within_scale_up_limit(decision, 0, ScaleUpLimit(0, "full")) == decision


@pytest.mark.parametrize(
    "starts",
    [
        {"application": "serve_app", "models": {}, "quota": {"of_a_newer_version": 1}},
        {"application": "serve_app", "models": {ENGINE: "m"}, "quota": {}},
        {"of": "another version"},
    ],
)
def test_what_the_controller_cannot_read_leaves_the_policy_without_a_ledger(starts: dict[str, Any]) -> None:
    serve = FakeServe()
    serve.router_tells("r1", waiting=35, granted=0)
    policy = ScalingPolicy(clock=serve.clock, starts=starts)
    assert policy(serve.contexts())[0][ENGINE] == 4


def test_outside_of_serves_controller_nothing_is_held_back() -> None:
    serve = FakeServe()
    serve.router_tells("r1", waiting=35, granted=0)
    starts = {"application": "serve_app", "models": {ENGINE: ["m", 60]}, "quota": {}}
    policy = ScalingPolicy(clock=serve.clock, starts=starts)
    assert policy(serve.contexts())[0][ENGINE] == 4
