"""Quantiles and intervals: right on samples whose answer is known, silent where there is too little to say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.common import stats


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_a_p99_from_999_samples_is_not_given_and_from_1000_it_is() -> None:
    assert stats.quantile(np.arange(999.0), 0.99) is None
    assert stats.quantile(np.arange(1000.0), 0.99) == pytest.approx(989.01)


def test_a_median_needs_one_sample() -> None:
    assert stats.quantile(np.array([3.0]), 0.5) == 3.0
    assert stats.quantile(np.array([]), 0.5) is None


def test_an_arm_against_itself_has_the_ratio_one_inside_its_interval(rng: np.random.Generator) -> None:
    rounds = [rng.normal(1000, 50, 10) for _ in range(5)]
    found = stats.estimate([rounds, rounds], stats.ratio_of_medians, rng)
    assert found.value == 1.0
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1.0 < found.high
    assert (found.samples, found.rounds) == (50, 5)


def test_a_twofold_arm_has_the_ratio_two_in_a_narrow_interval(rng: np.random.Generator) -> None:
    slow = [rng.normal(1000, 10, 20) for _ in range(5)]
    found = stats.estimate([slow, [2 * r for r in slow]], stats.ratio_of_medians, rng)
    assert found.value == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0, abs=0.05)
    assert found.high == pytest.approx(2.0, abs=0.05)


def test_pairing_rounds_removes_the_drift_that_both_arms_share(rng: np.random.Generator) -> None:
    drift = [1.0, 0.5, 2.0, 0.8, 1.5]
    a = [d * rng.normal(1000, 5, 10) for d in drift]
    b = [d * rng.normal(900, 5, 10) for d in drift]
    paired = stats.estimate([a, b], stats.median_of_ratios, rng)
    assert paired.value == pytest.approx(0.9, abs=0.01)
    assert paired.low is not None
    assert paired.high is not None
    assert paired.high - paired.low < 0.03


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(60):
        rng = np.random.default_rng(trial)
        rounds = [rng.normal(10, 1, 40)]
        low, high = stats.bootstrap([rounds], lambda arms: float(arms[0][0].mean()), rng, resamples=300)
        covered += low <= 10.0 <= high
    assert 50 <= covered <= 60  # 95% of 60 is 57; 50 is out of a fair interval's reach (p < 0.001)


def test_arms_with_different_numbers_of_rounds_are_refused(rng: np.random.Generator) -> None:
    arm = [np.ones(3)]
    two = [np.ones(3), np.ones(3)]
    with pytest.raises(ValueError, match="same number of rounds"):
        stats.bootstrap([arm, two], stats.ratio_of_medians, rng)


def test_missing_rounds_give_no_figure_instead_of_a_wrong_one(rng: np.random.Generator) -> None:
    arm = [np.ones(3)]
    two = [np.ones(3), np.ones(3)]
    assert stats.estimate([arm, two], stats.ratio_of_medians, rng).value is None
    assert stats.estimate([[], []], stats.ratio_of_medians, rng).value is None


def test_a_single_sample_has_a_value_but_no_interval(rng: np.random.Generator) -> None:
    found = stats.estimate([[np.array([5.0])]], lambda arms: stats.median_of_means(arms[0]), rng)
    assert found.as_json() == {"value": 5.0, "interval": None, "samples": 1, "rounds": 1}


def test_ttft_added_is_the_difference_of_pooled_medians(rng: np.random.Generator) -> None:
    a = [np.array([1.0, 2.0, 3.0])] * 2
    b = [np.array([11.0, 12.0, 13.0])] * 2
    assert stats.estimate([a, b], stats.pooled_median_difference, rng).value == 10.0


def test_the_same_seed_gives_the_same_interval() -> None:
    rounds = [np.random.default_rng(1).normal(0, 1, 30) for _ in range(3)]
    first, second = (stats.quantile_estimate(rounds, 0.5, np.random.default_rng(5)) for _ in range(2))
    assert first == second


def test_weighing_clusters_gives_what_drawing_them_whole_gives() -> None:
    rounds = [[np.random.default_rng([k, i]).exponential(2.0, 25) for i in range(8)] for k in range(3)]
    pooled = np.concatenate([c for clusters in rounds for c in clusters])
    median, tail = stats.clustered_quantiles(rounds, [0.5, 0.95], np.random.default_rng(3), resamples=2000)
    assert median.value == pytest.approx(float(np.quantile(pooled, 0.5)))
    assert tail.value == pytest.approx(float(np.quantile(pooled, 0.95)))
    rng = np.random.default_rng(4)
    drawn = []
    for _ in range(2000):
        chosen = [rounds[i] for i in rng.integers(0, 3, 3)]
        drawn.append(float(np.median(np.concatenate([c[j] for c in chosen for j in rng.integers(0, 8, 8)]))))
    low, high = stats.interval(drawn)
    assert median.low == pytest.approx(low, rel=0.05)
    assert median.high == pytest.approx(high, rel=0.05)


def test_clusters_that_move_together_widen_the_interval(rng: np.random.Generator) -> None:
    alike = [[np.full(50, value) for value in rng.normal(10, 1, 20)]]
    mixed = [[rng.permutation(np.concatenate(alike[0]))[:50] for _ in range(20)]]
    wide, narrow = (stats.clustered_quantiles(r, [0.5], rng)[0] for r in (alike, mixed))
    assert wide.low is not None
    assert wide.high is not None
    assert narrow.low is not None
    assert narrow.high is not None
    assert wide.high - wide.low > narrow.high - narrow.low


def test_clustered_quantiles_without_samples_are_null(rng: np.random.Generator) -> None:
    found = stats.clustered_quantiles([[], [np.array([])]], [0.5, 0.99], rng)
    assert [e.value for e in found] == [None, None]
    assert [e.samples for e in found] == [0, 0]


def test_figures_keep_significant_digits_not_decimals() -> None:
    assert stats.shorten(123456.0) == 123500.0
    assert stats.shorten(0.000123456) == 0.0001235
