"""Length-aware batches where they take both of their sizes, and what batching is worth over none.

The field's rule: 64 requests if prompts are under 100 tokens on average, else 16. So one engine of 64 slots, all
requests at once, and three kinds of prompts: short (the rule takes 64), long (it takes 16), and blocks of 64 of each in
turn. The rule is held against static batches of 64, 32 and 16 with the same wait. Continuous batching of 64 slots is
beside them, and over requests that run one at a time it is the field's "3 to 10 times".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.strategies.claims import CONFIRMED, REFUTED, SPEED_NOISE, Verdict, word_of
from benchmarks.strategies.engine import EngineProcess
from benchmarks.strategies.figures import Figures, batches_of, cheapest, figures_of, medians
from benchmarks.strategies.measure import Tell, has_batches, whole
from benchmarks.strategies.orders import OpenRun
from benchmarks.strategies.strategy import CONTINUOUS, Strategy
from benchmarks.strategies.workload import Lengths, at_once, clipped, drawn
from serve_app.core.batching import PRESETS, BatchPolicy

BY_LENGTH_SLOTS = 64
AWARE = "length-aware"
STATIC_SIZES = (64, 32, 16)
ONE_AT_A_TIME = "one at a time"
ONE_REQUESTS = 64  # of each kind: more would only take longer, since nothing waits for a batch
SHORT = "short"
LONG = "long"
BLOCKS = "blocks"
KINDS = (SHORT, LONG, BLOCKS)
SHORT_PROMPT = 99  # tokens at most: under the rule's bound whatever the mean
LONG_FACTOR = 4  # a mean of 290 tokens: the mean of any batch is above the bound
TIMES_BATCHED = (3.0, 10.0)  # the field's

ByLength = dict[str, dict[str, Figures]]  # by kind of prompts, then by strategy


@dataclass(frozen=True, slots=True)
class Judged:
    """`sizes`: of the rule's batches in the first round, by kind of prompts."""

    figures: ByLength
    sizes: Mapping[str, list[int]]


def candidates() -> list[Strategy]:
    wait_s = PRESETS[AWARE].max_wait_s
    static = [Strategy(f"static-{size}", BatchPolicy(size, wait_s)) for size in STATIC_SIZES]
    alone = Strategy(ONE_AT_A_TIME, BatchPolicy(1, is_continuous=True))
    return [Strategy(AWARE, PRESETS[AWARE]), *static, Strategy(CONTINUOUS, None), alone]


def prompts_of(kind: str, lengths: Sequence[Lengths]) -> list[Lengths]:
    """The same answers with prompts of this kind."""
    short = [(min(prompt, SHORT_PROMPT), output) for prompt, output in lengths]
    long = [clipped(LONG_FACTOR * max(prompt, SHORT_PROMPT // 2), output) for prompt, output in lengths]
    if kind == BLOCKS:
        both = enumerate(zip(short, long, strict=True))
        return [pair[number // BY_LENGTH_SLOTS % 2] for number, pair in both]
    return short if kind == SHORT else long


def judge(engine: EngineProcess, lengths: Sequence[Lengths], count: int, seeds: Sequence[int], tell: Tell) -> Judged:
    """Medians over the seeds; rounds alternate in order."""
    figures = ByLength()
    sizes: dict[str, list[int]] = {}
    for kind in KINDS:
        rounds: dict[str, list[Figures]] = {one.name: [] for one in candidates()}
        for number, seed in enumerate(seeds):
            asked = prompts_of(kind, drawn(lengths, count, seed))
            for strategy in candidates()[:: -1 if number % 2 else 1]:
                few = asked[:ONE_REQUESTS] if strategy.name == ONE_AT_A_TIME else asked
                ran = whole(engine.run(OpenRun(strategy, at_once(few), seed)))
                found = figures_of(ran, BY_LENGTH_SLOTS, has_batches(strategy))
                rounds[strategy.name].append(found)
                if strategy.name == AWARE:
                    sizes.setdefault(kind, [len(batch) for batch in batches_of(ran.rows)])
                tell(f"  {kind} prompts: {strategy.name:14s} {found.tokens_per_s:7.0f} tokens/s, "
                     f"latency {found.latency_mean_ms:6.0f} ms")  # fmt: skip
        figures[kind] = {name: medians(found) for name, found in rounds.items()}
    return Judged(figures, sizes)


def length_verdicts(by_length: ByLength) -> list[Verdict]:
    """The rule by tokens/s against the best static size, and batching over none, by kind of prompts."""
    found = []
    for kind, figures in by_length.items():
        static = {name: one for name, one in figures.items() if name not in (AWARE, CONTINUOUS, ONE_AT_A_TIME)}
        best = cheapest(static)
        aware = figures[AWARE].tokens_per_s
        where = f"all at once, {kind} prompts, 64 slots"
        text = f"{AWARE} {aware:.0f} tokens/s; " + ", ".join(
            f"{name} {one.tokens_per_s:.0f}" for name, one in static.items()
        )
        found.append(Verdict(AWARE, where, word_of(aware / static[best].tokens_per_s, SPEED_NOISE), text))
        times = figures[CONTINUOUS].tokens_per_s / figures[ONE_AT_A_TIME].tokens_per_s
        low, high = TIMES_BATCHED
        word = CONFIRMED if low <= times <= high else REFUTED
        found.append(
            Verdict("batching gives 3 to 10 times", where, word, f"{times:.1f} times the tokens/s of {ONE_AT_A_TIME}")
        )
    return found
