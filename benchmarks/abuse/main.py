"""Does a crowd that behaves badly leave anything behind: `python -m benchmarks.abuse [--quick] [--seed 1]`.

The whole stack (HAProxy, two routers, the quota actor, two simulated engines) under 400 clients for 150 s, four times
the slots there are: a fifth of the requests is left by its client, waiting or running, a tenth is bad in one of the
ways of `benchmarks.abuse.clients`, some open sessions and forget them. Clients who are refused stay: they come again
after their Retry-After.

What must hold: no status 500 and no answer that is cut off, nobody hangs (`HUNG_S`), and `REST_S` after the last answer
everything is back to what it was before: slots and KV tokens of requests and sessions by the actor's own books (GET
/admin/quota), waiting requests, processes, threads and file descriptors of every process by the kernel. At last as many
requests as there are slots run at once, so a slot that no book shows as taken but nobody can have is found, too.

`--stalls` asks another question (`benchmarks.abuse.stalls`): how long do others wait beside costly requests?

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.abuse import stalls
from benchmarks.abuse.clients import Counts, Crowd
from benchmarks.abuse.stall_bodies import arms
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.processes import role_of, title_of
from benchmarks.common.run import figures_or_exit
from benchmarks.common.scaling_stack import MODEL, Stage, stack
from benchmarks.overload.stage import metrics_of

CLIENTS = 400
SPAN_S = 150.0
QUICK_SPAN_S = 30.0
ENGINES = 2
SLOTS = 50
ROUTERS = 2
TENANTS = 8
# an answer takes about 3 s: 30 a second in all
STEP_S = 0.05
TOKENS = 64
POOL_TOKENS = 40_000  # of each engine
REST_S = 10.0
WARM = 40  # requests before the first look: connections, channels and caches are there then
BACK_S = 60.0  # more for descriptors: idle connections between HAProxy and routers end by a timeout
FULL_S = 10.0  # for as many requests as there are slots to run at once
SPARE_FDS = 4  # of a process: a connection of HAProxy or Ray that is kept for the next call
SPARE_THREADS = 40  # a pool of Python's executor or gRPC's, which grows to its bound and stays

CLASSES = ("low", "normal", "high", "critical")


def configuration() -> dict[str, Any]:
    """Defaults, but for the engines."""
    model = {
        "name": MODEL,
        "engine": "simulated",
        "max_num_seqs": SLOTS,
        "max_model_len": 2048,
        "simulated": {"decode_step_s": STEP_S, "kv_cache_tokens": POOL_TOKENS},
        "replicas": {"min_replicas": ENGINES, "max_replicas": ENGINES},
    }
    return {"models": [model], "router": {"replicas": ROUTERS}}


def key_of(number: int, key: str) -> dict[str, Any]:
    """Tenants ask in all classes."""
    level = CLASSES[number % len(CLASSES)]
    return {"key": key, "tenant": f"tenant-{number}", "max_class": level, "default_class": level}


class Books:
    """What is held, by whoever has it."""

    def __init__(self, stage: Stage) -> None:
        quota = stage.get("/admin/quota")
        if quota.status_code != 200:
            raise BenchmarkError(f"/admin/quota: {quota.status_code} {quota.text[:200]}")
        state = quota.json()
        engines = state["engines"]
        self.slots = sum(one["slots_used"] for one in engines)
        self.tokens = sum(one["kv_tokens_used"] for one in engines)
        self.leases = sum(bool(one["kv_tokens_sessions"]) for one in engines) + len(state["sessions"])
        self.waiting = sum(one["waiting"] for queue in state["queues"] for one in queue["classes"].values())
        figures = metrics_of(stage.get("/metrics").text)
        self.tasks = figures.get("running", 0.0) + figures.get("engine_waiting", 0.0)
        self.fds: dict[int, int] = {}
        self.threads: dict[int, int] = {}
        self.roles: dict[int, str] = {}
        for pid in stage.cluster.pids():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                process = psutil.Process(pid)
                fds = process.num_fds()
                threads = process.num_threads()
                self.roles[pid] = role_of(title_of(pid))
                self.fds[pid] = fds
                self.threads[pid] = threads

    def since(self, before: Books) -> dict[str, Any]:
        """What there is more of than before; of descriptors and threads in processes that are the same."""
        same = self.fds.keys() & before.fds.keys()
        roles = [self.roles[pid] for pid in same]
        fds: dict[str, int] = dict.fromkeys(roles, 0)
        for pid in same:
            fds[self.roles[pid]] += max(0, self.fds[pid] - before.fds[pid] - SPARE_FDS)
        threads = sum(max(0, self.threads[pid] - before.threads[pid] - SPARE_THREADS) for pid in same)
        return {
            "leaked_slots": self.slots - before.slots,
            "leaked_tokens": self.tokens - before.tokens,
            "leaked_leases": self.leases - before.leases,
            "leaked_tasks": round(self.tasks - before.tasks) + self.waiting - before.waiting + threads,
            "leaked_fds": sum(fds.values()),
            "fds_by_role": {role: count for role, count in fds.items() if count},
            "processes_gone": len(before.fds.keys() - self.fds.keys()),
        }


async def until_back(stage: Stage, before: Books) -> float | None:
    """Seconds after the load until the descriptors of all processes are back; None: not within `BACK_S`."""
    began = time.monotonic()
    while (spent_s := time.monotonic() - began) < BACK_S:
        if not (await asyncio.to_thread(Books, stage)).since(before)["leaked_fds"]:
            return round(REST_S + spent_s, 1)
        await asyncio.sleep(2.0)
    return None


async def full_at_once(stage: Stage, crowd: Crowd) -> int:
    """The most requests that ever run at once when as many are asked as there are slots."""
    asked = [asyncio.create_task(crowd.plain(2 * TOKENS)) for _ in range(ENGINES * SLOTS)]
    most = 0
    until = time.monotonic() + FULL_S
    while not all(task.done() for task in asked) and time.monotonic() < until:
        answer = await asyncio.to_thread(stage.get, "/metrics")
        most = max(most, int(metrics_of(answer.text).get("running", 0.0)))
        await asyncio.sleep(0.2)
    await asyncio.gather(*asked)
    return most


async def attack(stage: Stage, keys: list[str], options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The load, and what it leaves behind."""
    host = stage.cluster.instance.host
    port = stage.cluster.instance.http_port
    crowd = Crowd(host, port, MODEL, keys, options.seed, TOKENS)
    await asyncio.gather(*(crowd.plain(TOKENS) for _ in range(WARM)))
    await asyncio.sleep(REST_S)
    before = await asyncio.to_thread(Books, stage)
    crowd.counts = Counts()
    began = time.monotonic()
    await crowd.run(options.clients, options.span)
    console.print(f"  load and last answers: {time.monotonic() - began:.0f} s; {crowd.counts}", highlight=False)
    await asyncio.sleep(REST_S)
    left = (await asyncio.to_thread(Books, stage)).since(before)
    left["fds_back_s"] = await until_back(stage, before) if left["leaked_fds"] else REST_S
    console.print(f"  left: {left}", highlight=False)
    counts = crowd.counts
    crowd.counts = Counts()
    critical = Crowd(host, port, MODEL, [keys[CLASSES.index("critical")]], options.seed, TOKENS)
    most = await full_at_once(stage, critical)  # of the class for which no headroom is kept
    return {
        "status_500": counts.status.get(500, 0),
        "hung": counts.hung,
        "cut": counts.cut,
        **left,
        "slots_usable": most,
        "slots": ENGINES * SLOTS,
        "status": {str(status): count for status, count in sorted(counts.status.items())},
        "left_by_client": counts.left,
        "bad": counts.bad,
        "bad_accepted": counts.bad_accepted,
        "sessions_opened": counts.sessions,
        "samples": counts.samples,
    }


