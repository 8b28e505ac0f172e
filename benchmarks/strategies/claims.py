"""What the field's write-ups say of strategies, held against the figures. Pure.

A claim that a strategy is the one for a situation is confirmed if its p99 there (for high concurrency: its tokens/s) is
better than that of every other by more than noise, refuted if another one is better by as much or it loses answers that
another one gives, and else undecided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.strategies.figures import Figures, cheapest
from benchmarks.strategies.load import BURSTS, RAMP, STEADY, Loaded
from benchmarks.strategies.strategy import CONTINUOUS, STATIC

P99_NOISE = 0.25  # what equal strategies differ by in runs of ten seconds (sorted and dynamic, uniform lengths)
SPEED_NOISE = 0.1  # what equal strategies differ by in tokens/s (all that fill batches of 32)
JITTER = 1.5  # p99 - p50 over that of continuous batching, from which on a strategy jitters
SUCCESS = 0.997  # the field's: a strategy with fewer whole answers serves no load
CONFIRMED = "confirmed"
REFUTED = "refuted"
UNDECIDED = "undecided, within noise"
DYNAMIC = "dynamic-32"
PREDICTIVE = "predictive"


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    where: str
    word: str
    figures: str


def verdicts(offline: Mapping[str, Mapping[str, Figures]], loaded: Loaded) -> list[Verdict]:
    """One for each claim and situation that was measured; `offline`: by kind of lengths, then by strategy."""
    found = [_high_concurrency(kind, by_name) for kind, by_name in offline.items()]
    for (pattern, kind), by_name in loaded.items():
        where = f"{pattern}, {kind} lengths"
        if pattern in (BURSTS, RAMP) and DYNAMIC in by_name:
            found.append(_is_best("dynamic for fluctuating load", DYNAMIC, where, by_name))
        if pattern == STEADY and PREDICTIVE in by_name:
            found.append(_is_best("predictive for steady load", PREDICTIVE, where, by_name))
        if pattern == STEADY and {STATIC, CONTINUOUS} <= by_name.keys():
            static = by_name[STATIC]
            continuous = by_name[CONTINUOUS]
            word = CONFIRMED if static.jitter_ms > JITTER * continuous.jitter_ms else REFUTED
            found.append(Verdict("static jitters", where, word, _spreads(by_name, STATIC, CONTINUOUS)))
    return found


def _high_concurrency(kind: str, offline: Mapping[str, Figures]) -> Verdict:
    best = cheapest({name: one for name, one in offline.items() if name != STATIC})
    static = offline[STATIC]
    word = word_of(static.tokens_per_s / offline[best].tokens_per_s, SPEED_NOISE)
    figures = f"{STATIC} {static.tokens_per_s:.0f} tokens/s, {best} {offline[best].tokens_per_s:.0f}; p99 - p50 "
    figures += f"{static.jitter_ms:.0f} and {offline[best].jitter_ms:.0f} ms"
    return Verdict("static for high concurrency", f"all at once, {kind} lengths", word, figures)


def _is_best(claim: str, name: str, where: str, by_name: Mapping[str, Figures]) -> Verdict:
    best = shortest_p99(by_name, lambda other: other != name)
    claimed = by_name[name]
    other = by_name[best]
    loses = claimed.success_share < min(SUCCESS, other.success_share)
    word = REFUTED if loses else word_of(other.latency_p99_ms / claimed.latency_p99_ms, P99_NOISE)
    return Verdict(claim, where, word, _spreads(by_name, name, best))


def word_of(times_better: float, noise: float) -> str:
    """The verdict on a claim of being best, by how many times better than the best other."""
    if times_better > 1.0 + noise:
        return CONFIRMED
    return REFUTED if times_better < 1.0 / (1.0 + noise) else UNDECIDED


def _spreads(by_name: Mapping[str, Figures], *names: str) -> str:
    return "; ".join(
        f"{name}: p99 {by_name[name].latency_p99_ms:.0f} ms, p99 - p50 {by_name[name].jitter_ms:.0f} ms, "
        f"success {by_name[name].success_share:.2%}"
        for name in dict.fromkeys(names)
        if name in by_name
    )


def shortest_p99(by_name: Mapping[str, Figures], allowed: Callable[[str], bool] = lambda _: True) -> str:
    """Of the strategies that answered the most within `SUCCESS`, the one with the shortest p99."""
    names = [name for name in by_name if allowed(name)]
    needed = min(SUCCESS, max(by_name[name].success_share for name in names))
    good = [name for name in names if by_name[name].success_share >= needed]
    return min(good, key=lambda name: by_name[name].latency_p99_ms)


def which_when(offline: Mapping[str, Mapping[str, Figures]], loaded: Loaded) -> list[tuple[str, str, str]]:
    """Situation, the best strategy, and the best of those that batch before the engine."""

    def is_batched(name: str) -> bool:
        return not name.startswith(CONTINUOUS)

    def fastest(by_name: Mapping[str, Figures]) -> str:
        best = cheapest(by_name)
        return f"{best} ({by_name[best].tokens_per_s:.0f} tokens/s)"

    rows = []
    for kind, figures in offline.items():
        batched = {name: one for name, one in figures.items() if is_batched(name)}
        rows.append((f"all at once, {kind} lengths, by tokens/s", fastest(figures), fastest(batched)))
    for (pattern, kind), by_name in loaded.items():
        best = shortest_p99(by_name)
        second = shortest_p99(by_name, is_batched)
        cells = [f"{name} ({by_name[name].latency_p99_ms:.0f} ms)" for name in (best, second)]
        rows.append((f"{pattern}, {kind} lengths, by p99", cells[0], cells[1]))
    return rows
