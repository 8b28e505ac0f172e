"""The headline: step times, then every strategy on the same requests, all there at once.

Rounds alternate in order (A B A B); round k has the requests of seed + k, and the step times of its own beginning, so
that a machine that becomes slower meets all strategies and the bound alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.common.arms import BenchmarkError
from benchmarks.strategies.bound import Predicted, StepTimes, predict
from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.figures import Figures, batches_of, figures_of, medians
from benchmarks.strategies.orders import Ended, OpenRun, Ran, Row
from benchmarks.strategies.strategy import CONTINUOUS, GATED, STATIC, Strategy
from benchmarks.strategies.workload import Ask, Lengths, at_once, drawn

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # sequences of a step
# tokens of each of them
STEP_PROMPT = 16
STEP_OUTPUT = 128
STEP_REPEATS = 3
# prompts by which the time of a prompt token is measured
READ_REQUESTS = 16
READ_SHORT = 16
READ_LONG = 256

Tell = Callable[[str], None]


@dataclass(slots=True)
class Round:
    """One round: its step times, what they predict, and the figures by strategy."""

    times: StepTimes
    predicted: Predicted
    figures: dict[str, Figures] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)  # of the batches, in order
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def ratio(self, of: Callable[[Figures], float]) -> float:
        """Continuous over static."""
        return of(self.figures[CONTINUOUS]) / of(self.figures[STATIC])


@dataclass(frozen=True, slots=True)
class Offline:
    """All rounds."""

    rounds: Sequence[Round]

    @property
    def figures(self) -> dict[str, Figures]:
        """Medians by strategy."""
        return {name: medians([one.figures[name] for one in self.rounds]) for name in self.rounds[0].figures}

    def median(self, of: Callable[[Round], float]) -> float:
        return median(of(one) for one in self.rounds)

    @property
    def step_s(self) -> dict[int, float]:
        """Medians by size."""
        sizes = self.rounds[0].times.by_size
        return {size: median(one.times.by_size[size] for one in self.rounds) for size in sizes}

    @property
    def times(self) -> StepTimes:
        return StepTimes(self.step_s, self.median(lambda measured: measured.times.prompt_token_s))


def has_batches(strategy: Strategy) -> bool:
    return strategy.policy is not None and not strategy.policy.is_continuous


def step_times(engine: EngineProcess, slots: int, seed: int) -> StepTimes:
    """Decode steps of 1, 2, 4, ... sequences up to the slots, and the reading of prompts, the engine batching itself.

    Of a batch the request that began last counts: it saw steps of the whole batch alone, but for the last few, in which
    those that began before it had ended.
    """
    own = Strategy(CONTINUOUS, None)
    by_size = {}
    for size in [size for size in SIZES if size <= slots]:
        asks = [Ask(number, 0.0, STEP_PROMPT, STEP_OUTPUT) for number in range(size)]
        found = []
        for repeat in range(STEP_REPEATS):
            rows = whole(engine.run(OpenRun(own, asks, seed + repeat))).rows
            last = max(rows, key=lambda row: row.first_s)
            found.append((last.ended_s - last.first_s) / (STEP_OUTPUT - 1))
        by_size[size] = median(found)
    read_s = {
        prompt: median(
            engine.run(OpenRun(own, [Ask(n, 0.0, prompt, 1) for n in range(READ_REQUESTS)], seed + repeat)).wall_s
            for repeat in range(STEP_REPEATS)
        )
        for prompt in (READ_SHORT, READ_LONG)
    }
    token_s = (read_s[READ_LONG] - read_s[READ_SHORT]) / (READ_REQUESTS * (READ_LONG - READ_SHORT))
    return StepTimes(by_size, max(0.0, token_s))


def whole(ran: Ran) -> Ran:
    """Raises BenchmarkError: an answer is not whole, where nothing may be refused."""
    lost = [row for row in ran.rows if row.outcome is not Ended.DONE]
    if lost:
        raise BenchmarkError(f"{len(lost)} of {len(ran.rows)} requests were not answered: {lost[0]}")
    return ran


def offline(
    engine: EngineProcess,
    chosen: Mapping[str, Strategy],
    trace: Sequence[Lengths],
    count: int,
    seeds: Iterable[int],
    slots: int,
    tell: Tell,
) -> Offline:
    """Every strategy in every round, with so many requests of the trace's lengths."""
    rounds = []
    for number, seed in enumerate(seeds):
        lengths = drawn(trace, count, seed)
        times = step_times(engine, slots, seed)
        measured = Round(times, predict(lengths, slots, times))
        for strategy in list(chosen.values())[:: -1 if number % 2 else 1]:
            ran = whole(engine.run(OpenRun(strategy, at_once(lengths), seed)))
            found = measured.figures[strategy.name] = figures_of(ran, slots, has_batches(strategy))
            measured.rows[strategy.name] = ran.rows
            if has_batches(strategy):
                measured.sizes[strategy.name] = [len(batch) for batch in batches_of(ran.rows)]
            tell(f"  round {number + 1}: {strategy.name:18s} {found.tokens_per_s:7.0f} tokens/s, "
                 f"latency {found.latency_mean_ms:6.0f} ms, slots used {found.slot_use:.0%}")  # fmt: skip
        rounds.append(measured)
    return Offline(rounds)


def order_of(strategies: Mapping[str, Strategy], names: Sequence[str]) -> dict[str, Strategy]:
    """The wanted strategies with the two that the headline compares. Raises BenchmarkError: there is none so called."""
    unknown = sorted(set(names) - strategies.keys())
    if unknown:
        raise BenchmarkError(f"no strategy is called {unknown[0]}; there are {', '.join(strategies)}")
    wanted = {*names, STATIC, CONTINUOUS} if names else strategies.keys() | {GATED}
    return {name: one for name, one in strategies.items() if name in wanted}
