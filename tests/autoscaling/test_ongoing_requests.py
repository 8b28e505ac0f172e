"""The policy by ongoing requests, on a clock that is a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaling.policies import Cause, Decision, OngoingRequestsPolicy, ScaleUpLimit, Signals, within_scale_up_limit
from autoscaling.policies.ongoing_requests import FURTHER_HOLD_S, PLACE_S, START_HOLD_S, Average, replicas_for
from tests.autoscaling.fake_serve import signals

counts = st.floats(0, 1e6) | st.integers(0, 1000).map(float)
spans = st.sampled_from([0.0, 0.1, 0.25, 1.0, 4.0, 20.0])


@st.composite
def any_signals(draw: st.DrawFn) -> Signals:
    low = draw(st.integers(0, 5))
    return signals(
        running=draw(st.integers(0, 10)),
        target=draw(st.integers(0, 10)),
        waiting=draw(counts),
        granted=draw(counts),
        executing=draw(counts),
        complete=draw(st.booleans()),
        cold_start_requested=draw(st.booleans()),
        min_replicas=low,
        max_replicas=draw(st.integers(max(low, 1), 12)),
        target_ongoing=draw(st.floats(0.01, 1000)),
        look_back_s=draw(st.floats(0, 60)),
        unplaced=draw(st.integers(0, 3)),
        outdated=draw(st.integers(0, 3)),
        stopping=draw(st.integers(0, 2)),
        rows=draw(counts),
    )


def decide(seen: list[Signals]) -> list[Decision]:
    policy = OngoingRequestsPolicy()
    return [policy.decide(one) for one in seen]


def timed(seen: list[Signals], gaps: list[float]) -> list[Signals]:
    """The same one after the other, `gaps` seconds apart."""
    moments = [sum(gaps[: index + 1]) for index in range(len(seen))]
    return [replace(one, now=moment) for one, moment in zip(seen, moments, strict=True)]


history = st.lists(st.tuples(any_signals(), spans), min_size=1, max_size=12)


@settings(deadline=None)
@given(history)
def test_what_is_asked_for_is_within_the_bounds_and_has_a_reason(seen: list[tuple[Signals, float]]) -> None:
    moments = timed([one for one, _ in seen], [gap for _, gap in seen])
    for moment, decision in zip(moments, decide(moments), strict=True):
        assert moment.min_replicas <= decision.replicas <= moment.max_replicas
        assert decision.reason
        assert 0 <= decision.load < float("inf")


@settings(deadline=None)
@given(history, st.sampled_from(["waiting", "granted", "executing"]), st.lists(counts, min_size=12, max_size=12))
def test_more_load_never_gives_fewer_replicas(seen: list[tuple[Signals, float]], field: str, more: list[float]) -> None:
    """With the same bounds and replicas at every moment, and somebody waiting for those that start."""
    moments = timed([one for one, _ in seen], [gap for _, gap in seen])
    loaded = [replace(one, **{field: getattr(one, field) + extra}) for one, extra in zip(moments, more, strict=False)]
    less = decide(moments)
    rather_more = decide(loaded)
    assert all(a.replicas <= b.replicas for a, b in zip(less, rather_more, strict=True))


def test_a_look_back_that_grows_knows_as_much_of_a_load_that_stayed_as_of_one_that_changed() -> None:
    stayed = Average()
    changed = Average()
    for average, second in ((stayed, 1.0), (changed, 2.0)):
        average.add(1.0, 0.0, 0.0)
        average.add(second, 0.1, 0.0)
    assert stayed.add(0.0, 0.1, 1.0) == changed.add(0.0, 0.1, 1.0) == 0.0


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_a_request_counts_once_wherever_it_is_seen(waiting: int, granted: int, leaving: int) -> None:
    """Granted requests run on engines, which see those of routers that are leaving as well."""
    seen = signals(waiting=float(waiting), granted=float(granted), executing=float(granted + leaving))
    assert seen.load == max(waiting + granted, granted + leaving)
    (decision,) = decide([seen])
    assert decision.load == seen.load


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 500))
def test_as_many_replicas_as_keep_each_at_its_target(load: int, target: float) -> None:
    wanted = replicas_for(load, target)
    assert wanted * target >= load * (1 - 1e-5)
    assert wanted <= 1 or (wanted - 1) * target < load


@pytest.mark.parametrize(("load", "wanted"), [(0, 0), (1, 1), (20, 1), (21, 2), (40, 2), (41, 3), (1000, 8)])
def test_the_shipped_example_twenty_each_up_to_eight(load: int, wanted: int) -> None:
    (decision,) = decide([signals(granted=float(load), target_ongoing=20.0)])
    assert decision.replicas == wanted


def test_an_average_of_equal_numbers_starts_no_replica() -> None:
    policy = OngoingRequestsPolicy()
    asked = {policy.decide(signals(granted=20.0, target_ongoing=20.0, now=0.1 * tick)).replicas for tick in range(300)}
    assert asked == {1}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3)), min_size=1, max_size=30), st.floats(0, 10))
def test_the_average_is_that_of_the_steps_in_the_span(steps: list[tuple[float, float]], span_s: float) -> None:
    average = Average()
    now = 0.0
    seen = []
    for value, gap in steps:
        now += gap
        seen.append((now, value))
        mean = average.add(value, now, span_s)
    start = max(seen[0][0], now - span_s)
    pieces = [
        (value, max(0.0, end - max(at, start)))
        for (at, value), end in zip(seen, [*(at for at, _ in seen), now][1:], strict=True)
    ]
    total = sum(length for _, length in pieces)
    wanted = sum(value * length for value, length in pieces) / total if total > 1e-9 else mean
    assert mean == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_the_average_keeps_no_more_than_the_span() -> None:
    average = Average()
    for tick in range(10_000):
        average.add(float(tick % 7), tick * 0.1, 5.0)
    assert len(average.steps) <= 52


def test_a_burst_is_believed_as_the_look_back_fills_with_it() -> None:
    policy = OngoingRequestsPolicy()
    policy.decide(signals(now=0.0))
    asked = {}
    for tick in range(101):
        now = 10.0 + 0.1 * tick
        asked[now] = policy.decide(signals(waiting=40.0, now=now)).replicas
    assert asked[10.0] <= 1
    assert asked[max(asked)] == 4
    assert list(asked.values()) == sorted(asked.values())


# From zero.


def from_zero(**changes: Any) -> Signals:
    return signals(**({"running": 0, "target": 0} | changes))


def test_what_waits_at_zero_is_answered_at_once_and_in_full() -> None:
    policy = OngoingRequestsPolicy()
    policy.decide(from_zero(now=0.0))
    assert policy.decide(from_zero(now=0.1)).replicas == 0
    assert policy.decide(from_zero(waiting=35.0, now=0.2)).replicas == 4


def test_a_ring_asks_for_one_replica_and_is_no_request() -> None:
    policy = OngoingRequestsPolicy()
    decision = policy.decide(from_zero(cold_start_requested=True))
    assert (decision.replicas, decision.load) == (1, 0.0)
    assert policy.decide(from_zero(cold_start_requested=True, waiting=20.0, now=1.0)).replicas == 2


def test_rows_of_batches_alone_start_one_replica_and_keep_it_and_no_more() -> None:
    from_zero = signals(running=0, target=0, waiting=1.0, rows=1.0)
    running = [signals(waiting=40.0, granted=64.0, rows=104.0, now=float(second)) for second in range(100)]
    over = signals(now=100.0)
    decisions = decide([from_zero, *running, over])
    assert [one.replicas for one in decisions] == [1] * 101 + [0]
    assert decisions[50].reason.startswith("0.0 requests and 104 rows of batches, 40 of them waiting now, at 10 a")


def test_requests_beside_rows_get_the_replicas_that_they_would_get_alone() -> None:
    alone = signals(waiting=25.0, granted=20.0, executing=20.0)
    beside = replace(alone, waiting=35.0, granted=64.0, rows=54.0)
    assert [one.replicas for one in decide([alone])] == [one.replicas for one in decide([beside])] == [5]
    assert decide([replace(beside, running=0, target=0)])[0].replicas == 5


def test_starting_replicas_are_not_called_off_when_fewer_wait() -> None:
    policy = OngoingRequestsPolicy()
    assert policy.decide(from_zero(waiting=30.0)).replicas == 3
    assert policy.decide(from_zero(target=3, waiting=1.0, now=1.0)).replicas == 3
    assert policy.decide(from_zero(target=3, now=2.0)).replicas == 3
    assert policy.decide(from_zero(target=3, waiting=50.0, now=3.0)).replicas == 5


def test_a_controller_that_comes_back_and_sees_nothing_yet_stops_nothing() -> None:
    """Serve applies what is asked for at zero running replicas at once, without any delay."""
    policy = OngoingRequestsPolicy()
    blind = signals(running=0, target=8, complete=False)
    assert [policy.decide(replace(blind, now=0.1 * tick)).replicas for tick in range(50)] == [8] * 50
    assert policy.decide(replace(blind, running=1, now=5.0)).replicas == 8
    assert policy.decide(replace(blind, running=8, complete=True, executing=75.0, now=6.0)).replicas == 8


def test_a_start_that_outlasts_its_clients_is_not_called_off() -> None:
    policy = OngoingRequestsPolicy()
    policy.decide(from_zero(waiting=1.0))
    assert policy.decide(from_zero(target=1, now=START_HOLD_S - 1.0)).replicas == 1
    assert policy.decide(from_zero(target=1, waiting=1.0, now=START_HOLD_S)).replicas == 1
    assert policy.decide(from_zero(target=1, now=2 * START_HOLD_S)).replicas == 1
    assert policy.decide(from_zero(target=1, now=2 * START_HOLD_S + 1.0)).replicas == 0


def test_a_policy_that_finds_a_start_under_way_waits_for_it() -> None:
    policy = OngoingRequestsPolicy()
    assert policy.decide(from_zero(target=1, now=7.0)).replicas == 1
    assert policy.decide(from_zero(target=1, now=8.0 + START_HOLD_S)).replicas == 0


def test_what_waited_for_the_first_replica_counts_in_full_when_it_comes() -> None:
    """An average over the idle time before would call off the others that start."""
    policy = OngoingRequestsPolicy()
    for tick in range(50):
        policy.decide(from_zero(now=0.1 * tick))
    policy.decide(from_zero(waiting=30.0, now=5.0))
    assert policy.decide(signals(target=3, waiting=30.0, now=5.5)).replicas == 3


# With numbers missing.


def test_an_incomplete_sight_takes_nothing_away_and_may_add() -> None:
    policy = OngoingRequestsPolicy()
    kept = policy.decide(signals(running=3, target=3, complete=False))
    assert kept.replicas == 3
    assert "not every router" in kept.reason
    assert policy.decide(signals(running=3, target=3, complete=False, waiting=500.0, now=10.0)).replicas >= 3
    assert OngoingRequestsPolicy().decide(signals(target=1, complete=False, waiting=35.0)).replicas == 4
    assert OngoingRequestsPolicy().decide(signals(running=3, target=3)).replicas == 0


def test_bounds_are_reported_to_be_the_reason() -> None:
    low = decide([signals(min_replicas=2)])
    high = decide([signals(max_replicas=2, waiting=99.0)])
    assert (low[0].replicas, high[0].replicas) == (2, 2)
    assert "min_replicas is 2" in low[0].reason
    assert "max_replicas is 2" in high[0].reason


def test_a_lull_calls_off_no_replica_that_starts() -> None:
    policy = OngoingRequestsPolicy()
    assert policy.decide(signals(granted=30.0, now=0.0)).replicas == 3
    starting = signals(target=3, look_back_s=0.0)
    assert policy.decide(replace(starting, granted=30.0, now=10.0)).replicas == 3
    lull = policy.decide(replace(starting, now=10.0 + FURTHER_HOLD_S))
    assert (lull.replicas, "while a part of it starts" in lull.reason) == (3, True)
    assert policy.decide(replace(starting, granted=25.0, now=11.0 + FURTHER_HOLD_S)).replicas == 3
    assert policy.decide(replace(starting, now=11.0 + 2 * FURTHER_HOLD_S)).replicas == 3
    assert policy.decide(replace(starting, now=11.1 + 2 * FURTHER_HOLD_S)).replicas == 0


@pytest.mark.parametrize("without_room", [{"unplaced": 2}, {"blocked": 2.0}, {"unplaced": 1, "blocked": 1.0}])
def test_a_lull_calls_off_further_replicas_without_room_and_the_last_one_later(without_room: dict[str, Any]) -> None:
    policy = OngoingRequestsPolicy()
    pinned = signals(target=3, look_back_s=0.0, **without_room)
    assert policy.decide(replace(pinned, granted=30.0)).replicas == 3
    assert policy.decide(replace(pinned, now=1.0)).replicas == 0
    assert policy.decide(replace(pinned, now=1.0, complete=False)).replicas == 3
    assert policy.decide(replace(pinned, now=2.0, target=4)).replicas == 4  # the fourth starts, in a place


def test_a_first_replica_without_room_is_called_off_sooner_than_one_that_starts() -> None:
    for unplaced, hold_s in ((1, FURTHER_HOLD_S), (0, START_HOLD_S)):
        policy = OngoingRequestsPolicy()
        first = signals(running=0, target=1, unplaced=unplaced)
        assert policy.decide(replace(first, waiting=1.0)).replicas == 1
        assert policy.decide(replace(first, now=hold_s)).replicas == 1
        assert policy.decide(replace(first, now=hold_s + 1)).replicas == 0


def test_what_runs_is_given_up_as_soon_as_it_is_not_wanted() -> None:
    policy = OngoingRequestsPolicy()
    assert policy.decide(signals(target=3, running=2, granted=30.0)).replicas == 3
    assert policy.decide(signals(target=3, running=3, look_back_s=0.0, now=1.0)).replicas == 0


# Running replicas that have to be replaced, for their settings have changed.


def in_change(**more: Any) -> Signals:
    """A load for eight replicas; two run with former settings."""
    return signals(running=2, target=3, granted=80.0, outdated=2, **more)


def test_without_room_for_more_what_has_no_place_is_given_up_until_all_is_replaced() -> None:
    """Serve replaces no replica while one that it has started has no place: under load that would be never."""
    policy = OngoingRequestsPolicy()
    assert policy.decide(in_change(unplaced=1)).replicas == 8, "a place may be found"
    given_up = policy.decide(in_change(unplaced=1, now=PLACE_S))
    assert given_up.replicas == 2
    assert "2 have to be replaced and there is no room for more" in given_up.reason
    again = in_change(now=PLACE_S + 1)
    assert policy.decide(replace(again, target=2)).replicas == 2, "nor is it started again"
    ending = replace(again, running=1, target=2, outdated=1, stopping=1, unplaced=1)
    assert policy.decide(ending).replicas == 2, "the new one gets the place of the one that ends"
    done = replace(again, running=2, target=2, outdated=0)
    assert policy.decide(done).replicas == 8


def test_with_room_for_more_the_load_is_followed_while_replicas_are_replaced() -> None:
    policy = OngoingRequestsPolicy()
    for moment in range(4):
        placed = policy.decide(in_change(unplaced=1 - moment % 2, now=moment * PLACE_S))
        assert placed.replicas == 8


def test_new_replicas_beside_the_old_ones_take_none_of_these_away() -> None:
    policy = OngoingRequestsPolicy()
    surge = in_change(unplaced=2)
    assert policy.decide(replace(surge, target=2)).replicas == 8
    assert policy.decide(replace(surge, target=2, now=PLACE_S)).replicas == 2


# Replicas that wait for memory.


def test_no_replica_is_added_while_one_waits_for_memory_and_the_reason_says_so() -> None:
    policy = OngoingRequestsPolicy()
    blocked = policy.decide(signals(running=1, target=2, granted=100.0, blocked=1.0))
    assert blocked.replicas == 2
    assert "1 wait for memory" in blocked.reason
    assert policy.decide(signals(running=1, target=2, granted=100.0, now=1.0)).replicas == 8


def test_from_none_no_more_start_than_wait_for_memory_already() -> None:
    (decision,) = decide([signals(running=0, target=1, waiting=100.0, blocked=1.0)])
    assert decision.replicas == 1


def test_replicas_are_taken_away_and_the_least_kept_while_one_waits_for_memory() -> None:
    policy = OngoingRequestsPolicy()
    assert policy.decide(signals(running=3, target=3, blocked=1.0)).replicas == 0
    (decision,) = decide([signals(running=1, target=1, granted=5.0, blocked=1.0, min_replicas=2)])
    assert decision.replicas == 2


# Each rule names itself as the cause.


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"waiting": 30.0}, Cause.LOAD),
        ({}, Cause.IDLE),
        ({"rows": 8.0, "granted": 8.0}, Cause.ROWS),
        ({"running": 0, "target": 0}, Cause.IDLE),
        ({"running": 0, "target": 0, "waiting": 30.0}, Cause.COLD_START),
        ({"running": 0, "target": 0, "cold_start_requested": True}, Cause.COLD_START),
        ({"running": 0, "target": 1}, Cause.STARTING),
        ({"running": 1, "target": 3}, Cause.STARTING),
        ({"running": 3, "target": 3, "complete": False}, Cause.UNREPORTED),
        ({"waiting": 30.0, "blocked": 1.0}, Cause.MEMORY),
        ({"min_replicas": 2}, Cause.MIN_REPLICAS),
        ({"max_replicas": 2, "waiting": 99.0}, Cause.MAX_REPLICAS),
    ],
)
def test_a_decision_names_the_rule_that_made_it(changes: dict[str, Any], cause: Cause) -> None:
    assert decide([signals(**changes)])[0].cause is cause


def test_an_average_that_wants_another_number_than_the_load_now_is_named() -> None:
    busy, lull = decide([signals(granted=40.0, target=4, running=4), signals(target=4, running=4, now=1.0)])
    assert (busy.cause, lull.cause) == (Cause.LOAD, Cause.LOOK_BACK)


def test_a_roll_out_without_room_is_named() -> None:
    full = signals(running=2, target=3, waiting=99.0, unplaced=1, outdated=2)
    assert decide([full, replace(full, now=PLACE_S)])[-1].cause is Cause.ROLLOUT


def test_a_shortage_of_memory_is_named() -> None:
    wanted = decide([signals(waiting=30.0)])[0]
    assert within_scale_up_limit(wanted, 2, ScaleUpLimit(1, "full")).cause is Cause.MEMORY
    assert within_scale_up_limit(wanted, 2, ScaleUpLimit(2, "")).cause is wanted.cause
