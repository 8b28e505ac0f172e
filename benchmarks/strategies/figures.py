"""The figures of one run, from its rows. Pure.

Invariant: a request counts for speed and latency if its answer is whole; refused and late ones count as failures.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

import numpy as np

from benchmarks.common.stats import shorten
from benchmarks.strategies.orders import Ended, Ran, Row
from serve_app.core.batching import padding_ratio

MS = 1000.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or the medians of several.

    Args:
        tokens_per_s: output tokens of whole answers over the time of the run.
        latency_mean_ms: of a request, from its arrival to its last token; the others are quantiles of the same.
        padding_ratio: of a batch's slot-steps up to its longest answer, the mean over batches; 0 without batches.
        batch_mean: requests of a batch; without batches: of a step.
        slot_use: slot-steps that made a token, over the engine's steps x slots.
        success_share: whole answers over requests offered.
        started_wait_ms: mean time of a request before the engine got it.
        foreign_cores: cores that the machine's other processes used meanwhile.
    """

    tokens_per_s: float
    requests_per_s: float
    latency_mean_ms: float
    latency_p50_ms: float
    latency_p95_ms: float
    latency_p99_ms: float
    padding_ratio: float
    batch_mean: float
    slot_use: float
    success_share: float
    started_wait_ms: float
    foreign_cores: float

    @property
    def jitter_ms(self) -> float:
        return self.latency_p99_ms - self.latency_p50_ms

    def as_json(self) -> dict[str, float]:
        return {name: shorten(value) for name, value in asdict(self).items()}


def batches_of(rows: Iterable[Row]) -> list[list[Row]]:
    """The batches of a strategy that runs one at a time: a batch begins where everything before it has ended."""
    found: list[list[Row]] = []
    ended_s = -1.0
    for row in sorted((row for row in rows if row.started_s >= 0.0), key=lambda row: row.started_s):
        if not found or row.started_s >= ended_s:
            found.append([])
        found[-1].append(row)
        ended_s = max(ended_s, row.ended_s)
    return found


def figures_of(ran: Ran, slots: int, in_batches: bool) -> Figures:
    """Raises ValueError: no answer is whole."""
    done = [row for row in ran.rows if row.outcome is Ended.DONE]
    if not done:
        raise ValueError("no request was answered")
    latencies = np.array([row.ended_s - row.arrived_s for row in done]) * MS
    p50, p95, p99 = np.quantile(latencies, [0.5, 0.95, 0.99]).tolist()
    tokens = sum(row.output for row in done)
    padding = 0.0
    size = tokens / max(1, ran.steps)
    if in_batches:
        batches = batches_of(ran.rows)
        padding = fmean(padding_ratio([row.output for row in batch]) for batch in batches)
        size = fmean(map(len, batches))
    return Figures(
        tokens_per_s=tokens / ran.wall_s,
        requests_per_s=len(done) / ran.wall_s,
        latency_mean_ms=float(latencies.mean()),
        latency_p50_ms=p50,
        latency_p95_ms=p95,
        latency_p99_ms=p99,
        padding_ratio=padding,
        batch_mean=size,
        slot_use=tokens / max(1, ran.steps * slots),
        success_share=len(done) / len(ran.rows),
        started_wait_ms=fmean(row.started_s - row.arrived_s for row in done) * MS,
        foreign_cores=ran.foreign_s / ran.wall_s,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over rounds."""
    return Figures(**{name: median(asdict(one)[name] for one in rounds) for name in asdict(rounds[0])})


def slots_of(rows: Iterable[Row]) -> list[tuple[int, Row]]:
    """A slot for each request while the engine had it: the lowest that was free."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found = []
    used = 0
    for row in sorted((row for row in rows if row.first_s >= 0.0), key=lambda row: row.first_s):
        while busy and busy[0][0] <= row.first_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, used = used, used + 1
        found.append((slot, row))
        heapq.heappush(busy, (row.ended_s, slot))
    return found
