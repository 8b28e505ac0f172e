"""The fading histogram: near the true quantile, unmoved by cuts, the same size for ever."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.estimate.histogram import BUCKETS_PER_OCTAVE, FadingHistogram, bucket_edge

FOR_EVER = 1e9  # a half-life in which nothing fades
BUCKET = 2 ** (1 / BUCKETS_PER_OCTAVE)
values = st.lists(st.integers(1, 100_000), min_size=1, max_size=200)


def filled(numbers: Sequence[float], half_life: float = FOR_EVER) -> FadingHistogram:
    histogram = FadingHistogram(17, half_life)
    for number in numbers:
        histogram.add(number)
    return histogram


@settings(deadline=None)
@given(values, st.floats(0.05, 0.95))
def test_a_quantile_is_within_a_bucket_of_the_true_one(numbers: list[int], share: float) -> None:
    ordered = sorted(numbers)
    found = filled(numbers).quantile(share)
    assert found is not None
    below = ordered[max(0, math.ceil(share * len(ordered) - 1e-3) - 1)]
    above = ordered[min(len(ordered) - 1, math.floor(share * len(ordered) + 1e-3))]
    assert below / BUCKET <= found * 1.0001
    assert found <= above * BUCKET * 1.0001


@settings(deadline=None)
@given(values, st.floats(0.05, 0.5), st.floats(0.5, 0.95))
def test_a_higher_share_gives_no_lower_quantile(numbers: list[int], low: float, high: float) -> None:
    histogram = filled(numbers)
    first = histogram.quantile(low)
    second = histogram.quantile(high)
    assert first is not None
    assert second is not None
    assert first <= second * 1.0001


def test_an_empty_one_knows_no_quantile() -> None:
    assert FadingHistogram(17, 10.0).quantile(0.5) is None


def test_values_outside_the_range_count_as_its_ends() -> None:
    low = filled([0.0, 0.5]).quantile(0.9)
    high = filled([1e30]).quantile(0.5)
    assert low is not None
    assert low <= BUCKET
    assert high is not None
    assert bucket_edge(17 * BUCKETS_PER_OCTAVE - 1) <= high <= 2**17


def test_the_old_fades_and_counts_half_after_a_half_life() -> None:
    histogram = filled([10.0] * 3000, half_life=100)
    for _ in range(99):
        histogram.add(1000.0)
    before = histogram.quantile(0.5)
    for _ in range(3):
        histogram.add(1000.0)
    after = histogram.quantile(0.5)
    assert before is not None
    assert before < 12
    assert after is not None
    assert after > 900


def test_fading_survives_many_rescalings() -> None:
    histogram = filled([10.0, 1000.0] * 5000, half_life=20)
    low = histogram.quantile(0.3)
    high = histogram.quantile(0.7)
    assert low is not None
    assert low == pytest.approx(10, rel=0.1)
    assert high is not None
    assert high == pytest.approx(1000, rel=0.1)


def test_cut_values_do_not_bias_the_quantile() -> None:
    draw = random.Random(3)
    whole = FadingHistogram(17, FOR_EVER)
    observed = FadingHistogram(17, FOR_EVER)
    for _ in range(20_000):
        true = draw.lognormvariate(5.0, 0.9)
        bound = draw.choice([50.0, 200.0, 1e9])
        whole.add(true)
        observed.add(min(true, bound), is_cut_off=true > bound)
    for share in (0.25, 0.5, 0.8, 0.95):
        expected = whole.quantile(share)
        found = observed.quantile(share)
        assert expected is not None
        assert found == pytest.approx(expected, rel=0.06)


@settings(deadline=None)
@given(values)
def test_where_all_was_cut_no_quantile_is_known_but_a_lower_bound_is(numbers: list[int]) -> None:
    histogram = FadingHistogram(17, FOR_EVER)
    for number in numbers:
        histogram.add(number, is_cut_off=True)
    assert histogram.quantile(0.5) is None
    assert max(numbers) / BUCKET <= histogram.longest_censored() * 1.0001 <= max(numbers) * 1.0002


def test_without_cuts_there_is_no_lower_bound() -> None:
    assert filled([5.0]).longest_censored() == 0.0
