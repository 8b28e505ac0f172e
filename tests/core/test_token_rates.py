"""Rates of tokens from totals that are looked at now and then."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.token_rates import LOOK_S, WINDOW_S, TokenFlow, TokenRates, TotalRate
from tests.effort import examples

STEPS = st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 10_000)), min_size=1, max_size=60)


def test_the_first_look_has_no_rate_and_a_steady_one_is_found_at_once() -> None:
    rate = TotalRate()
    assert rate.per_s(500, 100.0) == 0.0
    assert rate.per_s(600, 100.5) == 200.0
    assert rate.per_s(900, 102.0) == 200.0


def test_what_came_before_the_window_counts_no_more() -> None:
    rate = TotalRate()
    for second in range(10):
        rate.per_s(1000 * second, float(second))
    idle = [rate.per_s(9000, 9.0 + second) for second in range(1, int(WINDOW_S) + 10)]
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] == 0.0
    assert rate.per_s(9300, 10.0 + WINDOW_S + 9.0) == pytest.approx(300 / WINDOW_S, rel=2 * LOOK_S / WINDOW_S)


@given(steps=STEPS)
@settings(max_examples=examples(100))
def test_a_rate_is_within_the_bounds_of_the_steps_and_little_is_kept(steps: list[tuple[float, int]]) -> None:
    rate = TotalRate()
    total = 0
    now = 50.0
    rate.per_s(0, now)
    for gap_s, more in steps:
        total += more
        now += gap_s
        found = rate.per_s(total, now)
        assert found >= 0.0
        assert found * (now - 50.0) <= total * max(1.0, (now - 50.0) / WINDOW_S) + 1e-6
        assert rate.looks <= WINDOW_S / LOOK_S + 2


def test_tokens_of_runs_count_while_they_run_and_once() -> None:
    flow = TokenFlow()
    flow.rates(0.0)
    flow.arrived += 900
    assert flow.rates(10.0, running=300) == TokenRates(90.0, 30.0)
    flow.served += 600  # it has ended
    assert flow.rates(20.0) == TokenRates(45.0, 30.0)


def test_what_was_estimated_wrongly_counts_no_longer_than_its_request_runs() -> None:
    flow = TokenFlow()
    flow.rates(0.0)
    flow.arrived += 4000  # of which it needs 500
    assert flow.rates(10.0).arrived == 400.0
    flow.on_run_end(200, 4000)
    flow.on_run_end(0, 0)  # a replica that took nothing
    flow.on_run_end(300, 0)
    assert flow.rates(20.0) == TokenRates(25.0, 25.0)


def test_a_request_that_no_replica_has_served_stays_as_it_came() -> None:
    flow = TokenFlow()
    flow.rates(0.0)
    flow.arrived += 100
    flow.on_run_end(0, 100)
    assert flow.rates(10.0) == TokenRates(10.0, 0.0)


def test_a_total_that_falls_is_no_negative_rate() -> None:
    flow = TokenFlow()
    flow.rates(0.0, running=500)
    assert flow.rates(5.0).served == 0.0
