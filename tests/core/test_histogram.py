"""The fading histogram: near the true quantile, unmoved by cuts, the same size for ever."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.histogram import BUCKETS_PER_OCTAVE, FadingHistogram, edge

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
    first, second = histogram.quantile(low), histogram.quantile(high)
    assert first is not None
    assert second is not None
    assert first <= second * 1.0001


def test_an_empty_one_knows_no_quantile() -> None:
    assert FadingHistogram(17, 10.0).quantile(0.5) is None


def test_values_outside_the_range_count_as_its_ends() -> None:
    low, high = filled([0.0, 0.5]).quantile(0.9), filled([1e30]).quantile(0.5)
    assert low is not None
    assert low <= BUCKET
    assert high is not None
    assert edge(17 * BUCKETS_PER_OCTAVE - 1) <= high <= 2**17


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
    low, high = histogram.quantile(0.3), histogram.quantile(0.7)
    assert low is not None
    assert low == pytest.approx(10, rel=0.1)
    assert high is not None
    assert high == pytest.approx(1000, rel=0.1)


def test_cut_values_do_not_bias_the_quantile() -> None:
    draw = random.Random(3)
    whole, observed = FadingHistogram(17, FOR_EVER), FadingHistogram(17, FOR_EVER)
    for _ in range(20_000):
        true, bound = draw.lognormvariate(5.0, 0.9), draw.choice([50.0, 200.0, 1e9])
        whole.add(true)
        observed.add(min(true, bound), cut=true > bound)
    for share in (0.25, 0.5, 0.8, 0.95):
        expected, found = whole.quantile(share), observed.quantile(share)
        assert expected is not None
        assert found == pytest.approx(expected, rel=0.06)


@settings(deadline=None)
@given(values)
def test_where_all_was_cut_no_quantile_is_known_but_a_lower_bound_is(numbers: list[int]) -> None:
    histogram = FadingHistogram(17, FOR_EVER)
    for number in numbers:
        histogram.add(number, cut=True)
    assert histogram.quantile(0.5) is None
    assert max(numbers) / BUCKET <= histogram.longest_cut() * 1.0001 <= max(numbers) * 1.0002


def test_without_cuts_there_is_no_lower_bound() -> None:
    assert filled([5.0]).longest_cut() == 0.0


@settings(deadline=None)
@given(values, values)
def test_merging_is_having_seen_both(first: list[int], second: list[int]) -> None:
    merged = filled(first)
    merged.merge(filled(second).export())
    both = filled(first + second)
    assert merged.seen == both.seen
    for share in (0.2, 0.5, 0.8):
        assert merged.quantile(share) == pytest.approx(both.quantile(share), rel=0.01)


def test_merging_carries_cuts() -> None:
    cut = FadingHistogram(17, FOR_EVER)
    cut.add(100, cut=True)
    merged = filled([10.0])
    merged.merge(cut.export())
    assert merged.quantile(0.4) == pytest.approx(10, rel=0.1)
    assert merged.quantile(0.6) is None
    assert merged.longest_cut() == pytest.approx(100, rel=0.1)


def test_merged_values_fade_those_before_but_a_long_history_by_half_at_most() -> None:
    merged, long = filled([10.0] * 5000, half_life=100), filled([1000.0] * 5000, half_life=100)
    merged.merge(long.export())
    assert merged.quantile(0.30) == pytest.approx(10, rel=0.1)
    assert merged.quantile(0.37) == pytest.approx(1000, rel=0.1)


def test_an_export_is_plain_and_gives_the_same_quantiles_again() -> None:
    histogram = filled([3.0, 70.0, 900.0] * 100, half_life=50)
    again = FadingHistogram(17, 50)
    again.merge(json.loads(json.dumps(histogram.export())))
    assert again.seen == histogram.seen
    for share in (0.2, 0.5, 0.8):
        assert again.quantile(share) == pytest.approx(histogram.quantile(share), rel=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"seen": 1, "ends": [0.0], "cuts": []},
        {"seen": 1, "ends": [0.0] * 136, "cuts": [0.0]},
        {"seen": 1, "ends": [-1.0] + [0.0] * 135, "cuts": []},
        {"seen": 1, "ends": [math.nan] + [0.0] * 135, "cuts": []},
        {"seen": math.nan, "ends": [0.0] * 136, "cuts": []},
        {"seen": "1", "ends": [0.0] * 136, "cuts": []},
    ],
)
def test_what_is_no_histogram_changes_nothing(wrong: dict[str, list[float] | float]) -> None:
    histogram = filled([5.0, 7.0])
    before = histogram.export()
    with pytest.raises(ValueError, match=r"histogram|buckets|weight"):
        histogram.merge(wrong)
    assert histogram.export() == before
