"""Is the line fair, and what does that cost: `python -m benchmarks.fairness [--quick] [--simulated-only] [--plot SVG]`.

Our line against the same line with one tenant for all, which is order of arrival (`fifo`), on the same requests: VTC's
two experiments (`benchmarks.fairness.metric` has the paper and the figures, `.trace` the requests,
`.simulation` the simulated engine and the arms), and through the whole stack with vLLM by what its clients see, as any
endpoint's (`benchmarks.fairness.endpoint`). Keys of the JSON object that is the last line, each the median over seeds:

    service_ratio         two clients, demand 1:2, together 2.6 times what the engine can serve, for ten minutes: the
                          service of the better served one over the other's, after the first minute. Bar: 1.05
    max_diff_over_rate    the same: VTC's difference in windows of 60 s, the largest one, over the rate of service of
                          both. Bar: 0.29. `max_diff_over_rate_27` is that of the 27 clients
    throughput_over_fifo  the same: tokens/s over those of `fifo`. Bar: 0.99. `throughput_over_fifo_27` is how soon all
                          requests of the 27 clients were served
    light_ttft_p99_gain   27 clients, 1.25 times what can be served: p99 of the time to the first token of all requests
                          of light clients under `fifo`, over ours. Light is who asks for less than one of 27 equal
                          parts of what can be served (`light_clients`). Bar: 10

With `--url` any OpenAI-compatible endpoint is measured instead (`benchmarks.fairness.endpoint` has its figures), and
with `--compare FOLDER` three of them on this machine (`benchmarks.endpoint.compare`).

`simulated` has every arm by experiment with its spread over seeds, `real` the run on the engine. What the engine can
serve is measured first, on the simulated one in overload, on the real one in a closed loop.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaling.simulator import EngineProfile
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import figures_or_exit
from benchmarks.common.stage import on_terminate
from benchmarks.common.stats import shorten
from benchmarks.common.traces import DATA, Request, TraceMissingError
from benchmarks.endpoint.compare import compare, measure_ours
from benchmarks.endpoint.size import add_size_arguments
from benchmarks.endpoint.target import add_target_arguments, is_asked_for
from benchmarks.fairness import endpoint
from benchmarks.fairness.metric import Answer, Span, first_token_waits, judge, light_clients, p99, worth
from benchmarks.fairness.plot import plot
from benchmarks.fairness.simulation import ARMS, ENGINE, FIFO, OURS, capacity, play
from benchmarks.fairness.trace import BACKLOG, SKEW, Lengths, azure_lengths, skewed, two_clients

TWO = "two clients"
MANY = "27 clients"
OVERLOAD = {TWO: BACKLOG, MANY: SKEW}
# VTC's real trace has ten minutes; estimates are learned in the first one
LENGTH_S = 600.0
WARM_S = 60.0
CAPACITY_S = 900.0  # 600 s of it are counted: a thousand requests
SEEDS = 5
QUICK_SEEDS = 2
BARS = {
    "service_ratio": 1.05,
    "max_diff_over_rate": 0.29,
    "throughput_over_fifo": 0.99,
    "light_ttft_p99_gain": 10.0,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    seeds: tuple[int, ...]
    length_s: float = LENGTH_S
    warm_s: float = WARM_S
    capacity_s: float = CAPACITY_S
    engine: EngineProfile = ENGINE


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on one trace. The waits are of light clients' requests: to the first token, in seconds."""

    service_ratio: float
    max_diff_over_rate: float
    mean_diff_over_rate: float
    tokens_per_s: float
    ended_s: float
    light_clients: int = 0
    light_requests: int = 0
    light_ttft_p50_s: float | None = None
    light_ttft_p99_s: float | None = None


