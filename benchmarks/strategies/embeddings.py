"""Whether production should batch embeddings or scores before the engine: its own batching, sorted dynamic batches,
dynamic ones.

Callers without pause on the built-in model as an embedding model. Rounds alternate in order (A B A B).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from benchmarks.common.stats import shorten
from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.load import UNIFORM, VARIABLE
from benchmarks.strategies.measure import Tell, whole
from benchmarks.strategies.orders import ClosedRun, Ran
from benchmarks.strategies.strategy import Knows, Strategy
from benchmarks.strategies.workload import Ask, Lengths, drawn, levelled
from serve_app.core.batching import PRESETS, BatchPolicy
from serve_app.types import Operation

OWN = "the engine's own"
SORTED = "dynamic sorted"
DYNAMIC = "dynamic-128"
ARMS = (
    Strategy(OWN, None, Knows.PROMPT),
    Strategy(SORTED, BatchPolicy(32, 0.05, 8192, by_length=True), Knows.PROMPT),
    Strategy(DYNAMIC, PRESETS[DYNAMIC], Knows.PROMPT),
)
EMBEDDING_SLOTS = 256
WARM_SHARE = 0.2  # of a window, in which callers start together and which is not counted
FASTER = 1.05  # tokens/s over the engine's own, from which on another strategy would be worth its code


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    operation: Operation = Operation.EMBEDDING
    callers: tuple[int, ...] = (1, 8, 32, 128)
    length_s: float = 3.0
    rounds: int = 2


@dataclass(frozen=True, slots=True)
class EmbeddingFigures:
    """`cpu_us`: of all the engine's processes, a request."""

    requests_per_s: float
    tokens_per_s: float
    latency_p50_ms: float
    latency_p99_ms: float
    cpu_us: float

    def as_json(self) -> dict[str, float]:
        return {name: shorten(value) for name, value in asdict(self).items()}


Embedded = dict[tuple[str, int], dict[str, EmbeddingFigures]]  # by lengths and callers, then by strategy


def embedding_figures(ran: Ran, length_s: float) -> EmbeddingFigures:
    """Of what ended in the window after its warm part."""
    begin_s = WARM_SHARE * length_s
    rows = [row for row in ran.rows if begin_s <= row.ended_s <= length_s]
    latencies = np.array([row.ended_s - row.arrived_s for row in rows]) * 1000
    p50, p99 = np.quantile(latencies, [0.5, 0.99]).tolist()
    span_s = length_s - begin_s
    tokens_per_s = sum(row.prompt for row in rows) / span_s
    return EmbeddingFigures(len(rows) / span_s, tokens_per_s, p50, p99, ran.cpu_s / len(ran.rows) * 1e6)


def embed(engine: EngineProcess, lengths: Sequence[Lengths], plan: EmbeddingPlan, seed: int, tell: Tell) -> Embedded:
    """Medians over rounds."""
    variable = drawn(lengths, 512, seed)
    kinds = {UNIFORM: levelled(variable), VARIABLE: variable}
    found = Embedded()
    for (kind, each), callers in itertools.product(kinds.items(), plan.callers):
        asks = [Ask(number, 0.0, prompt, 1) for number, (prompt, _) in enumerate(each)]
        rounds: dict[str, list[EmbeddingFigures]] = {arm.name: [] for arm in ARMS}
        for number in range(plan.rounds):
            for arm in ARMS[:: -1 if number % 2 else 1]:
                ran = whole(engine.run(ClosedRun(arm, asks, seed, callers, plan.length_s, plan.operation)))
                rounds[arm.name].append(embedding_figures(ran, plan.length_s))
        found[kind, callers] = {name: _medians(figures) for name, figures in rounds.items()}
        speeds = ", ".join(f"{name} {one.requests_per_s:.0f}" for name, one in found[kind, callers].items())
        tell(f"  {plan.operation}: {kind} lengths, {callers} callers, requests/s: {speeds}")
    return found


def _medians(rounds: Sequence[EmbeddingFigures]) -> EmbeddingFigures:
    return EmbeddingFigures(**{name: median(asdict(one)[name] for one in rounds) for name in asdict(rounds[0])})


def faster_than_own(found: Mapping[tuple[str, int], Mapping[str, EmbeddingFigures]]) -> dict[str, int]:
    """In how many cases each strategy had `FASTER` times the tokens/s of the engine's own batching."""
    return {
        name: sum(by_name[name].tokens_per_s > FASTER * by_name[OWN].tokens_per_s for by_name in found.values())
        for name in (SORTED, DYNAMIC)
    }
