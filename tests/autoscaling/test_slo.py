"""The policy by service levels: what it counts, how much it keeps free, and when it changes its mind."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policies import POLICIES, Cause, ClassSignals, Decision, Signals, SloPolicy
from autoscaling.policies.slo import HOLD_S, SAFETY, SPARE, STARTS_HELD, slots_needed
from tests.effort import examples

SLOTS = 8.0
START_S = 30.0


def signals(now: float = 0.0, **more: Any) -> Signals:
    common: dict[str, Any] = {"running": 4, "target": 4, "waiting": 0.0, "granted": 0.0, "executing": 0.0}
    common |= {"complete": True, "cold_start_requested": False, "min_replicas": 0, "max_replicas": 100}
    common |= {"target_ongoing": 20.0, "look_back_s": 5.0, "now": now, "slots": SLOTS, "start_s": START_S}
    return Signals(**common | more)


def steady(policy: SloPolicy, target: int, begin: float, span_s: float, **more: Any) -> Decision:
    """What it decides at the end of a span with the same signals each second; its target is followed at once."""
    decision = policy.decide(signals(begin, running=target, target=target, **more))
    for second in range(1, int(span_s) + 1):
        target = decision.replicas
        decision = policy.decide(signals(begin + second, running=target, target=target, **more))
    return decision


@given(load=st.integers(0, 500), safety=st.floats(0.0, 5.0), slots=st.integers(1, 64))
@settings(max_examples=examples(100))
def test_replicas_have_slots_for_the_load_and_its_swings_and_not_one_more(load: int, safety: float, slots: int) -> None:
    wanted = SloPolicy(safety).decide(signals(granted=float(load), slots=float(slots), running=1, target=1)).replicas
    bound = min(100, max(1, math.ceil((load + safety * math.sqrt(load)) / slots - 1e-6)))
    assert wanted == bound


def test_requests_that_start_in_time_need_no_further_replica() -> None:
    late = SloPolicy().decide(signals(granted=32.0, waiting=40.0))
    in_time = SloPolicy().decide(signals(granted=32.0, waiting=40.0, in_time=40.0))
    assert late.replicas > in_time.replicas == math.ceil((32 + SAFETY * math.sqrt(32)) / SLOTS)


def test_the_reason_names_the_classes_that_would_start_too_late() -> None:
    classes = (
        ClassSignals("high", waiting=5.0, in_time=2.0),
        ClassSignals("normal", waiting=20.0, granted=9.0, in_time=8.0),
        ClassSignals("low", waiting=4.0, in_time=3.6),
    )
    seen = {"granted": 32.0, "waiting": 29.0, "in_time": 13.6}
    known = SloPolicy().decide(signals(classes=classes, **seen))
    assert "would start too late (late now: 3 of high, 12 of normal), and" in known.reason
    assert known.replicas == SloPolicy().decide(signals(**seen)).replicas


def test_what_waits_counts_by_the_slots_that_serve_it_within_a_start() -> None:
    def wanted(**more: float) -> int:
        return SloPolicy(safety=0.0).decide(signals(granted=32.0, waiting=64.0, running=4, target=4, **more)).replicas

    # a slot serves 10 tokens/s, so 100 tokens take 10 s, a third of a start
    assert wanted(waiting_tokens=6400.0, served_tokens_s=320.0) == math.ceil((32 + 64 / 3) / SLOTS)
    assert wanted(waiting_tokens=64_000.0, served_tokens_s=320.0) == (32 + 64) / SLOTS, "never as more than a slot"
    for unknown in ({"waiting_tokens": 6400.0}, {"served_tokens_s": 320.0}, {}):
        assert wanted(**unknown) == (32 + 64) / SLOTS


@given(
    waiting=st.floats(0.0, 1e4),
    granted=st.floats(0.0, 1e4),
    in_time=st.floats(0.0, 1e4),
    tokens=st.floats(0.0, 1e7),
    rate=st.floats(0.0, 1e6),
    start_s=st.floats(0.1, 600.0),
)
@settings(max_examples=examples(200))
def test_the_slots_needed_lie_between_what_runs_and_all_that_is_late(
    waiting: float, granted: float, in_time: float, tokens: float, rate: float, start_s: float
) -> None:
    in_time = min(in_time, waiting)
    known = signals(waiting=waiting, granted=granted, in_time=in_time, waiting_tokens=tokens, served_tokens_s=rate)
    assert granted - 1e-6 <= slots_needed(known, start_s) <= granted + waiting - in_time + 1e-6


def test_the_part_kept_free_shrinks_with_size() -> None:
    parts = [
        SloPolicy().decide(signals(granted=load, running=1, target=1)).replicas * SLOTS / load
        for load in (16.0, 64.0, 256.0, 640.0)
    ]
    assert parts == sorted(parts, reverse=True)


def test_without_known_slots_the_target_per_replica_counts() -> None:
    wanted = SloPolicy(safety=0.0).decide(signals(granted=100.0, slots=0.0)).replicas
    assert wanted == 5


def test_more_is_wanted_at_once_and_less_only_after_ten_starts() -> None:
    policy = SloPolicy()
    assert steady(policy, 4, 0.0, 30.0, granted=64.0).replicas == 10
    hold_s = min(HOLD_S[1], STARTS_HELD * START_S)
    kept = steady(policy, 10, 31.0, hold_s - 5.0, granted=8.0)
    assert (kept.replicas, kept.cause) == (10, Cause.LOOK_BACK)
    assert "not long ago" in kept.reason
    assert steady(policy, 10, 31.0 + hold_s, 60.0, granted=8.0).replicas < 10


def test_a_policy_that_has_just_begun_keeps_what_is_there() -> None:
    assert SloPolicy().decide(signals(granted=1.0, running=12, target=12)).replicas == 12


def test_a_short_start_is_repeated_sooner() -> None:
    policy = SloPolicy()
    assert steady(policy, 10, 0.0, HOLD_S[0] + 5.0, granted=8.0, start_s=2.0).replicas < 10


@pytest.mark.parametrize("swing", [1.0, 2.0])
def test_a_load_at_the_edge_between_two_numbers_starts_and_ends_none(swing: float) -> None:
    edge = next(load for load in range(50, 200) if (load + SAFETY * math.sqrt(load)) / SLOTS > 10)
    assert swing < SPARE * math.sqrt(edge)
    policy = SloPolicy()
    target = 10
    numbers = []
    for second in range(3000):
        load = edge + swing * (1 if second // 300 % 2 else -1)
        target = policy.decide(signals(float(second), granted=load, running=target, target=target)).replicas
        numbers.append(target)
    assert len(set(numbers[600:])) == 1


def test_to_none_it_goes_when_nothing_has_come_for_the_hold() -> None:
    policy = SloPolicy()
    assert steady(policy, 2, 0.0, 200.0).replicas == 2
    assert steady(policy, 2, 201.0, HOLD_S[1]).replicas == 0


def test_a_row_of_a_batch_keeps_one() -> None:
    decision = steady(SloPolicy(), 3, 0.0, 700.0, granted=50.0, rows=50.0)
    assert (decision.replicas, decision.cause) == (1, Cause.ROWS)


def test_without_every_router_none_is_removed() -> None:
    policy = SloPolicy()
    decision = steady(policy, 6, 0.0, 700.0, granted=1.0, complete=False)
    assert (decision.replicas, decision.cause) == (6, Cause.UNREPORTED)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_bounds(name: str) -> None:
    policy = POLICIES[name]()
    assert policy.decide(signals(granted=1e6, max_replicas=7)).replicas == 7
    assert policy.decide(signals(1.0, min_replicas=3, running=0, target=0)).replicas == 3
