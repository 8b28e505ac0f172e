"""What people are shown of the signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoscaling.policies import ClassSignals, Decision
from autoscaling.ray_policy import ScalingPolicy
from autoscaling.snapshot import STALE, shown, snapshot_of
from tests.autoscaling.fake_serve import ENGINE, FakeServe, signals

BUSY = signals(
    waiting=15.0,
    granted=12.0,
    classes=(
        ClassSignals("high", 3.0, 4.0, 3.0, 2.4, 1.0),
        ClassSignals("normal", 12.0, 0.0, 0.0, None, 31.6),
        ClassSignals("low", 0.0, 8.0),
    ),
    waiting_tokens=5400.0,
    arrived_tokens_s=449.7,
    served_tokens_s=420.2,
    kv_use=0.834,
    slot_use=1.0,
    starting_s=35.2,
    room=2,
)


def test_a_snapshot_has_classes_waits_and_rates_and_nothing_that_is_zero() -> None:
    found = snapshot_of(BUSY, Decision(3, 27.0, "27.0 requests"))
    assert found["classes"] == {
        "high": {"waiting": 3, "granted": 4, "oldest_wait_s": 1, "forecast_s": 2},
        "normal": {"waiting": 12, "late": 12, "oldest_wait_s": 32},
        "low": {"granted": 8},
    }
    assert (found["arrived_tokens_s"], found["served_tokens_s"], found["waiting_tokens"]) == (450, 420, 5400)
    assert (found["kv_use"], found["slot_use"], found["starting_s"], found["room"]) == (0.83, 1.0, 35, 2)
    assert (found["oldest_wait_s"], found["wanted"], found["reason"]) == (32, 3, "27.0 requests")
    assert "complete" not in found
    idle = snapshot_of(signals(), Decision(1, 0.0, ""))
    assert idle.keys() == {"running", "target", "waiting", "granted", "executing", "wanted", "reason"}


def test_the_text_is_one_line() -> None:
    assert shown(BUSY) == (
        "high: 4 run, 3 wait, the oldest for 1 s, the last starts in 2 s; normal: 0 run, 12 wait, the oldest for 32 s; "
        "low: 8 run; 450 tokens/s arrive, 420 are served; 83% of the KV cache and 100% of the slots in use; "
        "a replica has been starting for 35 s; room for 2 more"
    )
    assert shown(signals()) == ""


def seen_of(policy: ScalingPolicy) -> Mapping[str, Any]:
    """The snapshot of the last decision."""
    seen = policy.deployments[ENGINE].seen
    assert seen is not None
    return snapshot_of(*seen)


def test_stale_signals_show_and_hold_the_replicas_there_are() -> None:
    serve = FakeServe(target=3, engines=("e1", "e2", "e3"), routers=("r1", "r2"))
    policy = ScalingPolicy(clock=serve.clock, policies={ENGINE: ("slo", None)})
    serve.router_tells("r1", waiting=0, granted=1)
    decisions, states = policy(serve.contexts())
    assert decisions == {ENGINE: 3}
    assert states[ENGINE]["signals"].startswith(STALE)
    assert seen_of(policy)["complete"] is False
    serve.router_tells("r2", waiting=0, granted=1)
    _, states = policy(serve.contexts())
    assert states[ENGINE]["signals"] == ""
    assert "complete" not in seen_of(policy)
