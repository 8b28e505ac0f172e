"""How soon replicas follow the load: `python -m benchmarks.scaling [--quick] [--cycles N] [--engine vllm|simulated]`;
`--linear` compares 1, 2, 4 and 8 replicas instead (`benchmarks.scaling.linear`), `--flapping` policies under a load
that comes and goes (`benchmarks.scaling.flapping`).

Three routers, one model, engines by load: a burst takes it from 1 replica to 3, silence to 0, one request back to 1;
each cycle does all of it. Prints conditions, progress and a table, and as its last line one JSON object.

Where the moments come from:
- decision: from the first request of the burst to the first look at Serve's details with a higher target. In it are the
  sampling of the routers' numbers, the look-back, `upscale_delay_s` (in the conditions) and a turn of the controller.
- placement: from then to the first look in which a new replica's process is there (it has a node).
- engine start: from then to the first look at the engines' own figures in which a new one runs a request.

That the count of requests is right and an idle drain short is held by `tests/e2e/test_scaling.py`.

Invariant: a cycle with a failed request ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import conditions
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.output import write_json
from benchmarks.common.run import figures_or_exit
from benchmarks.common.scaling_stack import MODEL, WORK_POLL_S, Clients, Stage, stack
from benchmarks.scaling.flapping import flapping
from benchmarks.scaling.linear import linear
from benchmarks.scaling.watch import PERIOD_S, Look, Watch

ROUTERS = 3
REPLICAS = 3
TARGET = 8  # requests a replica: as many as an engine runs at once here, so that what is beyond them waits
BURST = REPLICAS * TARGET  # clients that ask without pause: what three replicas are wanted for
CYCLES = 3  # of a full run: a median, and what the others differ from it by
BOUND_S = 300.0  # of any one step: two engines start beside a busy third one on two cores
SCALE = {
    "min_replicas": 0,
    "max_replicas": REPLICAS,
    "target_ongoing_requests": TARGET,
    "upscale_delay_s": 2.0,  # the shipped 30 s would be in every figure as 30 s more
    "downscale_delay_s": 5.0,
    "downscale_to_zero_delay_s": 10.0,  # the next burst of a cycle finds the replica that answered the last request
}
STEPS = ("total", "decision", "placement", "engine_start")


@dataclass(frozen=True, slots=True)
class Rise:
    """The moments of a first new replica, in seconds after the request that made it necessary."""

    decided: float
    placed: float
    works: float

    def as_json(self) -> dict[str, float]:
        parts = (self.works, self.decided, self.placed - self.decided, self.works - self.placed)
        return {step: round(part, 2) for step, part in zip(STEPS, parts, strict=True)}


@dataclass(frozen=True, slots=True)
class Cycle:
    """What one cycle measured, seconds and counts."""

    extra: Rise
    from_zero: Rise
    running: tuple[int, ...]  # numbers of running replicas, in the order they were seen
    answered: int
    failures: tuple[str, ...]


def configuration(engine: str) -> dict[str, Any]:
    model: dict[str, Any] = {"name": MODEL, "engine": engine, "max_num_seqs": TARGET, "replicas": SCALE}
    if engine == "vllm":
        model |= {"path": "tiny", "dtype": "float32", "max_model_len": 8192, "kv_cache_gb": 0.25}
    else:
        model |= {"simulated": {"decode_step_s": 0.01, "start_s": 2.0}}
    # what waits while engines start on the same cores is not the question here
    admission = {"max_wait_s": BOUND_S, "no_replica_wait_s": BOUND_S}
    return {"models": [model], "router": {"replicas": ROUTERS}, "admission": admission}


class Measurement:
    """The steps of a cycle on a running stack."""

    def __init__(self, stage: Stage, watch: Watch, tokens: int, console: Console) -> None:
        self._stage = stage
        self._watch = watch
        self._console = console
        self._tokens = tokens

    def warm(self) -> None:
        """A first replica, whose start reads cold files and is not measured."""
        if failure := self._stage.ask(5):
            raise BenchmarkError(f"the first request was not answered: {failure}")
        self._until(lambda look: len(look.running) == 1, "one replica")

    def cycle(self) -> Cycle:
        began = time.monotonic()
        before = self._until(lambda look: len(look.running) == 1 == len(look.replicas), "one replica")
        clients = Clients(self._stage, BURST, self._tokens)
        extra = self._rise(clients.start(), before, REPLICAS)
        clients.finish()
        self._until(lambda look: look.target == 0 and not look.replicas, "no replica")
        last = Clients(self._stage, 1, self._tokens)
        none = self._until(lambda look: not look.replicas, "no replica")
        from_zero = self._rise(last.once(), none, 1)
        last.finish()
        everybody = (clients, last)
        running = [len(look.running) for look in self._watch.looks(MODEL) if look.at >= began]
        steps = tuple(n for index, n in enumerate(running) if not index or running[index - 1] != n)
        failures = tuple(failure for one in everybody for failure in one.failures)
        return Cycle(extra, from_zero, steps, sum(one.answered for one in everybody), failures)

    def _rise(self, asked: float, before: Look, wanted: int) -> Rise:
        """From a demand to the first new replica that works; returns once `wanted` replicas do."""
        decided = self._until(lambda look: look.target > before.target, "a higher target", asked)
        placed = self._until(lambda look: bool(look.placed - before.replicas.keys()), "a process", asked)
        works = self._working(before, 1)
        self._console.print(
            f"  {before.target} -> {wanted}: decided after {decided.at - asked:.1f} s, placed after "
            f"{placed.at - asked:.1f} s, works after {works - asked:.1f} s"
        )
        if wanted > len(before.replicas) + 1:
            self._working(before, wanted - len(before.replicas))
        return Rise(decided.at - asked, placed.at - asked, works - asked)

    def _working(self, before: Look, count: int) -> float:
        """Wait until so many replicas that were not there before have run a request."""
        seen: set[str] = set()
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            seen |= self._stage.working() - before.replicas.keys()
            if len(seen) >= count:
                return time.monotonic()
            time.sleep(WORK_POLL_S)
        raise BenchmarkError(f"not within {BOUND_S:g} s: {count} new replicas at work, seen {len(seen)}")

    def _until(self, condition: Callable[[Look], bool], expected: str, since: float | None = None) -> Look:
        try:
            return self._watch.until(MODEL, condition, BOUND_S, since)
        except TimeoutError as error:
            raise BenchmarkError(f"{expected}: {error}") from None


def result(cycles: Sequence[Cycle]) -> dict[str, Any]:
    """The object of the last line: medians over the cycles, and all of them."""
    extra = [cycle.extra.as_json() for cycle in cycles]
    from_zero = [cycle.from_zero.as_json() for cycle in cycles]
    return {
        "failed": sum(len(cycle.failures) for cycle in cycles),
        "answered": sum(cycle.answered for cycle in cycles),
        "replicas_seen": [list(cycle.running) for cycle in cycles],
        "first_extra_replica_s": medians(extra) | {"cycles": extra},
        "from_zero_s": medians(from_zero) | {"cycles": from_zero},
    }


def medians(rises: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each step by itself: with several cycles they need not add up."""
    return {step: round(statistics.median(rise[step] for rise in rises), 2) for step in STEPS}