def show(console: Console, found: Mapping[str, Any]) -> None:
    """A table of what must be nothing."""
    table = Table("figure", "value", "bar", title="after the load")
    for name in ("status_500", "hung", "cut", *(name for name in found if name.startswith("leaked_"))):
        table.add_row(name, str(found[name]), "0: met" if found[name] <= 0 else "0: MISSED")
    table.add_row("slots_usable", str(found["slots_usable"]), f"{found['slots']}")
    console.print(table)


def main() -> int:
    """0 when the load was done, whatever it left; 1 when the stack did not come up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    spans = f"{QUICK_SPAN_S:g} s of load; with --stalls {stalls.QUICK_SPAN_S:g} s an arm"
    parser.add_argument("--quick", action="store_true", help=spans)
    parser.add_argument("--stalls", action="store_true", help="another tenant's waits beside costly requests, instead")
    parser.add_argument("--arms", nargs="*", choices=list(arms()), help="of --stalls: these alone")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.stalls:
        return stalls.run(quick=options.quick, names=options.arms)
    options.span = QUICK_SPAN_S if options.quick else SPAN_S
    console = Console(stderr=True, width=140)
    conditions = here(seed=options.seed, clients=options.clients, span_s=options.span)
    console.print(conditions)
    keys = [f"sk-{secrets.token_hex(16)}" for _ in range(TENANTS)]
    known_keys = [key_of(number, key) for number, key in enumerate(keys)]
    with figures_or_exit(console), stack(configuration(), known_keys) as stage:
        found = asyncio.run(attack(stage, keys, options, console))
    show(console, found)
    write_json({**found, "conditions": conditions})
    return 0
