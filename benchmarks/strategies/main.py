"""Which batching strategy, when, and why: `python -m benchmarks.strategies`.

All strategies of `core/batching` over one real engine without Ray, each the same `BatchedEngine` with another policy,
at 32 slots; continuous batching is the engine's own. Lengths are those of the Azure trace (answers over 4, prompts over
16), answers have exactly that length, nothing is cached. Step times are measured first; `benchmarks.strategies.bound`
defines what static and continuous batches would take by them. Then all requests come at once, the strategies side by
side in alternating order; last, continuous batching has a steady load. `docs/archive/batching.md` has the study of the
field's further claims (sizes and waits, bursts, length-aware batches, embeddings), which was made once.

Keys of the JSON object that is the last line:

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

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH, figures_or_exit
from benchmarks.common.stage import on_terminate
from benchmarks.common.traces import DATA, TraceMissingError
from benchmarks.strategies import report
from benchmarks.strategies.engine import engine_process, settings_of
from benchmarks.strategies.load import under_load
from benchmarks.strategies.measure import offline, order_of
from benchmarks.strategies.plot import plot
from benchmarks.strategies.strategy import CONTINUOUS, SLOTS, STATIC, strategies
from benchmarks.strategies.workload import MAX_MODEL_LEN, Lengths, azure_lengths

# of 256 the beginning and the end, when slots are empty, are a tenth
REQUESTS = 512
QUICK_REQUESTS = 384
ROUNDS = 3
QUICK_ROUNDS = 2
LOAD_S = 10.0
QUICK_LOAD_S = 5.0


def run(given: argparse.Namespace, lengths: Sequence[Lengths], console: Console) -> dict[str, Any]:
    """All of it, printed as it is had; returns the JSON object."""
    chosen = order_of(strategies(SLOTS), given.strategies)
    with engine_process(settings_of(given.engine, SLOTS)) as engine:
        info = engine.info
        console.print(f"engine up after {info.start_s:.0f} s: {info.slots} slots, {info.kv_cache_tokens} KV tokens")
        found = offline(engine, chosen, lengths, given.requests, given.seeds, SLOTS, console.print)
        capacity = found.figures[CONTINUOUS].requests_per_s
        loaded = under_load(engine, lengths, capacity, given.load_s, SLOTS, given.seed, console.print)
    result = report.headline(found, loaded)
    report.show_headline(console, result, found.figures)
    if given.plot is not None:
        panels = {name: (found.rounds[0].rows[name], found.figures[name].slot_use) for name in (STATIC, CONTINUOUS)}
        plot(panels, SLOTS, given.plot)
    return result


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="about 4 minutes: fewer requests, two rounds")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--strategies", type=lambda names: names.split(","), default=[], help="of these, by comma")
    parser.add_argument("--requests", type=int, help="of each run of all at once")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of the steady load")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next one has the next")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the slots' timeline, static and continuous")
    given = parser.parse_args(arguments)
    quick = given.quick
    rounds = given.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    given.requests = given.requests or (QUICK_REQUESTS if quick else REQUESTS)
    given.seeds = list(range(given.seed, given.seed + rounds))
    given.load_s = given.seconds or (QUICK_LOAD_S if quick else LOAD_S)
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
    with figures_or_exit(console):
        result = run(given, lengths, console)
    write_json({**result, "conditions": conditions})
    return 0
