"""What a call by Python handle costs beside one over HTTP: `python -m benchmarks.handle [--quick]`.

One running stack is called in turn (A B A B) by the official OpenAI SDK over HTTP and by the Python handle; whole and
streamed answers, 1 and 8 clients.
Prints conditions, progress and a table, and as its last line one JSON object.

Invariant: at any time one kind of caller is at work; any call that fails ends the run with exit code 1 and no figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import conditions, stats
from benchmarks.common.arms import HOST, OURS, Arm, BenchmarkError, ModelChoice
from benchmarks.common.output import write_json
from benchmarks.common.processes import ENGINE_CORE
from benchmarks.common.report import cell
from benchmarks.common.run import CONSOLE_WIDTH, FOREIGN_LIMIT_CORES
from benchmarks.common.stage import Stage, drive, run_folder
from benchmarks.handle.callers import HANDLE, SDK, STREAMED, WHOLE, CallSpec
from serve_app.engine import ensure_tiny_model

CALLERS = (SDK, HANDLE)
MODES = (WHOLE, STREAMED)
CLIENTS = (1, 8)
MAX_TOKENS = 32  # short: what is looked for is the cost of a call, and of a token on its way
ROUNDS = 5
QUICK_ROUNDS = 3
# a new process: its first call opens connections and imports
WARMUP_S = 2.0
QUICK_WARMUP_S = 1.0
# some hundred calls of one client
WINDOW_S = 8.0
QUICK_WINDOW_S = 4.0
MODULE = "benchmarks.handle.callers"
CLIENT = "caller"  # among the roles: the calling process itself
SHOWN_ROLES = (CLIENT, "HAProxy", "router replica", "engine replica", ENGINE_CORE)
TIMES = ("call p50", "call p95", "first token p50", "calls")
P50 = 0.5
P95 = 0.95


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    rounds: int
    warmup_s: float
    window_s: float
    max_tokens: int
    seed: int
    clients: tuple[int, ...] = CLIENTS

    def windows(self) -> Iterator[tuple[int, str, int, str]]:
        """Round, mode, clients, caller: the callers follow each other, so that what drifts drifts for all."""
        for number in range(1, self.rounds + 1):
            for mode in MODES:
                for clients in self.clients:
                    for caller in CALLERS:
                        yield number, mode, clients, caller


@dataclass(frozen=True, slots=True)
class Window:
    """One measured window. `cpu_s` are CPU seconds by role, the caller's own among them."""

    caller: str
    mode: str
    clients: int
    round: int
    latency_ms: Sequence[float]
    ttft_ms: Sequence[float]
    cpu_s: Mapping[str, float]
    foreign_cores: float

    def cpu_ms_per_call(self, role: str) -> float:
        return self.cpu_s.get(role, 0.0) / len(self.latency_ms) * 1e3


def plan_of(arguments: Sequence[str]) -> Plan:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handle", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="under five minutes: fewer and shorter windows")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--window-s", type=float)
    parser.add_argument("--clients", help="comma separated client counts")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--seed", type=int, default=1, help="of prompts and resampling")
    given = parser.parse_args(arguments)
    return Plan(
        rounds=given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS),
        warmup_s=QUICK_WARMUP_S if given.quick else WARMUP_S,
        window_s=given.window_s or (QUICK_WINDOW_S if given.quick else WINDOW_S),
        max_tokens=given.max_tokens,
        seed=given.seed,
        clients=tuple(int(count) for count in given.clients.split(",")) if given.clients else CLIENTS,
    )


def measure(arm: Arm, model: ModelChoice, plan: Plan, number: int, mode: str, clients: int, caller: str) -> Window:
    """One window of one kind of caller.

    Raises:
        BenchmarkError: any call failed.
    """
    spec = CallSpec(
        caller=caller,
        mode=mode,
        host=HOST,
        port=arm.port,
        api_key=arm.api_key,
        model=model.name,
        instance=str(arm.instance),
        state_dir=str(arm.log.parent),
        clients=clients,
        max_tokens=plan.max_tokens,
        warmup_s=plan.warmup_s,
        window_s=plan.window_s,
        seed=plan.seed * 1_000_000 + number * 1_000 + clients * 10 + MODES.index(mode),
    )
    result, cpu_s, foreign_s = drive(arm, spec, MODULE)
    if not result["calls"]:
        raise BenchmarkError(f"{caller}, {mode}, {clients} clients: no call ended in the window of {plan.window_s:g} s")
    used = {**cpu_s, CLIENT: result["cpu_s"]}
    foreign_cores = foreign_s / result["window_s"]
    return Window(caller, mode, clients, number, result["latency_ms"], result["ttft_ms"], used, foreign_cores)


