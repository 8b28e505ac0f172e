"""Batch sizes and waits side by side: the field's four with a queue of 256, and its three presets beside ours.

The field's 32 requests and 50 ms are also tried with other queues than 256. One engine of 64 slots serves all. Ours are
`serve_app/settings/presets.py`: their `max_num_seqs` requests run at once, continuously; their token budgets, which
bind prompts longer than these, are the engine's own here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.strategies.claims import SPEED_NOISE, Verdict, word_of
from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.figures import Figures, figures_of
from benchmarks.strategies.load import DEADLINE_S, MAX_QUEUED, asks_at, summary_of
from benchmarks.strategies.measure import Tell, has_batches
from benchmarks.strategies.orders import OpenRun
from benchmarks.strategies.strategy import Strategy
from benchmarks.strategies.workload import Lengths, poisson, steady
from serve_app.core.batching import BatchPolicy
from serve_app.settings import ModelSettings

SWEEP_SLOTS = 64
FIELD = ((8, 100), (16, 75), (32, 50), (64, 30))  # size, and wait in ms
QUEUES = (64, 128, 512, 1024)  # beside the field's
QUEUE_BATCH = (32, 50)
FIELD_PRESETS = {"latency": (8, 10), "balanced": (32, 50), "throughput": (64, 100)}
RATES = (0.3, 0.7, 1.5)  # of what continuous batching serves at 32 slots; the last one is more than any can


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """`length_s`: of each run."""

    rates: tuple[float, ...] = RATES
    length_s: float = 7.0


def swept() -> list[Strategy]:
    def batches(name: str, size: int, wait_ms: int) -> Strategy:
        return Strategy(f"{name}{size} / {wait_ms} ms", BatchPolicy(size, wait_ms / 1000, max_queued=MAX_QUEUED))

    found = [batches("batch ", *one) for one in FIELD]
    for name, field_preset in FIELD_PRESETS.items():
        found.append(batches(f"their {name}: ", *field_preset))
        size = ModelSettings.model_validate({"name": "m", "preset": name}).max_num_seqs
        policy = BatchPolicy(size, is_continuous=True, max_queued=MAX_QUEUED)
        found.append(Strategy(f"our {name}: {size} continuous", policy))
    return found


def queued() -> list[Strategy]:
    """The field's batch with other queues."""
    size, wait_ms = QUEUE_BATCH
    return [
        Strategy(f"batch {size} / {wait_ms} ms, queue {most}", BatchPolicy(size, wait_ms / 1000, max_queued=most))
        for most in QUEUES
    ]


def sweep_verdicts(swept: Mapping[str, Mapping[float, Figures]]) -> list[Verdict]:
    """The field's 32, 50 ms and 256, by whole answers a second in overload: the batch against the field's other sizes,
    the queue against other queues."""
    rate = max(next(iter(swept.values())))
    speeds = {name: by_rate[rate].requests_per_s for name, by_rate in swept.items()}
    size, wait_ms = QUEUE_BATCH
    ours = f"batch {size} / {wait_ms} ms"
    sizes = [f"batch {size} / {wait_ms} ms" for size, wait_ms in FIELD]
    found = []
    for claim, names in (("batches of 32 and 50 ms", sizes), ("a queue of 256", [one.name for one in queued()])):
        others = [name for name in names if name != ours]
        best = max(others, key=lambda name: speeds[name])
        text = "; ".join(f"{name}: {speeds[name]:.1f}/s" for name in (ours, *others))
        found.append(Verdict(claim, f"{rate:.0%} of capacity", word_of(speeds[ours] / speeds[best], SPEED_NOISE), text))
    return found


def sweep(
    engine: EngineProcess, lengths: Sequence[Lengths], capacity: float, plan: SweepPlan, seed: int, tell: Tell
) -> dict[str, dict[float, Figures]]:
    """Figures by configuration and part of the capacity (requests/s of continuous batching at 32 slots)."""
    configurations = swept() + queued()
    found: dict[str, dict[float, Figures]] = {strategy.name: {} for strategy in configurations}
    for turn, rate in enumerate(plan.rates):
        asks = asks_at(poisson(steady, rate * capacity, plan.length_s, seed), lengths, seed)
        for strategy in configurations[:: -1 if turn % 2 else 1]:
            ran = engine.run(OpenRun(strategy, asks, seed, DEADLINE_S))
            figures = found[strategy.name][rate] = figures_of(ran, SWEEP_SLOTS, has_batches(strategy))
            tell(f"  {rate:.0%} of capacity: {strategy.name:32s} {summary_of(figures)}")
    return found
