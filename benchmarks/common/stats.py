"""Quantiles and bootstrap intervals: pure functions of the samples and of a seeded generator.

Samples of one window resemble each other more than samples of two windows do, so every resampling has two stages:
windows (rounds) are drawn first, then the samples inside each. With few rounds the intervals are too narrow rather than
too wide; the number of rounds is always reported beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_SAMPLES_P99 = 1000  # below, fewer than ten samples lie beyond the p99: it would be a reading of the largest few
CONFIDENCE = 0.95  # the field's habit
RESAMPLES = 1000  # the ends of a 95% interval then rest on 25 resamples each

Samples = NDArray[np.float64]
Rounds = Sequence[Samples]  # one array a round


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval and the number of samples and rounds behind it; None where too few samples."""

    value: float | None
    low: float | None
    high: float | None
    samples: int
    rounds: int

    def as_json(self, digits: int = 4) -> dict[str, float | int | list[float] | None]:
        """`{"value", "interval", "samples", "rounds"}`; `digits` are significant digits."""
        ends = None if self.low is None or self.high is None else [shorten(x, digits) for x in (self.low, self.high)]
        return {
            "value": None if self.value is None else shorten(self.value, digits),
            "interval": ends,
            "samples": self.samples,
            "rounds": self.rounds,
        }


def shorten(value: float, digits: int = 4) -> float:
    """`value` to significant digits."""
    return float(f"{value:.{digits}g}")


def as_rounds(rounds: Sequence[Sequence[float]]) -> list[Samples]:
    """Plain lists as arrays; rounds without a sample are left out."""
    return [np.asarray(samples, dtype=np.float64) for samples in rounds if len(samples)]


def quantile(samples: Samples, q: float) -> float | None:
    """The q-quantile by linear interpolation; None without samples, or for a p99 from too few."""
    if len(samples) == 0 or (q > 0.95 and len(samples) < MIN_SAMPLES_P99):
        return None
    return float(np.quantile(samples, q))


def lower_quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value with a share of at least `q` at or below it; None of nothing."""
    if not len(values):
        return None
    return float(np.quantile(np.asarray(values, dtype=np.float64), q, method="inverted_cdf"))


def quantile_us(spans_ns: Sequence[int], q: float) -> float:
    """The q-quantile of spans in nanoseconds, in microseconds."""
    return round(float(np.quantile(spans_ns, q)) / 1000, 2)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The middle `CONFIDENCE` of resampled values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.asarray(values), [tail, 1 - tail])
    return float(low), float(high)


def resample(rounds: Rounds, picks: Sequence[int], rng: np.random.Generator) -> list[Samples]:
    """The rounds numbered in `picks`, with the samples of each drawn anew with replacement."""
    return [rounds[i][rng.integers(0, len(rounds[i]), len(rounds[i]))] for i in picks]


def bootstrap(
    arms: Sequence[Rounds],
    statistic: Callable[[Sequence[Rounds]], float],
    rng: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Interval of `statistic(arms)`. Round k of every arm is drawn together with round k of the others, since they were
    measured side by side: what slowed the machine then slowed both.

    Raises:
        ValueError: no rounds, or arms with different numbers of rounds.
    """
    counts = {len(rounds) for rounds in arms}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"arms need the same number of rounds, at least one: {sorted(counts)}")
    count = counts.pop()
    values = []
    for _ in range(resamples):
        picks = rng.integers(0, count, count).tolist()
        values.append(statistic([resample(rounds, picks, rng) for rounds in arms]))
    return interval(values)


def median_of_means(rounds: Rounds) -> float:
    """The median over rounds of each round's mean: tokens per second from slices of windows."""
    return float(np.median([samples.mean() for samples in rounds]))


def ratio_of_medians(arms: Sequence[Rounds]) -> float:
    """Second arm over first, each the median over rounds of the round's mean."""
    return median_of_means(arms[1]) / median_of_means(arms[0])


def median_of_ratios(arms: Sequence[Rounds]) -> float:
    """The median over rounds of second arm over first: what drifts between rounds cancels."""
    return float(np.median([b.mean() / a.mean() for a, b in zip(*arms, strict=True)]))


def pooled_median_difference(arms: Sequence[Rounds]) -> float:
    """Second arm's median minus the first's, over the samples of all rounds."""
    return float(np.median(np.concatenate(arms[1])) - np.median(np.concatenate(arms[0])))


def estimate(
    arms: Sequence[Rounds],
    statistic: Callable[[Sequence[Rounds]], float],
    rng: np.random.Generator,
    *,
    resamples: int = RESAMPLES,
) -> Estimate:
    """`statistic` of the arms with its interval; the samples counted are those of the arm with fewest."""
    if not all(arms) or any(len(rounds) != len(arms[0]) for rounds in arms):
        return Estimate(None, None, None, 0, 0)
    samples = min(sum(map(len, rounds)) for rounds in arms)
    if samples < 2:  # nothing to resample: an interval would pretend to certainty
        return Estimate(statistic(arms), None, None, samples, len(arms[0]))
    return Estimate(statistic(arms), *bootstrap(arms, statistic, rng, resamples=resamples), samples, len(arms[0]))


def quantile_estimate(rounds: Rounds, q: float, rng: np.random.Generator, *, resamples: int = RESAMPLES) -> Estimate:
    """The pooled q-quantile with its interval; a p99 from too few samples is None."""
    samples = sum(map(len, rounds))
    value = quantile(np.concatenate(rounds), q) if rounds else None
    if value is None:
        return Estimate(None, None, None, samples, len(rounds))
    low, high = bootstrap(
        [rounds], lambda arms: float(np.quantile(np.concatenate(arms[0]), q)), rng, resamples=resamples
    )
    return Estimate(value, low, high, samples, len(rounds))


def clustered_quantiles(
    rounds: Sequence[Sequence[Samples]], qs: Sequence[float], rng: np.random.Generator, *, resamples: int = RESAMPLES
) -> list[Estimate]:
    """Quantiles of samples that come in clusters (the gaps of one answer): whole clusters are drawn.

    One estimate for each of `qs`. To draw a cluster twice is to weigh its samples twice, so one sort is enough.
    """
    rounds = [kept for clusters in rounds if (kept := [c for c in clusters if len(c)])]
    clusters = [c for in_round in rounds for c in in_round]
    pooled = np.concatenate(clusters) if clusters else np.empty(0)
    values = [quantile(pooled, q) for q in qs]
    if all(value is None for value in values):
        return [Estimate(None, None, None, len(pooled), len(rounds)) for _ in qs]
    order = np.argsort(pooled, kind="stable")
    owner = np.repeat(np.arange(len(clusters)), [len(c) for c in clusters])[order]
    ordered = pooled[order]
    starts = np.cumsum([0] + [len(in_round) for in_round in rounds])
    drawn = np.empty((resamples, len(qs)))
    for row in drawn:
        picks = rng.integers(0, len(rounds), len(rounds))
        chosen = np.concatenate([rng.integers(starts[i], starts[i + 1], starts[i + 1] - starts[i]) for i in picks])
        cumulative = np.cumsum(np.bincount(chosen, minlength=len(clusters))[owner])
        row[:] = ordered[np.searchsorted(cumulative, np.asarray(qs) * cumulative[-1]).clip(max=len(ordered) - 1)]
    result = []
    for value, column in zip(values, drawn.T, strict=True):
        low, high = interval(column.tolist()) if value is not None else (None, None)
        result.append(Estimate(value, low, high, len(pooled), len(rounds)))
    return result
