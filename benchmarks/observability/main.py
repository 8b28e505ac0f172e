"""What it costs to be seen: `python -m benchmarks.observability [--quick] [--pairs N]`.

One stack of 3 models on 6 simulated engines behind 3 routers, watched and unwatched in turns under the same load.
Watched: a console is attached, metrics are scraped every 15 s, 1% of the requests are traced, requests are logged, and
history is kept. Unwatched: nothing of that; settings change while the stack runs. A figure is the watched CPU time a
request over the unwatched one, without EngineCore (simulated engines have none).

Then a stack with 10,000 tenants: the series of a scrape when 40 of them have asked until those of most use have their
names and there are no new series, and after each of them has asked.

Prints conditions, a table, and as its last line one JSON object.

Invariant: a request that is not answered whole, or a watcher that fails, ends the run with exit code 1 and no figure.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console as Terminal
from rich.table import Table

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.processes import ENGINE_CORE, CpuMeter
from benchmarks.common.run import figures_or_exit
from benchmarks.common.scaling_stack import Stage, stack
from benchmarks.common.stats import as_rounds, estimate, median_of_ratios
from benchmarks.observability.load import Load
from benchmarks.observability.watchers import Console, Scraper, series_of
from tests.fakes.otlp_receiver import otlp_receiver

MODELS = ("chat", "code", "draft")
REPLICAS = 2  # of each model
ROUTERS = 3
SLOTS = 16  # of an engine
STEP_S = 0.02  # a token every 20 ms, as a 70B model on four GPUs
TOKENS = 16  # of an answer
CLIENTS = 24  # a rate that two cores carry beside this process
TENANTS = 40  # twice those that the metrics name
MANY_TENANTS = 10_000
PAIRS = 10
QUICK_PAIRS = 3
WINDOW_S = 30.0  # has two scrapes, at its beginning and after 15 s
QUICK_WINDOW_S = 16.0
WARM_S = 5.0
CPUS = 16  # logical ones, for Ray's placement
MAX_CPU_RATIO = 1.05  # [bar]
MAX_CONSOLE_BYTES_PER_S = 50_000  # [bar]
MAX_SERIES = 50_000  # [bar]
MAX_SERIES_GROWTH = 1.1  # [bar], with 10,000 tenants
SEED = 1

TURN_S = 20.0  # of the few tenants, between two looks at their series
MAX_TURNS = 10
NAMED_S = 60.0  # after which a scrape chooses the tenants that have names
SETTLED = 1.01  # growth of the series in a turn that has brought none worth speaking of

OFF: Mapping[str, Any] = {"records": {"keep_days": 0}}


@dataclass(slots=True)
class Arm:
    """The stack in one of its two states. `cpu_us`: microseconds a request, of each window."""

    name: str
    stage: Stage
    keys: Sequence[str]
    entry: Mapping[str, Any]
    cpu_us: list[float] = field(default_factory=list)
    by_role: dict[str, list[float]] = field(default_factory=dict)
    requests: int = 0

    def begin(self) -> None:
        """Make it the state of the stack. Raises BenchmarkError."""
        last = self.stage.declare(self.entry)
        if last.get("state") != "running":
            raise BenchmarkError(f"the stack did not become {self.name}: {last}")
        Load(self.stage.cluster.url, self.keys, MODELS, TOKENS, SEED).for_seconds(CLIENTS, WARM_S)

    def measure(self, seconds: float, seed: int) -> None:
        """One window. Raises BenchmarkError: a request was not answered."""
        load = Load(self.stage.cluster.url, self.keys, MODELS, TOKENS, seed)
        mark = self.stage.cluster.mark
        meter = CpuMeter(self.stage.cluster.pids()[0], mark)
        meter.begin()
        load.for_seconds(CLIENTS, seconds)
        used = {role: spent for role, spent in meter.end().items() if role != ENGINE_CORE}
        if meter.lost:
            raise BenchmarkError(f"processes of {self.name} ended while it was measured: {meter.lost}")
        self.requests += load.answered
        self.cpu_us.append(sum(used.values()) / load.answered * 1e6)
        for role, spent in used.items():
            self.by_role.setdefault(role, []).append(spent / load.answered * 1e6)


def configuration(watched: bool, endpoint: str) -> dict[str, Any]:
    """Of the stack. `endpoint`: where its traces go."""
    model = {
        "engine": "simulated",
        "max_num_seqs": SLOTS,
        "replicas": {"min_replicas": REPLICAS, "max_replicas": REPLICAS},
        "simulated": {"decode_step_s": STEP_S},
    }
    shared = {"models": [{"name": name, **model} for name in MODELS], "router": {"replicas": ROUTERS}}
    return shared | ({"traces": {"endpoint": endpoint, "sample_ratio": 0.01}} if watched else dict(OFF))


def keys_of(tenants: int) -> list[dict[str, Any]]:
    return [{"key": f"sk-observed-{number:08d}", "tenant": f"tenant-{number}"} for number in range(tenants)]


@dataclass(slots=True)
class Watching:
    """What the watchers of all watched windows saw."""

    bytes_per_s: list[float] = field(default_factory=list)
    scrapes: int = 0
    series: int = 0
    failures: list[str] = field(default_factory=list)

    def measure(self, arm: Arm, seconds: float, seed: int) -> None:
        """One window of a watched stack. Raises as `Arm.measure`."""
        console = Console(arm.stage)
        scraper = Scraper(arm.stage)
        with ExitStack() as closing:
            for watcher in (console, scraper):
                watcher.start()
                closing.callback(watcher.close)
            arm.measure(seconds, seed)
            self.bytes_per_s.append(console.received / seconds)
        self.scrapes += scraper.scrapes
        self.series = scraper.series
        self.failures += [*console.failures, *scraper.failures]


def compare(pairs: int, window_s: float, terminal: Terminal) -> tuple[Arm, Arm, dict[str, float]]:
    """The unwatched stack, the watched one, and what its watchers saw. Raises BenchmarkError."""
    tenants = keys_of(TENANTS)
    keys = [tenant["key"] for tenant in tenants]
    watching = Watching()
    with otlp_receiver() as receiver, stack(configuration(True, receiver.url), tenants, cpus=CPUS) as stage:
        off, on = (
            Arm(name, stage, keys, stage.entry(configuration(name == "on", receiver.url), tenants))
            for name in ("off", "on")
        )
        present = None
        for number in range(pairs):
            for arm in (off, on) if number % 2 else (on, off):
                if arm is not present:
                    arm.begin()
                    present = arm
                if arm is on:
                    watching.measure(arm, window_s, SEED + number)
                else:
                    arm.measure(window_s, SEED + number)
            terminal.print(f"  pair {number + 1} of {pairs}: {off.cpu_us[-1]:.0f} us off, {on.cpu_us[-1]:.0f} us on")
        if watching.failures:
            raise BenchmarkError(f"a watcher failed: {watching.failures[:3]}")
        if not receiver.messages:
            raise BenchmarkError("no trace arrived")
        if not watching.scrapes or not all(watching.bytes_per_s):
            raise BenchmarkError("nothing was scraped, or the console got nothing")
        seen = {"console_bytes_per_s": statistics.median(watching.bytes_per_s), "spans": len(receiver.spans)}
        return off, on, seen | {"scrapes": watching.scrapes, "series": watching.series}


def many_tenants(terminal: Terminal) -> dict[str, int]:
    """The series of a scrape when `TENANTS` have asked, and when all have. Raises BenchmarkError."""
    tenants = keys_of(MANY_TENANTS)
    keys = [tenant["key"] for tenant in tenants]
    with stack(configuration(False, ""), tenants, cpus=CPUS) as stage:
        url = stage.cluster.url
        few = series_of(stage)
        for turn in range(MAX_TURNS):
            before = few
            Load(url, keys[:TENANTS], MODELS, TOKENS, SEED + turn).for_seconds(CLIENTS, TURN_S)
            few = series_of(stage)
            if turn * TURN_S > NAMED_S and few < SETTLED * before:  # the tenants have their names
                break
        terminal.print(f"  {few} series of {TENANTS} tenants")
        Load(url, keys, MODELS, 1, SEED).times(CLIENTS, MANY_TENANTS)
        return {"series_few_tenants": few, "series_10000_tenants": series_of(stage)}


def show(terminal: Terminal, off: Arm, on: Arm) -> None:
    table = Table("process", "off, us", "on, us", "on / off", title="CPU a request, medians")
    for role in sorted(off.by_role.keys() | on.by_role.keys()):
        values = [statistics.median(arm.by_role.get(role, [0.0])) for arm in (off, on)]
        table.add_row(role, *(f"{value:.0f}" for value in values), f"{values[1] / values[0]:.3f}" if values[0] else "-")
    terminal.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observability", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs of {QUICK_WINDOW_S:g} s")
    parser.add_argument("--pairs", type=int, help=f"instead of {PAIRS}")
    options = parser.parse_args(arguments)
    pairs = options.pairs or (QUICK_PAIRS if options.quick else PAIRS)
    window_s = QUICK_WINDOW_S if options.quick else WINDOW_S
    terminal = Terminal(stderr=True, highlight=False)
    conditions = here(pairs=pairs, window_s=window_s, clients=CLIENTS, tokens=TOKENS, tenants=TENANTS, off=dict(OFF))
    terminal.print(conditions)
    with figures_or_exit(terminal):
        off, on, seen = compare(pairs, window_s, terminal)
        show(terminal, off, on)
        many = many_tenants(terminal)
    ratio = estimate(
        [as_rounds([[one] for one in arm.cpu_us]) for arm in (off, on)], median_of_ratios, np.random.default_rng(SEED)
    )
    result = {
        "cpu_ratio": ratio.value,
        "interval": [ratio.low, ratio.high],
        **seen,
        **many,
        "cpu_us": {arm.name: [round(one, 1) for one in arm.cpu_us] for arm in (off, on)},
        "requests": {arm.name: arm.requests for arm in (off, on)},
    }
    write_json(result | {"within_bars": judged(result), "conditions": conditions})
    return 0


def judged(result: Mapping[str, Any]) -> dict[str, bool]:
    """Which bars it meets."""
    return {
        "cpu_ratio": result["cpu_ratio"] <= MAX_CPU_RATIO,
        "console_bytes_per_s": result["console_bytes_per_s"] <= MAX_CONSOLE_BYTES_PER_S,
        "series": result["series"] <= MAX_SERIES,
        "series_10000_tenants": result["series_10000_tenants"] <= MAX_SERIES_GROWTH * result["series_few_tenants"],
    }
