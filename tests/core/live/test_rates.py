"""Rates from two counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.live import RouterPart, rates


def part(router: str, at: float, **counts: tuple[int, int]) -> RouterPart:
    return RouterPart(router, at, counts={(model, None): pair for model, pair in counts.items()})


def test_rates_are_summed_over_routers_each_by_its_own_clock() -> None:
    before = {"a": part("a", 10.0, chat=(5, 100)), "b": part("b", 900.0, chat=(0, 0))}
    now = {"a": part("a", 12.0, chat=(9, 300)), "b": part("b", 904.0, chat=(4, 40))}
    assert rates(before, now) == {("chat", None): (3.0, 110.0)}


def test_a_router_that_was_not_there_before_says_nothing_yet() -> None:
    assert rates({}, {"a": part("a", 1.0, chat=(5, 5))}) == {}
    before = {"a": part("a", 1.0)}
    assert rates(before, {"a": part("a", 3.0, chat=(5, 5))}) == {}, "nor of a model that it did not count"


@given(*[st.tuples(st.integers(0, 100), st.integers(0, 100))] * 2)
def test_no_rate_is_negative(before: tuple[int, int], now: tuple[int, int]) -> None:
    """A router that has started anew under the same id, or a request between two runs."""
    found = rates({"a": part("a", 0.0, chat=before)}, {"a": part("a", 2.0, chat=now)})
    assert all(rate >= 0 for pair in found.values() for rate in pair)


def test_two_counts_of_one_moment_say_nothing() -> None:
    before = {"a": part("a", 1.0, chat=(1, 1))}
    assert rates(before, {"a": part("a", 1.0, chat=(2, 2))}) == {}
