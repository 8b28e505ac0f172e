"""Retries are a share of what is answered; beyond that they wait for their turn. The clock is a number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.routing.retry_budget import BURST, LEAST_PER_S, SHARE, RetryBudget


def test_a_burst_is_free_and_what_comes_after_it_has_its_turn() -> None:
    budget = RetryBudget()
    waits = [budget.take(0.0) for _ in range(int(BURST) + 3)]
    assert waits[: int(BURST)] == [0.0] * int(BURST)
    assert waits[int(BURST) :] == pytest.approx([1 / LEAST_PER_S, 2 / LEAST_PER_S, 3 / LEAST_PER_S])


def test_answers_earn_retries() -> None:
    budget = RetryBudget(left=0.0)
    for _ in range(round(10 / SHARE)):
        budget.on_answer()
    waits = [budget.take(0.0) for _ in range(11)]
    assert waits[:10] == pytest.approx([0.0] * 10)
    assert waits[10] > 0.0


def test_a_long_quiet_time_saves_no_more_than_a_burst() -> None:
    budget = RetryBudget()
    budget.take(0.0)
    assert [budget.take(1e6) > 0.0 for _ in range(int(BURST) + 1)][-2:] == [False, True]


@given(st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_retries_begin_no_faster_than_the_budget(steps: list[tuple[float, int, int]]) -> None:
    budget = RetryBudget()
    now = 0.0
    answers = 0
    begins = list[float]()
    for later_s, answered, retried in steps:
        now += later_s
        for _ in range(answered):
            budget.on_answer()
        answers += answered
        begins += [now + budget.take(now) for _ in range(retried)]
    for number, begun in enumerate(sorted(begins), start=1):
        assert number <= BURST + SHARE * answers + LEAST_PER_S * begun + 1e-6
