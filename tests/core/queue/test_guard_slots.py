"""Slots kept free for the classes from `high` up: whom that helps, what it costs, and that nobody starves of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Grant, Preempt, QueuePolicy
from serve_app.core.queue.drain_rate import guard_slots
from serve_app.core.queue.stoppable_runs import GROWN_S, RESUMED_S
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, arrival, arrive, where
from tests.effort import examples

SLOTS = 8
LONG_S = 600.0  # many fade times: what was granted before is forgotten


def make_queue(share: float = 0.25, slots: int = SLOTS, min_share: float = 0.0) -> Admission:
    made = Admission(QueuePolicy(1000, 3600.0, min_share=min_share, guard_slots_share=share))
    set_replica(made, "r", slots, 0.0)
    return made


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def granted(actions: Iterable[Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Grant)]


def with_high(made: Admission, count: int) -> None:
    """So many of class high run for a second, ten times over: their part of the drain is that of the slots."""
    for second in range(10):
        ran = granted(arrive(made, *names(f"before{second}-", count), cls=HIGH, now=float(second)))
        for name in ran:
            made.on_done(name, second + 1.0)
    assert (made.waiting, made.scheduler.running) == (0, {})


@pytest.mark.parametrize(("count", "free"), [(0, 0), (1, 2), (2, 3), (6, 7), (11, 8)])
def test_the_more_of_the_load_high_is_the_more_stays_free_for_it(count: int, free: int) -> None:
    made = make_queue(share=0.5, slots=16)
    with_high(made, count)
    assert len(granted(arrive(made, *names("n", 40), now=10.0))) == 16 - free
    assert len(granted(arrive(made, *names("h", 40), cls=HIGH, now=10.0))) == free


def test_no_more_than_the_share_stays_free() -> None:
    made = make_queue(share=0.25)
    with_high(made, 6)
    assert len(granted(arrive(made, *names("n", 20), now=10.0))) == SLOTS - 2


def test_what_was_kept_is_given_out_once_high_stays_away() -> None:
    made = make_queue(share=0.5)
    with_high(made, SLOTS // 2)
    arrive(made, *names("n", 20), now=10.0)
    assert len(granted(made.on_done("n0", 10.1))) == 1
    assert len(granted(made.on_done("n1", 10.1 + LONG_S))) > 1


def test_critical_may_take_what_is_kept() -> None:
    made = make_queue(share=0.5)
    with_high(made, SLOTS // 2)
    arrive(made, *names("l", 20), cls=LOW, now=10.0)
    assert granted(arrive(made, "h", cls=HIGH, now=10.1)) == ["h"]
    assert granted(arrive(made, "c", cls=CRITICAL, now=10.1)) == ["c"]


def test_free_guard_slots_are_no_room_so_a_lower_class_stops() -> None:
    made = make_queue(share=0.25)
    with_high(made, 6)
    arrivals = [arrival(f"l{number}", LOW, preemptible=True) for number in range(12)]
    low = granted([action for one in arrivals for action in made.on_arrive(one, 10.0)])
    assert len(low) == SLOTS - 2
    ran_s = 10.0 + RESUMED_S
    (stop,) = made.on_arrive(arrival("n", NORMAL), ran_s)
    assert isinstance(stop, Preempt)
    assert stop.request_id in low
    assert made.on_tick(ran_s) == []
    assert granted(made.on_done(stop.request_id, ran_s + 0.1)) == ["n"]
    assert made.capacity.free == 2


def test_no_request_stops_for_slots_that_are_then_kept_for_high() -> None:
    made = make_queue(share=0.25)
    with_high(made, 6)
    for number in range(12):
        made.on_arrive(arrival(f"l{number}", LOW, preemptible=True), 10.0)
    assert len(granted(arrive(made, "h", cls=HIGH, now=10.0))) == 1
    asked_s = 10.0 + RESUMED_S
    assert made.on_arrive(arrival("for it two would have to stop", NORMAL), asked_s) == []
    due = made.next_due()
    assert due is not None, "without `high` the guard slots become fewer with time alone"
    assert asked_s < due <= asked_s + GROWN_S


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_for_a_class_below_the_guarded_ones_only_what_has_run_a_while_stops(share: float) -> None:
    made = make_queue(share=share)
    with_high(made, 6)
    for number in range(12):
        made.on_arrive(arrival(f"l{number}", LOW, preemptible=True), 10.0)
    assert made.on_arrive(arrival("n", NORMAL), 10.0 + RESUMED_S / 2) == []
    assert made.on_tick(10.0 + RESUMED_S - 0.01) == []
    assert made.next_due() == 10.0 + RESUMED_S
    (stop,) = made.on_tick(10.0 + RESUMED_S)
    assert isinstance(stop, Preempt)


def test_off_by_default() -> None:
    made = make_queue(share=QueuePolicy(1, 1.0).guard_slots_share)
    with_high(made, SLOTS // 2)
    assert len(granted(arrive(made, *names("n", 20), now=10.0))) == SLOTS


def test_a_replica_too_small_for_it_keeps_nothing() -> None:
    made = make_queue(share=0.5, slots=1)
    for n in range(9):
        arrive(made, f"h{n}", cls=HIGH, now=float(n))
        made.on_done(f"h{n}", n + 0.9)
    assert where(arrive(made, "n", now=10.0)) == {"n": "r"}


def test_a_request_of_all_slots_still_runs() -> None:
    made = make_queue(share=0.5)
    with_high(made, SLOTS // 2)
    assert where(arrive(made, "whole", slots=SLOTS, now=10.0)) == {"whole": "r"}


def test_the_minimum_share_goes_into_it() -> None:
    """High has all slots but those that are kept, for ever, and never waits: only the trickle lets `low` run."""

    def served(min_share: float) -> int:
        made = make_queue(share=0.5, min_share=min_share)
        taken = 0
        with_high(made, 6)
        arrive(made, *names("h", SLOTS // 2), cls=HIGH, now=10.0)
        waiting = set(names("l", 10))
        arrive(made, *sorted(waiting), cls=LOW, now=10.0)
        for n in range(100):
            now = 10.0 + n / SLOTS
            actions = arrive(made, f"h{n + SLOTS // 2}", cls=HIGH, now=now) + made.on_done(f"h{n}", now)
            for name in granted(actions):
                if name in waiting:
                    waiting.remove(name)
                    taken += 1
                    made.on_done(name, now)
        return taken

    assert served(min_share=0.0) == 0
    assert served(min_share=0.05) >= 4


def test_who_comes_below_it_is_given_a_wait() -> None:
    made = make_queue(share=0.5)
    with_high(made, SLOTS // 2)
    ran = granted(arrive(made, *names("n", SLOTS), now=10.0))
    assert len(ran) < SLOTS
    assert made.forecast.arrival_wait_s(HIGH, 1, "tenant") == 0.0
    assert (made.forecast.arrival_wait_s(NORMAL, 1, "tenant") or 0.0) > 0.0


@pytest.mark.parametrize("share", [-0.1, 0.51, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="guard_slots_share"):
        QueuePolicy(1, 1.0, guard_slots_share=share)


@given(st.floats(0, 0.5), st.integers(0, 500), st.floats(0, 3))
def test_it_is_never_all_there_is(share: float, slots: int, part: float) -> None:
    assert 0 <= guard_slots(share, slots, part) < max(1, slots)


@given(st.floats(0, 1), st.floats(0, 1))
def test_it_grows_with_the_part_of_the_load(first: float, other: float) -> None:
    assert guard_slots(0.5, 1000, min(first, other)) <= guard_slots(0.5, 1000, max(first, other))


Step = tuple[RequestClass, int, bool]


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(RequestClass), st.integers(1, 4), st.booleans()), max_size=60))
def test_everybody_runs_in_the_end_whatever_is_kept(steps: list[Step]) -> None:
    made = make_queue(share=0.5, min_share=0.05)
    running = []
    done = set[str]()
    now = 0.0
    for number, (cls, slots, ends) in enumerate(steps):
        now += 0.01
        running += granted(made.on_arrive(arrival(f"r{number}", cls, slots), now))
        if ends and running:
            done.add(running[0])
            running += granted(made.on_done(running.pop(0), now))
    while running:
        now += 0.01
        done.add(running[0])
        running += granted(made.on_done(running.pop(0), now))
    assert made.waiting == 0
    assert done == {f"r{number}" for number in range(len(steps))}
