"""How much of vLLM's own server's speed this stack keeps: `python -m benchmarks.throughput [--quick] [--batch-curve]`.

One load generator drives vLLM's own server and this stack in turn (A B A B), same model and engine environment, at 1,
8, 32 and 64 clients. Prints conditions, progress and tables, and as its last line one JSON object. `--arms vllm,vllm`
compares the baseline with itself: what is left between the two is noise. `--batch-curve` has 1 to 128 clients on
engines of 128 slots, and says where the knee is.

Invariant: at any time at most one arm is under load; any failed request ends the run with exit code 1 and no figure.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rich.console import Console

from benchmarks.common import batch_curve, conditions, report
from benchmarks.common.batch_curve_plot import plot
from benchmarks.common.output import write_json
from benchmarks.common.plan import Plan, model_of, order, parse_arguments, plan_of, seed_of
from benchmarks.common.report import Analysis, Window
from benchmarks.common.run import CONSOLE_WIDTH, FOREIGN_LIMIT_CORES
from benchmarks.common.stage import Stage, measure, run_folder
from serve_app.engine import ensure_tiny_model

IDLE_LIMIT_CORES = 0.02  # an idle arm above this would slow the other by more than we want to tell apart


def settle_idle(stage: Stage, plan: Plan, choice: str) -> None:
    """Fix what the idle arm does. `auto`: it stays up only if every arm costs next to nothing when idle."""
    for label in [] if choice == "stop" else reversed(plan.arms):  # ours first: Ray is the likelier to stir
        stage.get(label)
        cost = sum(stage.idle_cores[label].values())
        if choice == "auto" and len(plan.arms) > 1 and cost > IDLE_LIMIT_CORES:
            stage.console.print(f"  idle costs over {IDLE_LIMIT_CORES:g} cores: from here on one arm is up at a time")
            stage.one_at_a_time = True
            return


def run_rounds(stage: Stage, plan: Plan, began: float) -> list[Window]:
    """All rounds, or as many whole ones as the budget holds."""
    windows: list[Window] = []
    for number in range(1, plan.rounds + 1):
        round_began = time.monotonic()
        for label, clients in order(plan, stage.up if stage.one_at_a_time else None):
            window = measure(stage.get(label), stage.model, plan, clients, number, seed_of(plan, number, clients))
            windows.append(window)
            stage.console.print("  " + report.progress_line(window))
        now = time.monotonic()
        if plan.budget_s is not None and number < plan.rounds and 2 * now - began - round_began > plan.budget_s:
            stage.console.print(f"  {number} of {plan.rounds} rounds done: one more would pass {plan.budget_s:g} s")
            break
    return windows


def run(stage: Stage, plan: Plan, idle: str) -> tuple[list[Window], dict[str, Any]]:
    """Measure; returns the windows and the conditions they were got under."""
    began = time.monotonic()
    facts = conditions.collect(stage.model, plan.as_json(), stage.vllm_arguments)
    stage.console.print_json(data=facts)
    settle_idle(stage, plan, idle)
    windows = run_rounds(stage, plan, began)
    return windows, facts | {
        "seconds": round(time.monotonic() - began),
        "idle_arm": "stopped" if stage.one_at_a_time else "up",
        "idle_cores": stage.idle_cores,
        "engines": stage.engines,
        "same_greedy_answer": len(set(stage.answers.values())) == 1,
        "foreign_cores_max": round(max(w.foreign_cores for w in windows), 3),
    }


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Tables, and a word of warning where the figures do not compare like with like."""
    report.print_tables(console, result)
    if result.get("batch_curve"):
        batch_curve.print_curve(console, result["batch_curve"])
    foreign = result["conditions"]["foreign_cores_max"]
    if foreign > FOREIGN_LIMIT_CORES:
        console.print(f"  other processes used up to {foreign:.2f} cores in a window: ratios are noise", style="yellow")
    if not result["conditions"]["same_greedy_answer"]:
        console.print(
            "  the arms gave different greedy answers: look whether they serve the same model", style="yellow"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments, str(__doc__))
    plan = plan_of(options)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    model = model_of(options, options.model or str(ensure_tiny_model()))
    with (
        run_folder(console) as folder,
        closing(Stage(model, folder, options.vllm_arg, console, one_at_a_time=options.idle == "stop")) as stage,
    ):
        windows, facts = run(stage, plan, options.idle)
    analysis = Analysis(windows, plan.arms, plan.clients, seed=plan.seed)
    result = report.build(analysis, facts)
    if options.batch_curve:
        result["batch_curve"] = batch_curve.build(analysis, model.max_num_seqs)
    show(console, result)
    if options.plot is not None:
        plot(result["batch_curve"], options.plot)
    write_json(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
