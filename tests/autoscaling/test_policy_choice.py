"""Which policy decides for a model and which one advises, from the settings to Serve's controller."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from autoscaling import ray_policy
from autoscaling.policies import POLICIES, Decision, Signals
from autoscaling.ray_policy import ScalingPolicy
from serve_app.app import scale
from serve_app.errors import ConfigError
from serve_app.names import ROUTER, deployment_of
from serve_app.settings import DEFAULT_POLICY, AutoscaleSettings
from serve_app.settings.model import PolicyName
from serve_app.settings.serve_config import application
from serve_app.settings.settings import Settings, parse
from tests.autoscaling.fake_serve import ENGINE, FakeServe


def settings(models: list[dict[str, Any]], **more: Any) -> Settings:
    return parse({"models": models, **more})


SCALED = {"min_replicas": 0, "max_replicas": 4}


def test_the_settings_name_every_policy() -> None:
    assert get_args(PolicyName) == tuple(POLICIES)
    assert DEFAULT_POLICY in POLICIES


def test_one_that_advises_is_another_one_than_decides() -> None:
    with pytest.raises(ValidationError, match="advise names 'slo', which is the policy that decides"):
        AutoscaleSettings(policy="slo", advise="slo")


def test_the_controller_gets_the_names_of_what_is_not_the_default() -> None:
    models: list[dict[str, Any]] = [
        {"name": "org/m", "replicas": SCALED | {"policy": "slo"}},
        {"name": "advised", "replicas": SCALED | {"advise": "slo"}},
        {"name": "usual", "replicas": SCALED},
    ]
    policy = application(settings(models=models).without_secrets())["autoscaling_policy"]
    found = policy["policy_kwargs"]["policies"]
    assert list(found.values()) == [["slo", None], ["ongoing", "slo"]]
    serve = FakeServe(target=2, engines=("e1", "e2"))
    serve.router_tells("r1", waiting=0, granted=30)
    _, states = ScalingPolicy(clock=serve.clock, policies=found)(serve.contexts())
    assert states[ENGINE]["reason"].startswith("30.0 requests run or would start too late")


def test_advice_changes_nothing() -> None:
    serve = FakeServe(target=2, engines=("e1", "e2"))
    serve.router_tells("r1", waiting=0, granted=30)
    alone, _ = ScalingPolicy(clock=serve.clock)(serve.contexts())
    advised, states = ScalingPolicy(clock=serve.clock, policies={ENGINE: ("ongoing", "slo")})(serve.contexts())
    assert advised == alone == {ENGINE: 3}
    assert states[ENGINE]["advised"] == 5
    assert states[ENGINE]["advice"].endswith("5 wanted")


def test_an_advisor_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        has_own_delays = True

        def decide(self, signals: Signals) -> Decision:
            raise ZeroDivisionError

    monkeypatch.setattr(ray_policy, "POLICIES", {**POLICIES, "slo": Failing})
    serve = FakeServe(target=2, engines=("e1", "e2"))
    serve.router_tells("r1", waiting=0, granted=30)
    decisions, states = ScalingPolicy(clock=serve.clock, policies={ENGINE: ("ongoing", "slo")})(serve.contexts())
    assert decisions == {ENGINE: 3}
    assert states[ENGINE]["cause"] == "load"
    assert "advised" not in states[ENGINE]


def test_advice_goes_on_from_its_own_number() -> None:
    """While a replica starts, a policy keeps its target; that of another one is not its own."""
    serve = FakeServe(target=4, engines=("e1", "e2"))
    policy = ScalingPolicy(clock=serve.clock, policies={ENGINE: ("slo", "ongoing")})
    numbers = []
    for second in range(20):
        serve.now += 1.0
        serve.router_tells("r1", waiting=0, granted=12)
        for engine in serve.engines:
            serve.tell(ENGINE, engine, ongoing=6, slots=8.0, start_s=12.0)
        serve.target = 2 if second < 10 else 4
        _, states = policy(serve.contexts())
        numbers.append(states[ENGINE]["advised"])
    assert set(numbers) == {2}


def test_what_engines_and_routers_report_reaches_the_policy() -> None:
    serve = FakeServe(target=2, engines=("e1", "e2"))
    serve.router_tells("r1", waiting=20, granted=10)
    serve.tell(ROUTER, "r1", **{"in_time_org/m": 20.0})
    for engine in serve.engines:
        serve.tell(ENGINE, engine, ongoing=5, slots=4.0, start_s=12.0)
    _, states = ScalingPolicy(clock=serve.clock, policies={ENGINE: ("slo", None)})(serve.contexts())
    assert states[ENGINE]["reason"].startswith("10.0 requests run or would start too late")
    assert "at 4 slots a replica" in states[ENGINE]["reason"]


def test_serve_does_not_delay_what_a_policy_with_own_delays_decides() -> None:
    (model,) = settings(models=[{"name": "m", "replicas": SCALED | {"policy": "slo"}}]).models
    found = scale(model)["autoscaling_config"]
    assert (found.upscale_delay_s, found.downscale_delay_s, found.downscale_to_zero_delay_s) == (0.0, 0.0, 120.0)
    (usual,) = settings(models=[{"name": "m", "replicas": SCALED}]).models
    assert scale(usual)["autoscaling_config"].upscale_delay_s == 30.0


def test_all_models_share_a_bound_of_gpus_less_what_fixed_ones_take() -> None:
    models: list[dict[str, Any]] = [
        {"name": "org/m", "replicas": SCALED, "tensor_parallel_size": 2},
        {"name": "fixed", "replicas": {"min_replicas": 3, "max_replicas": 3}},
        {"name": "sim", "engine": "simulated", "replicas": SCALED},
    ]
    policy = application(settings(models, scaling={"max_gpus": 8}).without_secrets())["autoscaling_policy"]
    budget = policy["policy_kwargs"]["budget"]
    assert budget == {"max_gpus": 5.0, "gpus": {ENGINE: 2.0, deployment_of("sim"): 0.0}}
    serve = FakeServe(target=1, engines=("e1",))
    serve.router_tells("r1", waiting=0, granted=40)
    decisions, states = ScalingPolicy(clock=serve.clock, budget=budget)(serve.contexts())
    assert decisions == {ENGINE: 2}
    assert states[ENGINE]["cause"] == "max_gpus"
    assert states[ENGINE]["reason"].endswith("2 not started: scaling.max_gpus is 5 for all models")


def test_a_bound_below_the_least_of_all_models_is_refused() -> None:
    models = [{"name": "m", "replicas": {"min_replicas": 2, "max_replicas": 4}, "tensor_parallel_size": 4}]
    with pytest.raises(ConfigError, match="max_gpus is 6, and min_replicas of all models take 8 GPUs"):
        settings(models, scaling={"max_gpus": 6})
