"""Continuous batching under requests that come over time, at a part of what it can serve.

They wait in a queue of `MAX_QUEUED` before the engine and have a deadline; a request succeeds if it is neither refused
nor late.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.figures import Figures, figures_of
from benchmarks.strategies.measure import Tell, has_batches
from benchmarks.strategies.orders import OpenRun
from benchmarks.strategies.strategy import CONTINUOUS, GATED, strategies
from benchmarks.strategies.workload import Ask, Lengths, drawn

MAX_QUEUED = 256  # the field's
DEADLINE_S = 10.0  # of a whole answer: twenty times what one takes alone on this engine
RATE = 0.7  # of what continuous batching serves


def poisson(rate: float, length_s: float, seed: int) -> list[float]:
    """Moments of a Poisson process of `rate` requests a second."""
    draw = random.Random(f"arrivals {seed}")
    at_s = 0.0
    found = []
    while (at_s := at_s + draw.expovariate(rate)) < length_s:
        found.append(at_s)
    return found


def asks_at(moments: Sequence[float], lengths: Sequence[Lengths], seed: int) -> list[Ask]:
    """Requests of drawn lengths at these moments."""
    found = drawn(lengths, len(moments), seed)
    return [Ask(number, at_s, *each) for number, (at_s, each) in enumerate(zip(moments, found, strict=True))]


def under_load(
    engine: EngineProcess,
    lengths: Sequence[Lengths],
    capacity: float,
    length_s: float,
    slots: int,
    seed: int,
    tell: Tell,
) -> Figures:
    """One run; `capacity`: requests/s of continuous batching. The queue is ours: the engine's own has no bound."""
    strategy = replace(strategies(slots, MAX_QUEUED)[GATED], name=CONTINUOUS)
    asks = asks_at(poisson(RATE * capacity, length_s, seed), lengths, seed)
    ran = engine.run(OpenRun(strategy, asks, seed, DEADLINE_S))
    found = figures_of(ran, slots, has_batches(strategy))
    tell(
        f"  {RATE:.0%} of capacity: {found.requests_per_s:5.1f} requests/s, p50 {found.latency_p50_ms:5.0f} ms, "
        f"p99 {found.latency_p99_ms:5.0f} ms, success {found.success_share:.2%}"
    )
    return found