def figures_of(answers: Sequence[Answer], plan: Plan, ended_s: float, rate: float | None) -> Figures:
    """Of one run. `rate`: of service that the engine has for all; None: first tokens are not asked for."""
    found = judge(answers, Span(plan.warm_s, plan.length_s))
    if rate is None:
        return Figures(**asdict(found), ended_s=ended_s)
    light = light_clients(answers, plan.length_s, rate)
    waits = first_token_waits(answers, light)
    p50_s, p99_s = (median(waits), p99(waits)) if waits else (None, None)
    return Figures(**asdict(found), ended_s=ended_s, light_clients=len(light), light_requests=len(waits),
                   light_ttft_p50_s=p50_s, light_ttft_p99_s=p99_s)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Simulated:
    """Every arm by experiment and seed, and two clients of the first seed as they went."""

    requests_per_s: float
    runs: dict[str, dict[str, list[Figures]]]
    drawn: dict[str, Sequence[Answer]]

    def throughput_over_fifo(self, arm: str) -> dict[str, list[float]]:
        """By experiment and seed. Two clients' line never ends: what was served; the others' does: how soon."""
        two = self.runs[TWO]
        many = self.runs[MANY]
        return {
            TWO: [one.tokens_per_s / fifo.tokens_per_s for one, fifo in zip(two[arm], two[FIFO.name], strict=True)],
            MANY: [fifo.ended_s / one.ended_s for one, fifo in zip(many[arm], many[FIFO.name], strict=True)],
        }

    def light_gain(self, arm: str) -> list[float]:
        """By seed: how much sooner light clients' slowest first tokens come than in order of arrival."""
        pairs = zip(self.runs[MANY][arm], self.runs[MANY][FIFO.name], strict=True)
        return [
            fifo.light_ttft_p99_s / one.light_ttft_p99_s
            for one, fifo in pairs
            if fifo.light_ttft_p99_s is not None and one.light_ttft_p99_s is not None
        ]

    def keys(self, arm: str) -> dict[str, float]:
        """The figures of an arm that are reported first."""
        runs = {name: by_arm[arm] for name, by_arm in self.runs.items()}
        differences = {name: median(one.max_diff_over_rate for one in found) for name, found in runs.items()}
        throughput = {name: median(ratios) for name, ratios in self.throughput_over_fifo(arm).items()}
        return {
            "service_ratio": median(one.service_ratio for one in runs[TWO]),
            "max_diff_over_rate": differences[TWO],
            "throughput_over_fifo": throughput[TWO],
            "light_ttft_p99_gain": median(self.light_gain(arm)),
            "max_diff_over_rate_27": differences[MANY],
            "throughput_over_fifo_27": throughput[MANY],
        }


def simulate(lengths: Sequence[Lengths], plan: Plan, tell: Callable[[str], None]) -> Simulated:
    """Both experiments, every arm on the same requests of each seed."""
    per_s = capacity(lengths, plan.engine, plan.capacity_s)
    tell(f"the engine ends {per_s:.2f} requests/s")
    service_per_s = per_s * fmean(worth(one.prompt, one.output) for one in lengths)
    runs: dict[str, dict[str, list[Figures]]] = {name: {arm.name: [] for arm in ARMS} for name in (TWO, MANY)}
    drawn: dict[str, Sequence[Answer]] = {}
    for seed in plan.seeds:
        traces: dict[str, list[Request]] = {
            TWO: two_clients(seed, lengths, OVERLOAD[TWO] * per_s, plan.length_s),
            MANY: skewed(seed, lengths, OVERLOAD[MANY] * per_s, plan.length_s),
        }
        for arm in ARMS:
            two = play(traces[TWO], arm, plan.engine)
            runs[TWO][arm.name].append(figures_of(two.answers, plan, two.ended_s, None))
            many = play(traces[MANY], arm, plan.engine)
            runs[MANY][arm.name].append(figures_of(many.answers, plan, many.ended_s, service_per_s))
            if seed == plan.seeds[0]:
                drawn[arm.name] = two.answers
        tell(f"seed {seed}: {', '.join(f'{name} {len(trace)} requests' for name, trace in traces.items())}")
    return Simulated(per_s, runs, drawn)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    ordered = [shorten(value) for value in sorted(values)]
    return {"median": shorten(median(values)), "least": ordered[0], "most": ordered[-1]}