class Analysis:
    """The figures of all windows, with 95% bootstrap intervals over rounds and calls."""

    def __init__(self, windows: Sequence[Window], seed: int, *, resamples: int = stats.RESAMPLES) -> None:
        self._windows = windows
        self._resamples = resamples
        self._rng = np.random.default_rng(seed)
        self.roles = sorted({role for window in windows for role, used in window.cpu_s.items() if used})

    def of(self, caller: str, mode: str, clients: int) -> list[Window]:
        found = [w for w in self._windows if (w.caller, w.mode, w.clients) == (caller, mode, clients)]
        return sorted(found, key=lambda window: window.round)

    def figures(self, caller: str, mode: str, clients: int) -> dict[str, Any]:
        """Latency in ms of calls and of first tokens, CPU ms a call by role."""
        windows = self.of(caller, mode, clients)
        latency = _rounds(windows, "latency_ms")
        ttft = _rounds(windows, "ttft_ms")
        return {
            "latency_ms": {"p50": self._quantile(latency, P50), "p95": self._quantile(latency, P95)},
            "ttft_ms": {"p50": self._quantile(ttft, P50)},
            "cpu_ms_per_call": {role: self._cpu(windows, role) for role in self.roles},
            "calls": sum(len(w.latency_ms) for w in windows),
        }

    def _quantile(self, rounds: stats.Rounds, q: float) -> dict[str, Any]:
        return stats.quantile_estimate(rounds, q, self._rng, resamples=self._resamples).as_json()

    def _cpu(self, windows: Sequence[Window], role: str) -> dict[str, Any]:
        rounds = stats.as_rounds([[window.cpu_ms_per_call(role)] for window in windows])
        return stats.estimate(
            [rounds], lambda arms: stats.median_of_means(arms[0]), self._rng, resamples=self._resamples
        ).as_json()


def _rounds(windows: Sequence[Window], key: str) -> list[stats.Samples]:
    return stats.as_rounds([getattr(window, key) for window in windows])


def build(analysis: Analysis, plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result object: figures by mode, client count and caller."""
    figures: dict[str, Any] = {}
    for mode in MODES:
        for clients in plan.clients:
            key = f"{mode}, {clients}"
            figures[key] = {caller: analysis.figures(caller, mode, clients) for caller in CALLERS}
    return {"figures": figures, "conditions": dict(facts)}


def print_tables(console: Console, result: Mapping[str, Any]) -> None:
    """Times and CPU, one row for each mode, client count and caller."""
    times = Table(title="one call: times in ms (95% bootstrap intervals)")
    used = Table(title="one call: CPU in ms, by process (median over rounds)")
    for table, columns in ((times, TIMES), (used, (*SHOWN_ROLES, "all else"))):
        for column in ("answer, clients", "caller", *columns):
            table.add_column(column, justify="left" if column == "caller" else "right")
    for key, by_caller in result["figures"].items():
        for caller, f in by_caller.items():
            found = [f["latency_ms"]["p50"], f["latency_ms"]["p95"], f["ttft_ms"]["p50"]]
            times.add_row(key, caller, *map(cell, found), str(f["calls"]))
            cpu = {role: estimate["value"] for role, estimate in f["cpu_ms_per_call"].items()}
            rest = sum(value for role, value in cpu.items() if role not in SHOWN_ROLES)
            used.add_row(key, caller, *(f"{cpu.get(role, 0.0):.3g}" for role in SHOWN_ROLES), f"{rest:.3g}")
        times.add_section()
        used.add_section()
    console.print(times)
    console.print(used)


def run(stage: Stage, plan: Plan) -> tuple[list[Window], dict[str, Any]]:
    """Measure; returns the windows and the conditions they were got under."""
    facts = conditions.collect(stage.model, asdict(plan), [])
    stage.console.print_json(data=facts)
    arm = stage.get(OURS)
    windows: list[Window] = []
    for number, mode, clients, caller in plan.windows():
        window = measure(arm, stage.model, plan, number, mode, clients, caller)
        windows.append(window)
        stage.console.print(
            f"  round {number} {mode:>8} {clients} clients {caller:>6}: p50 {np.median(window.latency_ms):6.2f} ms, "
            f"{len(window.latency_ms)} calls, {window.cpu_ms_per_call(CLIENT):.2f} ms of the caller's CPU a call, "
            f"others on this machine {window.foreign_cores:.2f} cores"
        )
    foreign = round(max(window.foreign_cores for window in windows), 3)
    return windows, facts | {"engines": stage.engines, "foreign_cores_max": foreign}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    plan = plan_of(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    model = ModelChoice(path=str(ensure_tiny_model()))
    with (
        run_folder(console) as folder,
        closing(Stage(model, folder, (), console, one_at_a_time=False)) as stage,
    ):
        windows, facts = run(stage, plan)
    result = build(Analysis(windows, plan.seed), plan, facts)
    print_tables(console, result)
    if facts["foreign_cores_max"] > FOREIGN_LIMIT_CORES:
        cores = facts["foreign_cores_max"]
        console.print(f"  other processes used up to {cores:.2f} cores in a window: figures are noise", style="yellow")
    write_json(result)
    return 0
