"""Can a tenant tell by time what another tenant has asked?: `python -m benchmarks.cache_timing [--quick]`.

Two tenants on real engines through the real HTTP endpoint: the attacker measures the first token of prompts that the
other tenant has sent just before, and of prompts that nobody has sent. Within one tenant the same test shows how
much time a cached prompt saves, so what there was to see. Once with one replica, once with two, where the place tells,
too, if routing by key goes by anything of another tenant. The receipt is tried as a second, finer clock.

Prints conditions, tables, and as its last line one JSON object.

Invariant: any request that fails ends the run with exit code 1 and no figure.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cache_timing.probes import Cell, Prober, collect
from benchmarks.cache_timing.report import print_tables, verdict
from benchmarks.common import conditions
from benchmarks.common.arms import OURS, ModelChoice, start
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stage import run_folder
from serve_app.engine import ensure_tiny_model

PROMPT_TOKENS = 1900  # nearly the model's length: a prefill of tens of milliseconds, an HTTP exchange has a few
ROUNDS = 300
QUICK_ROUNDS = 60
WARM_UP_ROUNDS = 5  # first batches of each size allocate and compile
PROGRESS_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `rounds`: probes of each cell."""

    rounds: int
    replicas: tuple[int, ...]
    seed: int
    prompt_tokens: int = PROMPT_TOKENS


def plan_of(arguments: Sequence[str]) -> Plan:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_timing", description=str(__doc__).split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} probes of each kind, not {ROUNDS}")
    parser.add_argument("--replicas", default="1,2", help="of the model, one run each (default 1,2)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and of the order")
    given = parser.parse_args(arguments)
    replicas = tuple(int(one) for one in str(given.replicas).split(",") if one.strip().isdigit())
    if not replicas or min(replicas) < 1:
        parser.error("--replicas: numbers from 1 on, with commas between them")
    return Plan(QUICK_ROUNDS if given.quick else ROUNDS, replicas, given.seed)


def measure(plan: Plan, model: ModelChoice, folder: Path, console: Console) -> dict[str, Any]:
    """One run. Raises BenchmarkError: the stack did not start, or a request failed."""
    owner_key = secrets.token_hex(16)
    attacker_key = secrets.token_hex(16)
    keys = [{"key": owner_key, "tenant": "owner"}, {"key": attacker_key, "tenant": "attacker"}]
    rng = np.random.default_rng([plan.seed, model.replicas])
    with ExitStack() as ending:
        arm = start(f"{OURS}#{model.replicas}", model, folder, keys=keys)
        ending.callback(arm.stop)
        console.print(f"  {model.replicas} replica(s): up after {arm.start_s:.0f} s on port {arm.port}")
        prober = Prober(arm.url, model.name, owner_key, attacker_key, plan.prompt_tokens, rng)
        ending.callback(prober.close)
        collect(prober, WARM_UP_ROUNDS, rng)

        def progress(done: int) -> None:
            if done % PROGRESS_ROUNDS == 0:
                console.print(f"  {done} of {plan.rounds} rounds")

        found = collect(prober, plan.rounds, rng, progress)
    result = verdict(found, rng)
    print_tables(console, f"{model.replicas} replica(s)", result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when they could not be."""
    plan = plan_of(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    model = ModelChoice(path=str(ensure_tiny_model()))
    facts = conditions.collect(model, asdict(plan), [])
    console.print_json(json.dumps(facts))
    results: dict[str, Any] = {}
    with run_folder(console) as folder:
        for replicas in plan.replicas:
            choice = ModelChoice(path=model.path, replicas=replicas)
            results[str(replicas)] = measure(plan, choice, folder, console)
    write_json({"cache_timing": results, "cells": [cell.value for cell in Cell], "conditions": facts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
