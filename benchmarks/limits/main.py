"""Are limits exact over three routers, and what do they cost: `python -m benchmarks.limits [--quick] [--seed 1]`.

On a real instance with three routers and the simulated engine (`benchmarks.limits.load`), by the official SDK with its
default retries:

    at once          50 requests at the same moment against 100 requests a minute, 200,000 tokens a minute and 8 at
                     once; again with the same bytes in each; and against the example of docs/how-to/set-limits.md
    for minutes      50 clients in a closed loop where requests bind, where tokens bind, and where slots bind; clients
                     that are refused and never come back; one that asks every 100 ms and never waits
    far from it      4% of the limits, beside the same without limits, in turn: calls to the quota actor

In virtual time, on the pure cores (`benchmarks.limits.virtual`): ten minutes of 1,000 tenants at three routers.

    over_limit_share            by how much the worst window of all has more than burst + rate x t, or the most at once
                                more than its limit [0.01]
    under_use_share             the worst part of what limits allow that was not used while somebody asked [0.02]. Of
                                limits a minute that is as much however long a run is (what is reserved for clients that
                                may still come, for 1.5 s): a shorter run counts it as a part of three minutes
    failed_after_retries        requests of the SDK that its own retries did not bring to an answer [0]
    us_per_decision             CPU of router and actor for a request that the actor decides, and its end [50]
    actor_messages_per_request  calls to the actor that limits add while none is near [0.1]

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.run import figures_or_exit
from benchmarks.common.scaling_stack import MODEL, Stage, stack
from benchmarks.limits import load as loads
from benchmarks.limits.counters import calls_per_request
from benchmarks.limits.decisions import decision_us
from benchmarks.limits.load import LOADS, STRESSES, Load
from benchmarks.limits.virtual import run as run_virtual

ROUTERS = 3
MINUTES = 3.0
QUICK_MINUTES = 1.0
FAR_S = 15.0
QUICK_FAR_S = 6.0
FAR_ROUNDS = 2
TENANTS = 1_000
QUICK_TENANTS = 200
SEEDS = 2  # of virtual time, each on a core of its own
FAR = {"requests_per_minute": 60_000, "tokens_per_minute": 60_000_000, "max_concurrent": 1_000}  # never reached
BARS = {
    "over_limit_share": 0.01,
    "under_use_share": 0.02,
    "failed_after_retries": 0,
    "us_per_decision": 50,
    "actor_messages_per_request": 0.1,
}
SHOWN_BESIDE = "slots, refused"  # shown beside the others: a free slot waits for no client that is away


def configuration() -> dict[str, Any]:
    """Defaults, but for the engine and what tenants do over a limit."""
    model = {
        "name": MODEL,
        "engine": "simulated",
        "max_num_seqs": 128,
        "max_model_len": 8192,
        "simulated": {"decode_step_s": 0.01, "kv_cache_tokens": 1_000_000},
    }
    tenants = {load.tenant: loads.tenant_of(load) for load in (*STRESSES, *LOADS)}
    return {"models": [model], "router": {"replicas": ROUTERS}, "admission": {"tenants": tenants}}


async def measure(stage: Stage, options: argparse.Namespace, far_keys: dict[str, str], console: Console) -> Any:
    """All loads of the real instance."""
    found: dict[str, Any] = {}
    for load in STRESSES:
        crowd = await loads.at_once(stage, load, options.seed)
        found[load.name] = await _figures(stage, load, crowd, None)
        console.print(f"{load.name}: {found[load.name]}", highlight=False)
    calls = await calls_per_request(stage, far_keys, options.seed, options.far_s, FAR_ROUNDS)
    console.print(f"calls to the actor a request: {calls}", highlight=False)
    chosen = [load for load in LOADS if not options.only or load.name in options.only]
    span_s = 60.0 * options.minutes
    crowds = await asyncio.gather(*(loads.run(stage, load, options.seed, span_s) for load in chosen))
    for load, crowd in zip(chosen, crowds, strict=True):
        found[load.name] = await _figures(stage, load, crowd, span_s)
        console.print(f"{load.name}: {found[load.name]}", highlight=False)
    return {"loads": found, "calls": calls}


async def _figures(stage: Stage, load: Load, crowd: Any, span_s: float | None) -> dict[str, Any]:
    return loads.figures(load, crowd, await loads.charges_of(stage, crowd.asks), span_s)


def result_of(
    real: Mapping[str, Any], virtual: Mapping[int, Any], us: Mapping[str, float], minutes: float = MINUTES
) -> dict[str, float]:
    """The figures of the issue: the worst of all loads and of virtual time. `minutes`: of the loads."""
    loads_ = real["loads"]
    calls = {name: sum(values) / len(values) for name, values in real["calls"].items()}
    over = [share for one in loads_.values() for share in one["over"].values()]
    of_minutes = {load.name: min(1.0, minutes / MINUTES) for load in LOADS if load.buckets}
    unused = [
        one["unused"] * of_minutes.get(name, 1.0)
        for name, one in loads_.items()
        if one["unused"] is not None and name != SHOWN_BESIDE
    ]
    return {
        "over_limit_share": round(max(0.0, *over, *(one["over"] for one in virtual.values())), 4),
        "under_use_share": round(max(0.0, *unused, *(one["unused"] for one in virtual.values())), 4),
        "failed_after_retries": sum(one["failed"] for one in (*loads_.values(), *virtual.values())),
        "us_per_decision": round(us["near"], 1),
        "actor_messages_per_request": round(max(0.0, calls["limits"] - calls["none"]), 4),
    }


def show(console: Console, real: Mapping[str, Any], virtual: Mapping[int, Any], result: Mapping[str, float]) -> None:
    columns = (
        "load",
        "asked",
        "admitted",
        "refusals",
        "over",
        "with debts",
        "most at once",
        "unused",
        "failed",
        "broken promises",
    )
    table = Table(*columns, title="real instance, three routers")
    for name, load in real["loads"].items():
        unused = "-" if load["unused"] is None else f"{load['unused']:.2%}"
        cells = (load["asked"], load["admitted"], sum(load["refusals"].values()), f"{max(load['over'].values()):.2%}")
        rest = (f"{load['over_with_debts']:.2%}", load["most_at_once"], unused, load["failed"], load["broken_promises"])
        table.add_row(name, *map(str, (*cells, *rest)))
    for seed, run in virtual.items():
        debts = f"{run['over_with_debts']:.2%}"
        rest = (debts, run["most_at_once_over"], f"{run['unused']:.2%}", run["failed"], run["broken_promises"])
        cells = (run["asked"], run["charged"], run["refused"], f"{run['over']:.2%}")
        table.add_row(f"virtual, seed {seed}", *map(str, (*cells, *rest)))
    console.print(table)
    figures = Table("figure", "value", "bar", title="limits")
    for name, bar in BARS.items():
        met = "met" if result[name] <= bar else "MISSED"
        figures.add_row(name, f"{result[name]:g}", f"at most {bar:g}: {met}")
    console.print(figures)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute instead of three, 200 tenants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of virtual time, from --seed on")
    parser.add_argument("--tenants", type=int, help="of virtual time")
    parser.add_argument("--minutes", type=float, help="of the loads that go on for minutes")
    parser.add_argument("--only", action="append", help="one of these loads; several times: several")
    options = parser.parse_args(arguments)
    options.minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    options.far_s = QUICK_FAR_S if options.quick else FAR_S
    options.tenants = options.tenants or (QUICK_TENANTS if options.quick else TENANTS)
    return options


def main(arguments: list[str] | None = None) -> int:
    """0 when figures were got, whatever they are; 1 when the stack did not come up."""
    options = options_of(arguments)
    console = Console(stderr=True, width=150)
    conditions = here(seed=options.seed, minutes=options.minutes, tenants=options.tenants, routers=ROUTERS)
    console.print(conditions)
    us = decision_us()
    console.print(f"CPU us a decision: {us}", highlight=False)
    seeds = range(options.seed, options.seed + options.seeds)
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as processes:
        virtual = dict(zip(seeds, processes.map(run_virtual, seeds, itertools.repeat(options.tenants)), strict=True))
    for seed, figures in virtual.items():
        console.print(f"virtual time, seed {seed}: {figures}", highlight=False)
    far = {name: f"sk-{secrets.token_hex(16)}" for name in ("none", "limits")}
    keys = [loads.key_of(load) for load in (*STRESSES, *LOADS)]
    keys += [{"key": far["none"], "tenant": "none"}, {"key": far["limits"], "tenant": "limits", "limits": FAR}]
    with figures_or_exit(console), stack(configuration(), keys) as stage:
        real = asyncio.run(measure(stage, options, far, console))
    result = result_of(real, virtual, us, options.minutes)
    show(console, real, virtual, result)
    write_json({**result, "bars": BARS, "real": real, "virtual": virtual, "us": us, "conditions": conditions})
    return 0
