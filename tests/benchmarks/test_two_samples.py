"""The two-sample test finds what is there, as often as it says, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.common.two_samples import compare, power


def exact_p(a: list[float], b: list[float]) -> float:
    """Of the permutation test of U, by all ways to split the values."""
    pooled = a + b

    def u(chosen: tuple[int, ...]) -> float:
        second = [pooled[index] for index in chosen]
        first = [value for index, value in enumerate(pooled) if index not in chosen]
        return sum((y > x) + (y == x) / 2 for x in first for y in second)

    centre = len(a) * len(b) / 2
    seen = abs(u(tuple(range(len(a), len(pooled)))) - centre)
    splits = [abs(u(one) - centre) >= seen for one in itertools.combinations(range(len(pooled)), len(b))]
    return sum(splits) / len(splits)


@pytest.mark.parametrize("seed", range(8))
def test_p_is_that_of_all_permutations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=7).round(1).tolist()
    b = (rng.normal(size=7) + seed / 4).round(1).tolist()
    assert compare(a, b).p == pytest.approx(exact_p(a, b), abs=0.03)


def test_samples_apart_are_reported_and_equal_ones_are_not() -> None:
    apart = compare([1.0, 2.0, 3.0] * 10, [11.0, 12.0, 13.0] * 10)
    assert apart.p < 1e-9
    assert (apart.auc, apart.shift) == (1.0, 10.0)
    assert apart.low <= 10.0 <= apart.high
    same = compare([5.0] * 10, [5.0] * 10)
    assert (same.p, same.auc, same.shift) == (1.0, 0.5, 0.0)


def test_the_interval_holds_the_shift_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        comparison = compare(rng.exponential(size=30).tolist(), (rng.exponential(size=30) + 0.5).tolist())
        held += comparison.low <= 0.5 <= comparison.high
    assert 0.92 <= held / 400 <= 0.98


def test_power_is_the_level_without_a_shift_and_rises_with_it() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(size=200).tolist()
    none, some, much = (power(noise, shift, 50, 0.05, rng) for shift in (0.0, 0.5, 2.0))
    assert 0.03 <= none <= 0.07
    assert none < some < much
    assert much > 0.999


def test_an_empty_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="samples of 0"):
        compare([], [1.0])