def as_json(found: Simulated) -> dict[str, Any]:
    """Every arm by experiment, with spreads over seeds."""
    result: dict[str, Any] = {"capacity_requests_per_s": shorten(found.requests_per_s)}
    for name, by_arm in found.runs.items():
        result[name] = {}
        for arm, runs in by_arm.items():
            columns = {key: [asdict(one)[key] for one in runs] for key in asdict(runs[0])}
            figures = {key: spread(values) for key, values in columns.items() if None not in values and any(values)}
            figures["throughput_over_fifo"] = spread(found.throughput_over_fifo(arm)[name])
            if name == MANY and (gains := found.light_gain(arm)):
                figures["light_ttft_p99_gain"] = spread(gains)
            result[name][arm] = figures
    result["keys"] = {arm: {key: shorten(value) for key, value in found.keys(arm).items()} for arm in found.runs[TWO]}
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    """A table of each experiment: medians over seeds, least and most beside them."""
    rows = {
        TWO: ("service_ratio", "max_diff_over_rate", "mean_diff_over_rate", "throughput_over_fifo"),
        MANY: (
            "max_diff_over_rate", "throughput_over_fifo", "light_ttft_p50_s", "light_ttft_p99_s", "light_ttft_p99_gain",
        ),
    }  # fmt: skip
    for name, keys in rows.items():
        table = Table("arm", *keys, title=f"{name}, {OVERLOAD[name]} times capacity")
        for arm, figures in result[name].items():
            cells = [figures[key] for key in keys]
            table.add_row(arm, *(f"{one['median']:g} [{one['least']:g}, {one['most']:g}]" for one in cells))
        console.print(table)


def parser_of() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, a short real run")
    parser.add_argument("--simulated-only", action="store_true", help="no real engine")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a plot of service over time, first seed")
    add_target_arguments(parser)
    add_size_arguments(parser)
    parser.add_argument(
        "--compare", type=Path, metavar="FOLDER", help="with LiteLLM's environment in FOLDER, made there"
    )
    return parser


def plan_of(given: argparse.Namespace) -> Plan:
    """What a command line without an endpoint asks for."""
    count = given.seeds or (QUICK_SEEDS if given.quick else SEEDS)
    return Plan(tuple(range(given.seed, given.seed + count)))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    parser = parser_of()
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True, width=140, highlight=False)
    signal.signal(signal.SIGTERM, on_terminate)
    with figures_or_exit(console, TraceMissingError):
        if given.compare is not None:
            return compare(given.compare, given, console)
        if is_asked_for(parser, given):
            return endpoint.run(endpoint.plan_of(parser, given), given, console)
        return run(plan_of(given), given, console)


def run(plan: Plan, given: argparse.Namespace, console: Console) -> int:
    """Our line on the simulated engine, and on the real one.

    Raises:
        BenchmarkError: the stack failed.
        TraceMissingError: the lengths are not there.
    """
    conditions = here(seeds=list(plan.seeds), engine=asdict(plan.engine), overload=OVERLOAD)
    console.print_json(json.dumps(conditions))
    found = simulate(azure_lengths(given.data), plan, console.print)
    result = as_json(found)
    show(console, result)
    if given.plot is not None:
        panels = {name: found.drawn[name] for name in (FIFO.name, OURS.name)}
        title = "service (prompt + 2 x output tokens), two clients with demand 1:2 in overload"
        plot(panels, 0.0, plan.length_s, title, given.plot)
    real = None if given.simulated_only else measure_ours(given, console)
    keys = result["keys"][OURS.name]
    write_json({**keys, "bars": BARS, "simulated": result, "real": real, "conditions": conditions})
    return 0