def table(figures: dict[str, Any]) -> Table:
    made = Table("seconds", *STEPS, "each cycle's total")
    for title, key in (
        ("first extra replica works", "first_extra_replica_s"),
        ("first replica from zero", "from_zero_s"),
    ):
        totals = ", ".join(f"{cycle['total']:.1f}" for cycle in figures[key]["cycles"])
        made.add_row(title, *(f"{figures[key][step]:.1f}" for step in STEPS), totals)
    return made


def facts(engine: str, tokens: int, cycles: int) -> dict[str, Any]:
    return conditions.here(
        engine=engine,
        config=configuration(engine),
        burst_clients=BURST,
        tokens=tokens,
        cycles=cycles,
        look_period_s=PERIOD_S,
    )


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="How soon replicas follow load.")
    parser.add_argument("--quick", action="store_true", help="one cycle instead of three")
    parser.add_argument("--cycles", type=int, default=None, help=f"how many cycles; default {CYCLES}")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--linear", action="store_true", help="throughput of 1, 2, 4, 8 simulated engines instead")
    parser.add_argument("--flapping", action="store_true", help="what policies do under a flapping load instead")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer in the burst")
    chosen = parser.parse_args(arguments)
    chosen.cycles = chosen.cycles or (1 if chosen.quick else CYCLES)
    return chosen


def main_of_comparison(compared: Callable[[Callable[[str], None]], dict[str, Any]], console: Console) -> int:
    with figures_or_exit(console):
        figures = compared(console.print)
    write_json(figures | {"conditions": conditions.here(engine="simulated")})
    return 0


def main(arguments: Sequence[str]) -> int:
    chosen = parse_arguments(arguments)
    console = Console(width=None if sys.stdout.isatty() else 130)
    if chosen.linear or chosen.flapping:
        return main_of_comparison(linear if chosen.linear else flapping, console)
    run_conditions = facts(chosen.engine, chosen.tokens, chosen.cycles)
    console.print_json(data=run_conditions)
    with (
        figures_or_exit(console),
        stack(configuration(chosen.engine)) as stage,
        Watch(stage.cluster.environment(), [MODEL]) as watch,
    ):
        measurement = Measurement(stage, watch, chosen.tokens, console)
        measurement.warm()
        cycles = [measurement.cycle() for _ in range(chosen.cycles)]
    figures = result(cycles)
    for failure in {failure for cycle in cycles for failure in cycle.failures}:
        console.print(f"failed: {failure}", markup=False)
    console.print(table(figures))
    write_json(figures | {"conditions": run_conditions})
    return 1 if figures["failed"] else 0
