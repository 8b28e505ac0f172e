"""Does the simulator tell the truth? `python -m benchmarks.overload.honest [--quick] [--keep FILE | --replay FILE]`.

The arm `ours` of `benchmarks.overload` (this stack with vLLM, EngineCore on one core, everything else on the other) has
the same open load `RUNS` times at each of `MULTIPLES` of its capacity: the same requests of three classes at the same
moments, with other texts each time, so that no prompt is cached. Before that, on the same running engine, `serve-app
calibrate` measures the engine's profile, and one client at a time measures what a request takes beside queue and
engine. Then each run is played in `autoscaling.simulator`: the profile, the world that `serve-app simulate` makes of
the same configuration, the requests at their moments with the tokens that came out, their deadlines and patience.
Nothing is fitted to the loaded runs.

Compared are p50 and p99 of the first token by class, over those who got one, and the goodput: output tokens/s of
requests finished within both of their levels. A simulated figure may differ from the median of the real runs by the
larger of 15% and the spread of the runs, which is their greatest less their least, over their median.

Prints conditions, progress and a table, and as its last line one JSON object with `pass`. With `--keep` everything
that was measured is written to a file, which `--replay` simulates again without a server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaling.simulator import EngineProfile, World
from benchmarks.common import conditions
from benchmarks.common.arms import OURS, ROOT, Arm, BenchmarkError, ModelChoice, our_settings
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import run_folder
from benchmarks.common.traces import DATA, TraceMissingError
from benchmarks.common.worlds import PROGRESS_S
from benchmarks.overload.answers import Answer, Window
from benchmarks.overload.comparison import Compared, compared
from benchmarks.overload.deep_model import deepened
from benchmarks.overload.main import ended_inside, levels_of
from benchmarks.overload.offered_load import endless, lengths, offers
from benchmarks.overload.plan import (
    CAPACITY,
    CLOSED_FACTOR,
    DEPTH,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    UNLOADED,
    Levels,
    Plan,
)
from benchmarks.overload.replay import replayed, request_s
from benchmarks.overload.report import progress_line
from benchmarks.overload.stage import Theatre, keys_of
from serve_app.cli.simulate import GpuBound, world_of
from serve_app.engine import default_root, ensure_tiny_model
from serve_app.settings import parse

RUNS = 5
QUICK_RUNS = 2
SPANS_S: Mapping[float, float] = {2.0: 45.0, 0.5: 20.0}  # by multiple: the whole takes twelve minutes
QUICK_SPANS_S: Mapping[float, float] = {2.0: 20.0}
CLOSED_S = 20.0
QUICK_CLOSED_S = 8.0
WARMUP_S = 6.0  # of a window: the slots are full, and as many wait as will
TAIL_S = 2.0
OTHER_TEXTS = 1_000_000  # between the seeds of the texts of two runs: far from every seed of a load
CALIBRATION_S = 240.0  # it takes half a minute on two idle cores
Played = dict[float, tuple[list[Window], list[Window]]]  # by multiple: the real windows, and each simulated
SHOWN = ("figure", "real runs", "simulated", "difference", "allowed", "")


def plan_of(options: argparse.Namespace) -> Plan:
    """The sizes of the run, as `Theatre` takes them."""
    spans = dict(QUICK_SPANS_S if options.quick else SPANS_S)
    return Plan(
        arms=(OURS,),
        multiples=tuple(spans),
        window_s={multiple: options.scale * span_s for multiple, span_s in spans.items()},
        rounds=options.runs or (QUICK_RUNS if options.quick else RUNS),
        other_s=0.0,
        closed_s=QUICK_CLOSED_S if options.quick else CLOSED_S,
        warmup_s=WARMUP_S,
        tail_s=TAIL_S,
        max_num_seqs=MAX_NUM_SEQS,
        depth=DEPTH,
        seed=options.seed,
        folder=str(options.data),
        most_s=0.0,
    )


def calibrated(arm: Arm, model: ModelChoice, file: Path) -> EngineProfile:
    """The profile that `serve-app calibrate` measures of the running engine.

    Raises:
        BenchmarkError: it failed; carries what it said.
    """
    command = [sys.executable, "-m", "serve_app.cli", "calibrate", model.name, "--out", str(file)]
    variables = {**os.environ, "SERVE_APP_URL": arm.url, "SERVE_APP_API_KEY": arm.api_key}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=CALIBRATION_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"serve-app calibrate took more than {CALIBRATION_S:g} s") from None
    if done.returncode:
        raise BenchmarkError(f"serve-app calibrate ended with {done.returncode}: {done.stderr[-2000:]}")
    return EngineProfile(**json.loads(file.read_text()))


def measure(theatre: Theatre, plan: Plan, console: Console) -> dict[str, Any]:
    """Everything that is measured, plain for JSON. Raises BenchmarkError."""
    server = theatre.get(OURS)
    unloaded = theatre.closed(OURS, UNLOADED, 1, plan.closed_s, plan.seed)
    full = theatre.closed(OURS, CAPACITY, CLOSED_FACTOR * plan.max_num_seqs, plan.closed_s, plan.seed + 1)
    levels = levels_of(ended_inside(unloaded), ended_inside(full), plan.closed_s)
    console.print_json(data=levels.as_json())
    profile = calibrated(server.arm, theatre.model, theatre.folder / "profile.json")
    console.print_json(data=asdict(profile))
    windows = []
    for run in range(plan.rounds):
        for multiple, span_s in plan.window_s.items():
            raw = theatre.window(OURS, multiple, span_s, 0, levels, texts=(run + 1) * OTHER_TEXTS)
            windows.append(raw)
            console.print("  " + progress_line(Window.of(raw)), markup=False)
    return {
        "seed": plan.seed,
        "levels": list(astuple(levels)),
        "profile": asdict(profile),
        "unloaded": unloaded["rows"],
        "windows": windows,
    }


def world_of_run(profile: EngineProfile, model: ModelChoice) -> World:
    """The world that `serve-app simulate` makes of the configuration of the run, with counts of tokens as often as a
    router has them."""
    settings = parse(our_settings(model, "k" * 32, keys_of(OURS)))
    return replace(world_of(settings, {model.name: profile}, GpuBound(1)), progress_s=PROGRESS_S)


def simulate(measured: Mapping[str, Any], model: ModelChoice, folder: Path) -> tuple[World, Played]:
    """The world of the run, and by multiple its real windows and the same ones simulated."""
    drawn_from = lengths(folder, model.max_model_len)
    world = world_of_run(EngineProfile(**measured["profile"]), model)
    unloaded = [Answer.of(row) for row in measured["unloaded"]]
    asked = list(islice(endless(drawn_from, measured["seed"]), 1 + max(each.number for each in unloaded)))
    world = replace(world, request_s=request_s(world, unloaded, asked, model.name))
    found: Played = {}
    for raw in measured["windows"]:
        real = Window.of(raw)
        span_s = 1.0 + max(each.at_s for each in real.everybody)
        offered = offers(drawn_from, raw["rate"], span_s, raw["seed"])
        reals, virtuals = found.setdefault(real.multiple, ([], []))
        reals.append(real)
        virtuals.append(replayed(world, real, offered, model.name))
    return world, found


def table_of(multiple: float, figures: Mapping[str, Compared]) -> Table:
    """The comparison at one multiple, a figure a row."""
    table = Table(title=f"at {multiple:g} times the capacity")
    for name in SHOWN:
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name, each in figures.items():
        real = "-" if each.middle is None else f"{each.middle:.1f} [{min(each.real):.1f}, {max(each.real):.1f}]"
        cells = [
            real,
            "-" if each.simulated is None else f"{each.simulated:.1f}",
            "-" if each.difference is None else f"{each.difference:+.1%}",
            "-" if each.allowed is None else f"{each.allowed:.1%}",
        ]
        table.add_row(name, *cells, "ok" if each.is_right else "MISSED")
    return table


def unjudged_of(window: Window) -> str:
    """What is not compared, but shows why a figure differs: all tokens, gaps between tokens, and ends by class."""
    seen = window.seen_figures()
    gaps = seen["itl_ms"]
    ends = "; ".join(f"{group} {dict(sorted(outcomes.items()))}" for group, outcomes in seen["outcomes"].items())
    return f"{seen['tokens_per_s']:.0f} tokens/s, gaps p50 {gaps['p50']} p99 {gaps['p99']} ms; {ends}"


def report(
    console: Console,
    measured: Mapping[str, Any],
    world: World,
    played: Mapping[float, tuple[list[Window], list[Window]]],
) -> bool:
    """Print the tables and the JSON line; whether every figure is right."""
    console.print(f"a request takes {1e3 * world.request_s:.1f} ms beside queue and engine")
    result: dict[str, Any] = {}
    passed = True
    for multiple, (real, simulated) in played.items():
        figures = compared(real, simulated)
        passed = passed and all(each.is_right for each in figures.values())
        console.print(table_of(multiple, figures))
        console.print(f"  real, first:      {unjudged_of(real[0])}", markup=False)
        console.print(f"  simulated, first: {unjudged_of(simulated[0])}", markup=False)
        result[f"{multiple:g}x"] = {name: each.as_json() for name, each in figures.items()}
    write_json(
        {
            "pass": passed,
            "figures": result,
            "request_s": world.request_s,
            "levels": Levels(*measured["levels"]).as_json(),
            "profile": measured["profile"],
            "conditions": measured["conditions"],
        }
    )
    return passed


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload.honest", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two runs of one load, to see that it works")
    parser.add_argument("--runs", type=int, help="of each load")
    parser.add_argument("--scale", type=float, default=1.0, help="of the windows' lengths")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths and texts")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    parser.add_argument("--keep", type=Path, help="write what was measured to this file")
    parser.add_argument("--replay", type=Path, help="simulate what such a file has; no server is started")
    return parser.parse_args(arguments)


def measured_now(options: argparse.Namespace, model: ModelChoice, console: Console) -> dict[str, Any]:
    """Start the server, measure, take it down. Raises SystemExit: it could not be measured, and a message was shown."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    plan = plan_of(options)
    facts = conditions.collect(model, plan.as_json(), [])
    console.print_json(data=facts)
    with run_folder(console) as folder:
        theatre = Theatre(model, folder, console, plan, (cores[0], cores[1]))
        try:
            measured = measure(theatre, plan, console)
        finally:
            theatre.close()
    return measured | {"conditions": facts}


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every simulated figure is right; 1: one is not, or they could not be got."""
    options = parse_arguments(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    path = deepened(ensure_tiny_model(), DEPTH, default_root())
    model = ModelChoice(str(path), max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS)
    try:
        lengths(options.data, model.max_model_len)
    except TraceMissingError as error:
        console.print(f"failed: {error}", style="red", markup=False)
        return 1
    if options.replay is not None:
        measured = json.loads(options.replay.read_text())
    else:
        measured = measured_now(options, model, console)
        if options.keep is not None:
            options.keep.write_text(json.dumps(measured))
    world, played = simulate(measured, model, options.data)
    return 0 if report(console, measured, world, played) else 1


if __name__ == "__main__":
    sys.exit(main())
