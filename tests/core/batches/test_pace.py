"""Rows in flight: what is idle and not one more, whose rows are next, pauses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.batches import ModelFigures, ModelPace, Pauses, WaitingRows, share_rows
from tests.core.batches.simulated_queue import SimulatedQueue


def may_start(figures: ModelFigures, in_flight: int = 0, max_in_flight: int = 512, workers: int = 1) -> int:
    """Rows that may start with `in_flight` rows sent long ago."""
    pace = ModelPace(max_in_flight, workers)
    for _ in range(in_flight):
        pace.on_start(0.0)
    pace.on_figures(figures, in_flight, 100.0, hand_over_s=0.05)
    return pace.may_start(100.0)


def test_idle_slots_are_filled_and_not_one_more() -> None:
    assert may_start(ModelFigures(slots=64, busy=40, waiting=0, waiting_low=0)) == 24
    assert may_start(ModelFigures(slots=64, busy=64, waiting=0, waiting_low=0), in_flight=24) == 0


def test_sequences_of_others_that_wait_have_the_idle_slots_first() -> None:
    assert may_start(ModelFigures(slots=64, busy=54, waiting=7, waiting_low=0), in_flight=10) == 3
    assert may_start(ModelFigures(slots=64, busy=64, waiting=30, waiting_low=0), in_flight=10) == 0


def test_a_slot_that_stays_idle_while_rows_wait_is_not_for_rows() -> None:
    assert may_start(ModelFigures(slots=64, busy=60, waiting=2, waiting_low=2), in_flight=20) == 0


def test_one_row_starts_a_model_without_a_replica_and_the_second_waits_for_it() -> None:
    assert may_start(ModelFigures(0, 0, 0, 0)) == 1
    assert may_start(ModelFigures(0, 0, 1, 1), in_flight=1) == 0


def test_without_figures_one_row_is_in_flight() -> None:
    pace = ModelPace(512)
    assert pace.may_start(0.0) == 1
    pace.on_start(0.0)
    assert pace.may_start(0.0) == 0


def test_old_figures_count_no_more() -> None:
    pace = ModelPace(512)
    pace.on_figures(ModelFigures(64, 0, 0, 0), 0, 0.0, 0.05)
    assert (pace.may_start(4.9), pace.may_start(5.1)) == (64, 1)


def test_two_workers_fill_half_of_what_is_idle_each() -> None:
    assert may_start(ModelFigures(8, 0, 0, 0), workers=2) == 4


def test_rows_sent_just_before_the_figures_are_not_sent_twice() -> None:
    pace = ModelPace(512)
    for _ in range(64):
        pace.on_start(10.0)
    pace.on_figures(ModelFigures(64, 0, 0, 0), 64, 10.01, hand_over_s=0.05)
    assert pace.may_start(10.01) == 0


def test_many_answers_at_once_are_replaced_once() -> None:
    """All slots are idle, and the answers of the rows that left them are on the way to the worker."""
    pace = ModelPace(512)
    for _ in range(64):
        pace.on_start(0.0)
    pace.on_figures(ModelFigures(64, 0, 0, 0), 64, 30.0, hand_over_s=0.05)
    assert pace.may_start(30.0) == 0
    for _ in range(64):
        pace.on_end(30.01)
    assert pace.may_start(30.01) == 64


FIGURES = st.builds(
    lambda slots, share, waiting, low: ModelFigures(slots, int(slots * share), waiting, min(low, waiting)),
    st.integers(0, 300),
    st.floats(0.0, 1.2),
    st.integers(0, 100),
    st.integers(0, 100),
)


@given(st.lists(st.one_of(st.just("start"), st.just("end"), FIGURES), max_size=200), st.integers(1, 100))
def test_whatever_happens_at_least_one_row_may_be_in_flight_and_never_more_than_the_bound(
    events: list[str | ModelFigures], max_in_flight: int
) -> None:
    pace = ModelPace(max_in_flight)
    now = 0.0
    for event in events:
        now += 0.01
        if isinstance(event, ModelFigures):
            pace.on_figures(event, pace.in_flight, now, hand_over_s=0.05)
            more = event.slots - event.busy + 2 * pace.look_ahead(event, now, 0.05) + event.busy
            assert pace.in_flight + pace.may_start(now) <= max(pace.in_flight, more, 1)
        elif event == "start":
            for _ in range(pace.may_start(now)):
                pace.on_start(now)
        elif pace.in_flight:
            pace.on_end(now)
        assert 1 <= pace.in_flight + pace.may_start(now) <= max_in_flight


def short(source: random.Random) -> float:
    return source.expovariate(1 / 0.1)


def middle(source: random.Random) -> float:
    return source.uniform(0.5, 1.5)


def long(source: random.Random) -> float:
    return source.uniform(10.0, 30.0)


@pytest.mark.parametrize("row_s", [short, middle, long])
@pytest.mark.parametrize("slots", [1, 8, 64])
@pytest.mark.parametrize("way_s", [0.005, 0.03])
@pytest.mark.parametrize("people", ["none", "steady", "waves"])
def test_rows_use_nine_tenths_of_what_people_leave_idle_and_wait_no_longer_than_a_hand_over(
    row_s: Callable[[random.Random], float], slots: int, way_s: float, people: str
) -> None:
    rate = {"none": 0.0, "steady": slots / 2, "waves": slots * 0.9}[people]

    def people_per_s(now: float) -> float:
        return rate / 9 if people == "waves" and int(now / 20) % 2 else rate

    measured = SimulatedQueue(slots, row_s, people_per_s=people_per_s, way_s=way_s).run(100.0, warm_up_s=20.0)
    assert measured.idle_used >= 0.9
    # what waits is the look-ahead, and the rows which people overtook between two figures
    overtook = 1 + math.ceil(0.2 * rate)
    assert measured.mean_rows_waiting <= measured.mean_look_ahead + overtook


def test_rows_that_all_end_at_the_same_moment_leave_no_queue_behind() -> None:
    measured = SimulatedQueue(64, lambda source: 30.0, way_s=0.05).run(100.0, warm_up_s=20.0)
    assert measured.idle_used >= 0.9
    assert measured.max_rows_waiting <= 10


def test_slots_that_rows_cannot_have_draw_no_queue() -> None:
    measured = SimulatedQueue(64, middle, usable=16).run(40.0, warm_up_s=20.0)
    assert measured.idle_used >= 0.9 * 16 / 64
    assert measured.mean_rows_waiting <= 2


def test_the_bound_holds_whatever_is_idle() -> None:
    assert SimulatedQueue(64, short, max_in_flight=10).run(20.0, warm_up_s=5.0).max_in_flight == 10


BATCHES = st.lists(
    st.builds(
        WaitingRows,
        batch_id=st.integers(0, 10**9).map(str),
        tenant=st.sampled_from("abc"),
        created_at=st.integers(0, 3).map(float),
        rows=st.integers(0, 4),
    ),
    unique_by=lambda batch: batch.batch_id,
    max_size=6,
)
PER_TENANT = st.dictionaries(st.sampled_from("abc"), st.integers(0, 5))


@given(
    st.integers(0, 20), BATCHES, PER_TENANT, st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 3.0]))
)
def test_the_next_row_is_of_the_tenant_with_the_fewest_in_flight_over_its_weight(
    free: int, waiting: list[WaitingRows], in_flight: dict[str, int], weights: dict[str, float]
) -> None:
    given_rows = share_rows(free, waiting, in_flight, weights)
    left = {batch.batch_id: batch.rows for batch in waiting}
    counts = dict(in_flight)
    expected = dict[str, int]()
    oldest = {
        tenant: min((batch.created_at, batch.batch_id) for batch in waiting if batch.tenant == tenant and batch.rows)
        for tenant in {batch.tenant for batch in waiting if batch.rows}
    }
    for _ in range(free):
        usable = [batch for batch in waiting if left[batch.batch_id]]
        if not usable:
            break
        chosen = min(
            usable,
            key=lambda batch: (
                counts.get(batch.tenant, 0) / weights.get(batch.tenant, 1.0),
                oldest[batch.tenant],
                batch.created_at,
                batch.batch_id,
            ),
        )
        left[chosen.batch_id] -= 1
        counts[chosen.tenant] = counts.get(chosen.tenant, 0) + 1
        expected[chosen.batch_id] = expected.get(chosen.batch_id, 0) + 1
    assert given_rows == expected


def test_a_pause_ends_at_its_time_and_concerns_one_tenant_of_one_model() -> None:
    pauses = Pauses()
    pauses.pause("team", "small", 10.0)
    pauses.pause("team", "small", 5.0)
    assert pauses.is_paused("team", "small", 9.9)
    assert not pauses.is_paused("other", "small", 9.9)
    assert not pauses.is_paused("team", "large", 9.9)
    assert not pauses.is_paused("team", "small", 10.0)
