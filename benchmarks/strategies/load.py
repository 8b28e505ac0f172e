"""Requests that come over time, at parts of what continuous batching can serve: steady, in bursts, in a ramp.

Invariant: all strategies get the same requests at the same moments, wait in a queue of `MAX_QUEUED` before an engine of
the same slots, and have the same deadline; a request succeeds if it is neither refused nor late.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.figures import Figures, figures_of
from benchmarks.strategies.measure import Tell, has_batches
from benchmarks.strategies.orders import OpenRun
from benchmarks.strategies.strategy import CONTINUOUS, GATED, SORTED_PROMPT, STATIC, Strategy, strategies
from benchmarks.strategies.workload import Ask, Lengths, bursts, drawn, levelled, poisson, ramp_over, steady

MAX_QUEUED = 256  # the field's
DEADLINE_S = 10.0  # of a whole answer: twenty times what one takes alone on this engine
# of what continuous batching serves; bursts have the steady one's mean
STEADY_RATE = 0.7
RAMP_RATE = 1.5
STEADY = "steady"
BURSTS = "bursts"
RAMP = "ramp"
UNIFORM = "uniform"
VARIABLE = "variable"
UNDER_LOAD = (STATIC, "dynamic-32", SORTED_PROMPT, "predictive", "predictive-arrivals", CONTINUOUS)

Loaded = dict[tuple[str, str], dict[str, Figures]]  # by pattern and lengths, then by strategy


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`length_s`: of each run."""

    patterns: tuple[str, ...] = (STEADY, BURSTS, RAMP)
    lengths: tuple[str, ...] = (UNIFORM, VARIABLE)
    names: tuple[str, ...] = UNDER_LOAD
    length_s: float = 10.0


def queued(slots: int) -> dict[str, Strategy]:
    """The strategies behind a queue; continuous batching is fed from it, since the engine's own has no bound."""
    found = strategies(slots, MAX_QUEUED)
    return {**found, CONTINUOUS: replace(found[GATED], name=CONTINUOUS)}


def arrivals(pattern: str, capacity: float, length_s: float, seed: int) -> list[float]:
    """Moments of a pattern; `capacity` in requests a second."""
    rate = (RAMP_RATE if pattern == RAMP else STEADY_RATE) * capacity
    shape = {STEADY: steady, BURSTS: bursts, RAMP: ramp_over(length_s)}[pattern]
    return poisson(shape, rate, length_s, seed)


def asks_at(moments: Iterable[float], lengths: Sequence[Lengths], seed: int, uniform: bool = False) -> list[Ask]:
    """Requests of drawn lengths at these moments; `uniform`: all of the drawn ones' mean."""
    moments = list(moments)
    found = drawn(lengths, len(moments), seed)
    if uniform:
        found = levelled(found)
    return [Ask(number, at_s, *each) for number, (at_s, each) in enumerate(zip(moments, found, strict=True))]


def summary_of(of: Figures) -> str:
    return (
        f"{of.requests_per_s:5.1f} requests/s, p50 {of.latency_p50_ms:5.0f} ms, p99 {of.latency_p99_ms:5.0f} ms, "
        f"success {of.success_share:.2%}"
    )


def under_load(
    engine: EngineProcess,
    lengths: Sequence[Lengths],
    capacity: Mapping[str, float],
    plan: LoadPlan,
    slots: int,
    seed: int,
    tell: Tell,
) -> Loaded:
    """Every strategy under every pattern; `capacity`: requests/s of continuous batching, by kind of lengths."""
    by_name = queued(slots)
    found = Loaded()
    for turn, (pattern, kind) in enumerate(itertools.product(plan.patterns, plan.lengths)):
        moments = arrivals(pattern, capacity[kind], plan.length_s, seed)
        asks = asks_at(moments, lengths, seed, uniform=kind == UNIFORM)
        found[pattern, kind] = {}
        for name in plan.names[:: -1 if turn % 2 else 1]:
            ran = engine.run(OpenRun(by_name[name], asks, seed, DEADLINE_S))
            figures = found[pattern, kind][name] = figures_of(ran, slots, has_batches(by_name[name]))
            tell(f"  {pattern}, {kind} lengths: {name:19s} {summary_of(figures)}")
    return found
