"""The policy with a forecast: what comes back each day is there before it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoscaling.policies import Cause, Decision, PredictivePolicy, Signals, SloPolicy
from autoscaling.policies.predictive import MOST_OVER, offered_load

SLOTS = 8.0
START_S = 90.0
HOUR_S = 3600.0  # the season of these tests
SPIKE_S = 1800.0
Load = Callable[[float], float]


def signals(now: float = 0.0, **more: Any) -> Signals:
    common: dict[str, Any] = {"running": 4, "target": 4, "waiting": 0.0, "granted": 0.0, "executing": 0.0}
    common |= {"complete": True, "cold_start_requested": False, "min_replicas": 0, "max_replicas": 100}
    common |= {"target_ongoing": 20.0, "look_back_s": 5.0, "now": now, "slots": SLOTS, "start_s": START_S}
    return Signals(**common | more)


def spike(second: float) -> float:
    return 160.0 if SPIKE_S <= second % HOUR_S < SPIKE_S + 300.0 else 16.0


def followed(policy: Any, load: Load, begin: int, span_s: int, **more: Any) -> list[Decision]:
    """Its decisions, second by second, each followed at once."""
    target = 4
    found = []
    for second in range(begin, begin + span_s):
        known = {"running": target, "target": target, "granted": load(float(second))} | more
        found.append(policy.decide(signals(float(second), **known)))
        target = found[-1].replicas
    return found


def test_before_a_season_has_passed_it_is_slo() -> None:
    ours = followed(PredictivePolicy(period_s=HOUR_S), spike, 0, 3599)
    assert ours == followed(SloPolicy(), spike, 0, 3599)


def test_a_spike_of_each_day_is_asked_for_one_start_ahead() -> None:
    decisions = followed(PredictivePolicy(period_s=HOUR_S), spike, 0, 2 * 3600)
    ahead = decisions[int(HOUR_S + SPIKE_S - START_S)]
    assert ahead.replicas >= 160 / SLOTS
    assert ahead.cause is Cause.FORECAST
    assert "90 s of a start, by earlier days" in ahead.reason
    assert decisions[int(HOUR_S + SPIKE_S - START_S - 130)].replicas < 10, "and not earlier"


def test_a_day_that_has_less_at_all_hours_lowers_the_floor() -> None:
    def half(second: float) -> float:
        return spike(second) * (1.0 if second < HOUR_S else 0.25)

    policy = PredictivePolicy(period_s=HOUR_S)
    decisions = followed(policy, half, 0, 2 * 3600)
    assert decisions[int(HOUR_S + SPIKE_S - START_S)].replicas < 0.5 * 160 / SLOTS


def test_the_floor_holds_where_no_replica_runs() -> None:
    policy = PredictivePolicy(period_s=HOUR_S)
    followed(policy, spike, 0, 3600)
    asleep = policy.decide(signals(HOUR_S + SPIKE_S - 60.0, running=0, target=0))
    assert asleep.replicas >= 160 / SLOTS
    assert asleep.cause is Cause.FORECAST


def test_no_load_forecasts_none() -> None:
    policy = PredictivePolicy(period_s=HOUR_S)
    assert followed(policy, lambda second: 0.0, 0, 3 * 3600)[-1].replicas == 0


def test_incomplete_numbers_are_not_learned() -> None:
    policy = PredictivePolicy(period_s=HOUR_S)
    followed(policy, lambda second: 80.0, 0, 3600)
    followed(policy, lambda second: 1.0, 3600, 3600, complete=False)
    assert policy.decide(signals(2 * HOUR_S, granted=1.0)).cause is Cause.FORECAST


def test_the_bounds_and_a_wait_for_memory_stand_above_the_forecast() -> None:
    for more, replicas in (({"max_replicas": 5}, 5), ({"blocked": 1.0, "running": 3}, 4)):
        policy = PredictivePolicy(period_s=HOUR_S)
        followed(policy, spike, 0, 3600)
        assert policy.decide(signals(HOUR_S + SPIKE_S - 30.0, **more)).replicas == replicas


def test_what_only_stands_in_the_queue_does_not_count_again() -> None:
    rates = {"arrived_tokens_s": 100.0, "served_tokens_s": 100.0}
    assert offered_load(signals(waiting=500.0, granted=32.0, **rates)) == 32.0
    assert offered_load(signals(waiting=500.0, granted=32.0, **rates | {"arrived_tokens_s": 200.0})) == 64.0
    assert offered_load(signals(granted=32.0, **rates | {"served_tokens_s": 0.1})) == MOST_OVER * 32.0
    assert offered_load(signals(running=0, target=0, waiting=5.0)) == 5.0
