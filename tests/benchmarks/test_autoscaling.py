"""The comparison of scaling policies: what others' rules do, what a clairvoyant plan has, and how regret is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policies import Signals
from benchmarks.autoscaling.baselines import Apa, Baseline, Clairvoyant, Kpa, ServeDefault, clairvoyant_plan
from benchmarks.autoscaling.main import Outcome, regret, summary_of
from tests.effort import examples

START_S = 5.0
SPAN_S = 120.0


def signals(now: float, load: float, running: int) -> Signals:
    common: dict[str, Any] = {"complete": True, "cold_start_requested": False, "min_replicas": 1, "max_replicas": 50}
    return Signals(running, running, 0.0, load, load, target_ongoing=8.0, look_back_s=5.0, now=now, **common)


def followed(policy: Baseline, loads: list[float], running: int) -> list[int]:
    """Its decisions, second by second, each followed at once."""
    found = []
    for second, load in enumerate(loads):
        running = policy.decide(signals(float(second), load, running)).replicas
        found.append(running)
    return found


def test_knative_s_panics_at_twice_the_target_and_never_goes_down_meanwhile() -> None:
    wanted = followed(Kpa(8.0), [16.0] * 60 + [80.0] * 10 + [16.0] * 30, 2)
    assert wanted[58] == 2
    assert max(wanted[60:72]) >= 8, "before the mean of a minute would ask for it"
    panic = wanted[62:100]
    assert panic == sorted(panic)


def test_aibrix_s_changes_nothing_within_its_band() -> None:
    assert set(followed(Apa(8.0), [8.0 * 10 * 1.08] * 200 + [8.0 * 10 * 0.85] * 200, 10)) == {10}
    assert followed(Apa(8.0), [8.0 * 10 * 1.3] * 200, 10)[-1] == 13
    down = followed(Apa(8.0), [40.0] * 400, 10)
    assert (down[250], down[-1]) == (10, 5), "five minutes later"


def test_serves_default_is_the_mean_of_thirty_seconds_over_the_target() -> None:
    wanted = [ServeDefault(8.0).decide(signals(0.0, 33.0, 1)).replicas]
    wanted += followed(ServeDefault(8.0), [0.0] * 15 + [80.0] * 15, 1)[-1:]
    assert wanted == [5, 5]


@given(
    runs=st.lists(st.tuples(st.floats(0.0, SPAN_S), st.floats(0.1, 60.0)), max_size=60),
    slots=st.integers(1, 8),
    start_s=st.floats(0.0, 30.0),
)
@settings(max_examples=examples(60))
def test_a_clairvoyant_plan_has_asked_in_time_for_all_that_runs(
    runs: list[tuple[float, float]], slots: int, start_s: float
) -> None:
    plan = clairvoyant_plan(runs, slots, 1.0, start_s, SPAN_S)
    for second in range(len(plan)):
        running = sum(at_s <= second and at_s + run_s > second for at_s, run_s in runs if at_s < len(plan))
        since = max(0, int(second - start_s))
        assert min(plan[since : second + 1]) * slots >= running or second < start_s
    policy = Clairvoyant(plan, 10.0)
    assert [policy.decide(signals(10.0 + second, 0.0, 1)).replicas for second in range(len(plan))] == [
        min(wanted, 50) for wanted in plan
    ]


def test_a_gap_shorter_than_a_start_ends_no_replica() -> None:
    runs = [(0.0, 10.0), (0.0, 60.0), (12.0, 10.0), (40.0, 10.0)]
    plan = clairvoyant_plan(runs, 1, 1.0, START_S, SPAN_S)
    assert plan[:22] == [2] * 22
    assert plan[28] == 1


def outcomes(slo: Outcome | None) -> dict[str, Outcome | None]:
    fixed = Outcome(0.99, 20.0, 0, 20.0)
    return {"clairvoyant": Outcome(0.99, 10.0, 9, 1.0), "static": fixed, "slo": slo, "kpa": Outcome(0.99, 18.0, 9, 1.0)}


def test_regret_is_nothing_for_the_clairvoyant_and_one_for_a_fixed_number() -> None:
    found = outcomes(Outcome(0.99, 12.5, 4, 1.0))
    parts = [regret(found, arm) for arm in ("clairvoyant", "static", "slo")]
    assert parts == pytest.approx([0.0, 1.0, 0.25])
    assert regret(outcomes(None), "slo") is None


def test_the_best_policy_misses_no_attainment_and_has_the_least_regret() -> None:
    arms = ("clairvoyant", "static", "slo", "kpa")
    cases = {
        ("azure", 30.0): outcomes(Outcome(0.99, 11.0, 4, 1.0)),
        ("step", 5.0): outcomes(Outcome(0.99, 12.0, 4, 1.0)),
    }
    found = summary_of(cases, arms)
    assert found["best_policy"] == "slo"
    assert found["regret_30s"] == pytest.approx({"azure": 0.1})
    assert found["pass"]
    missed = summary_of(cases | {("step", 5.0): outcomes(None)}, arms)
    assert missed["best_policy"] == "kpa"
    assert not missed["pass"]
    json.dumps(missed, allow_nan=False)
