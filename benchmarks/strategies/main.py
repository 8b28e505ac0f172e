"""Which batching strategy, when, and why: `python -m benchmarks.strategies`, with the options below.

All strategies of `core/batching` over one real engine without Ray, each the same `BatchedEngine` with another policy,
at 32 slots; continuous batching is the engine's own. Lengths are those of the Azure trace (answers over 4, prompts over
16), answers have exactly that length, nothing is cached. Step times are measured first; `benchmarks.strategies.bound`
defines what static and continuous batches would take by them.

    (always)       all requests at once: the strategies side by side, in alternating order; a steady load for the bar
    --sweep        sizes and waits of the field with a queue of 256, its presets beside ours
    --load         steady, in bursts, in a ramp; uniform and variable lengths; the field's claims, and which when
    --by-length    length-aware batches where they take both sizes, on 64 slots; batching over none
    --embeddings   whether batching before the engine pays for embeddings and scores

With any of the last four the first is short (static and continuous, one round), unless strategies are named. Keys of
the JSON object that is the last line:

    continuous_over_static_tokens_per_s  median over rounds [bar: 0.9 of `bound`]
    bound                                what static batches take over what continuous ones take, by the step times
    latency_mean_ratio                   of a request, continuous over static [bar: below 1]
    success_share                        whole answers in time, continuous at 70% of capacity [bar: 0.997]
    strategies                           figures of each (`benchmarks.strategies.figures.Figures` says what they are)
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import on_terminate
from benchmarks.common.traces import DATA, TraceMissingError
from benchmarks.strategies import embeddings, report
from benchmarks.strategies.by_length import BY_LENGTH_SLOTS, judge
from benchmarks.strategies.embeddings import EMBEDDING_SLOTS, EmbeddingPlan
from benchmarks.strategies.engine import EngineProcess, engine_process, settings_of
from benchmarks.strategies.load import STEADY, UNIFORM, VARIABLE, LoadPlan, under_load
from benchmarks.strategies.measure import Offline, drawer, offline, order_of
from benchmarks.strategies.plot import plot
from benchmarks.strategies.strategy import CONTINUOUS, SLOTS, STATIC, Strategy, strategies
from benchmarks.strategies.sweep import SWEEP_SLOTS, SweepPlan, sweep
from benchmarks.strategies.workload import MAX_MODEL_LEN, Lengths, azure_lengths, drawn, levelled
from serve_app.types import Operation

# of 256 the beginning and the end, when slots are empty, are a tenth
REQUESTS = 512
QUICK_REQUESTS = 384
ROUNDS = 3
QUICK_ROUNDS = 2
LOAD_S = 10.0
QUICK_LOAD_S = 5.0
SWEEP_S = 7.0
QUICK_SWEEP_S = 4.0
EMBED_S = 3.0
QUICK_EMBED_S = 2.0
SCORE_CALLERS = (1, 8, 32)
PRICE_PER_HOUR = 2.0  # of a GPU, in the middle of what clouds ask


class Benchmark:
    """One call of the command."""

    def __init__(self, given: argparse.Namespace, lengths: Sequence[Lengths], console: Console) -> None:
        self.given = given
        self.lengths = lengths
        self.console = console

    def run(self) -> dict[str, Any]:
        """Everything that was asked for, printed as it is had; returns the JSON object."""
        given = self.given
        chosen = order_of(strategies(SLOTS), [STATIC] if given.brief else given.strategies)
        with engine_process(settings_of(given.engine, SLOTS)) as engine:
            self._up(engine)
            requests = drawer(self.lengths, given.requests)
            found = offline(engine, chosen, requests, given.seeds, SLOTS, self.console.print)
            capacity = {VARIABLE: found.figures[CONTINUOUS].requests_per_s}
            steady = LoadPlan((STEADY,), (VARIABLE,), (CONTINUOUS,), given.load_s)
            loaded = under_load(engine, self.lengths, capacity, steady, SLOTS, given.seed, self.console.print)
            result = report.headline(found, loaded[STEADY, VARIABLE][CONTINUOUS], given.price_per_hour)
            report.show_headline(self.console, result, found.figures, given.price_per_hour)
            if given.load:
                result |= self._load(engine, found, capacity[VARIABLE])
        if given.plot is not None:
            panels = {name: (found.rounds[0].rows[name], found.figures[name].slot_use) for name in (STATIC, CONTINUOUS)}
            plot(panels, SLOTS, given.plot)
        if given.sweep:
            result["sweep"] = self._sweep(capacity[VARIABLE])
        if given.by_length:
            result |= self._by_length()
        if given.embeddings:
            result |= self._embed()
        return result

    def _up(self, engine: EngineProcess) -> None:
        info = engine.info
        self.console.print(
            f"engine up after {info.start_s:.0f} s: {info.slots} slots, {info.kv_cache_tokens} KV tokens"
        )

    def _load(self, engine: EngineProcess, found: Offline, capacity: float) -> dict[str, Any]:
        """Capacity for uniform lengths is measured here."""

        def uniform(seed: int) -> list[Lengths]:
            return levelled(drawn(self.lengths, self.given.requests, seed))

        own = {name: Strategy(name, strategies(SLOTS)[name].policy) for name in (STATIC, CONTINUOUS)}
        level = offline(engine, own, uniform, self.given.seeds[:1], SLOTS, self.console.print)
        by_kind = {VARIABLE: capacity, UNIFORM: level.figures[CONTINUOUS].requests_per_s}
        plan = LoadPlan(length_s=self.given.load_s)
        loaded = under_load(engine, self.lengths, by_kind, plan, SLOTS, self.given.seed, self.console.print)
        by_lengths = {VARIABLE: found.figures, UNIFORM: level.figures}
        return report.show_load(self.console, by_lengths, loaded) | {"capacity_requests_per_s": by_kind}

    def _sweep(self, capacity: float) -> dict[str, Any]:
        plan = SweepPlan(length_s=self.given.sweep_s)
        with engine_process(settings_of(self.given.engine, SWEEP_SLOTS)) as engine:
            self._up(engine)
            swept = sweep(engine, self.lengths, capacity, plan, self.given.seed, self.console.print)
        return report.show_sweep(self.console, swept)

    def _by_length(self) -> dict[str, Any]:
        with engine_process(settings_of(self.given.engine, BY_LENGTH_SLOTS)) as engine:
            self._up(engine)
            judged = judge(engine, self.lengths, self.given.requests, self.given.seeds, self.console.print)
        return report.show_by_length(self.console, judged)

    def _embed(self) -> dict[str, Any]:
        result = dict[str, Any]()
        length_s = self.given.embed_s
        with engine_process(settings_of(self.given.engine, EMBEDDING_SLOTS, task="embed")) as engine:
            self._up(engine)
            for plan in (EmbeddingPlan(length_s=length_s), EmbeddingPlan(Operation.SCORE, SCORE_CALLERS, length_s)):
                found = embeddings.embed(engine, self.lengths, plan, self.given.seed, self.console.print)
                faster = embeddings.faster_than_own(found)
                result[plan.operation] = report.show_embeddings(self.console, plan.operation, found, faster)
        return result


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="about 4 minutes: fewer requests, two rounds")
    parser.add_argument("--sweep", action="store_true", help="sizes and waits, and presets")
    parser.add_argument("--load", action="store_true", help="steady, bursts, ramp; the field's claims")
    parser.add_argument("--by-length", action="store_true", help="length-aware on 64 slots beside static batches")
    parser.add_argument("--embeddings", action="store_true", help="whether embeddings and scores should be batched")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--strategies", type=lambda names: names.split(","), default=[], help="of these, by comma")
    parser.add_argument("--requests", type=int, help="of each run of all at once")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each run over time")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next")
    parser.add_argument("--price-per-hour", type=float, default=PRICE_PER_HOUR, help="of the machine, in any currency")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the slots' timeline, static and continuous")
    given = parser.parse_args(arguments)
    given.brief = (given.sweep or given.load or given.by_length or given.embeddings) and not given.strategies
    quick = given.quick
    rounds = given.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    given.requests = given.requests or (QUICK_REQUESTS if quick else REQUESTS)
    given.seeds = list(range(given.seed, given.seed + rounds))
    given.load_s = given.seconds or (QUICK_LOAD_S if quick else LOAD_S)
    given.sweep_s = given.seconds or (QUICK_SWEEP_S if quick else SWEEP_S)
    given.embed_s = given.seconds or (QUICK_EMBED_S if quick else EMBED_S)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    given = options_of(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True, width=CONSOLE_WIDTH, highlight=False)
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        lengths = azure_lengths(given.data)
    except TraceMissingError as missing:
        console.print(f"skipped: {missing}")
        return 1
    conditions = here(engine=given.engine, slots=SLOTS, requests=given.requests, seeds=given.seeds,
                      max_model_len=MAX_MODEL_LEN, load_s=given.load_s)  # fmt: skip
    console.print_json(json.dumps(conditions))
    try:
        result = Benchmark(given, lengths, console).run()
    except BenchmarkError as error:
        console.print(f"failed: {error}", style="red", markup=False)
        return 1
    write_json({**result, "conditions": conditions})
    return 0
