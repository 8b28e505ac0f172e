"""Faults of every process under load: `python -m benchmarks.chaos [--quick] [--engine vllm|simulated] [--seed 1]`.

A stack of its own: two routers, two engines (`--engines`), vLLM's in float32 on the built-in model, or simulated ones.
20 clients of all classes ask a pool of greedy requests of chat, completions and responses, streamed and not, each
question first once undisturbed. Every 5 s one process is hit, an engine only while two are ready, and of these the one
that has run longest:

    engine, engine_core, freeze    an engine's replica is ended, its EngineCore alone; SIGSTOP of EngineCore
    drain                          `serve-app drain REPLICA`, where this release has the command
    router, haproxy                ended; requests have an Idempotency-Key then, and their clients repeat what was cut
    quota_actor, controller        ended

What is ended gets SIGKILL and, as by a supervisor or a system that shuts down, SIGTERM in turn.

The first half of the run is without faults of router and HAProxy and without keys. Counted:

    failed              error, broken off, refused for a minute, or cut with no edge process dead
    hung                no byte for 60 s with a replica ready
    mismatched          another answer than the undisturbed one, and no near tie (teacher forcing, logits within 1e-3)
    leaked_leases       slots, tokens and engines that the quota actor still counts after the last answer
    migration_gap_ms    the longest pause of a moved stream that its client saw; by kind of fault, p99

Prints conditions, faults, tables and as its last line one JSON object. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from rich.console import Console

from benchmarks.abuse.main import CLASSES, key_of
from benchmarks.chaos.clients import Counts, Crowd, Paused
from benchmarks.chaos.figures import RouterCounts, fault_of, longest_pauses, missed, p99, result, tables
from benchmarks.chaos.near_tie import Teacher
from benchmarks.chaos.plan import AT_EDGE, KILL_EVERY_S, Act, Fault, acts_of, due
from benchmarks.chaos.questions import Api, questions
from benchmarks.chaos.victims import Victims, possible_faults
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.priority import clients_first
from benchmarks.common.run import CONSOLE_WIDTH, figures_or_exit
from benchmarks.common.scaling_stack import MODEL, Stage, stack
from serve_app.engine import ensure_tiny_model
from serve_app.engine.start import environment

CLIENTS = 20
ROUTERS = 2
SLOTS = 32  # of an engine: the one that is left has room for all clients, but for what is kept free for `high`
LOOK_S = 0.25
SCRAPE_S = 1.0
BACK_S = 180.0  # until all is there: an engine starts beside others on two cores
SETTLED_S = 30.0  # after that, until the quota actor counts nothing
LEARN_AT_ONCE = 8
ASK_S = 5.0  # of one look at a stack of which something is dead


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The size of a run: it ends with whichever bound comes first."""

    span_s: float
    requests: float
    pool: int
    tokens: tuple[int, int]


# A vLLM engine is back after a minute on two cores, and each fault on one moves two streams: 20 minutes for 20 of them.
FULL = {
    "vllm": ChaosPlan(1200.0, float("inf"), 60, (300, 1200)),
    "simulated": ChaosPlan(540.0, 10_000, 100, (10, 200)),
}
QUICK = {
    "vllm": ChaosPlan(90.0, float("inf"), 24, (60, 300)),
    "simulated": ChaosPlan(36.0, float("inf"), 40, (40, 400)),
}
STEP_S = 0.005


def configuration(engine: str, engines: int) -> dict[str, Any]:
    """Defaults, but for the size of the engines."""
    model: dict[str, Any] = {
        "name": MODEL,
        "engine": engine,
        "max_model_len": 2048,
        "max_num_seqs": SLOTS,
        "replicas": {"min_replicas": engines, "max_replicas": engines},
    }
    if engine == "vllm":
        model |= {"path": "tiny", "dtype": "float32", "kv_cache_gb": 0.2}
        if environment.platform() == "gpu":
            model["gpus_per_rank"] = 1 / engines  # all of them on one GPU
    else:
        model |= {"cpus_per_rank": 0.5, "simulated": {"decode_step_s": STEP_S}}
    return {"models": [model], "router": {"replicas": ROUTERS}}


@dataclass(slots=True)
class Chaos:
    """One run."""

    stage: Stage
    victims: Victims
    crowd: Crowd
    plan: ChaosPlan
    seed: int
    console: Console
    routers: RouterCounts = field(default_factory=RouterCounts)
    moved: list[Paused] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)  # of the clients' own event loop
    at_edge: int = 0  # requests in flight at the deaths of edge processes
    shown: int = 0  # of the clients' samples
    began: float = field(default_factory=time.monotonic)

    async def run(self, acts: list[Act], engine: str) -> int:
        """The whole run; returns the leases that are left."""
        apis = (Api.CHAT, Api.COMPLETION, *((Api.RESPONSES,) if engine == "vllm" else ()))
        pool = questions(self.plan.pool, apis, self.plan.tokens, MODEL, self.seed)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one()) for one in (self._look, self._scrape, self._ask_receipts)]
            await self._until(self.victims.is_whole, BACK_S, "all engines and routers are there")
            await self.crowd.learn(pool, LEARN_AT_ONCE)
            self._say(f"{len(pool)} undisturbed answers")
            numbers = itertools.count()
            most = 0.0
            for act in acts:
                most += self.plan.requests * act.share
                until = time.monotonic() + self.plan.span_s * act.share
                clients = [self.crowd.client(pool, numbers, most, until, keyed=act.keyed) for _ in range(CLIENTS)]
                hitting = group.create_task(self._hit(act))
                await asyncio.gather(*clients)
                hitting.cancel()
                self._say(f"act over: {self.crowd.counts.requests} requests")
            await self._until(self.victims.is_whole, BACK_S, "all is back")
            await self.crowd.paused.join()
            left = await self._leaked()
            await asyncio.sleep(2 * SCRAPE_S)  # the last look at the counts
            for task in tasks:
                task.cancel()
        return left

    async def _hit(self, act: Act) -> None:
        draw = random.Random(f"{self.seed} {act.keyed} faults")
        done = Counter[Fault]()
        while True:
            await asyncio.sleep(KILL_EVERY_S)  # bound: the act
            before = sum(attempt.sent for attempt in self.crowd.in_flight)
            hit = await asyncio.to_thread(self.victims.hit, due(act, done, draw))
            if hit is None:
                self._say("nothing can be hit now")
                continue
            done[hit.fault] += 1
            if hit.fault in AT_EDGE:
                self.crowd.edge_died_at = hit.at
                self.at_edge += max(before, sum(attempt.sent for attempt in self.crowd.in_flight))
            by = "command" if hit.number is None else hit.number.name
            self._say(f"{hit.fault} (process {hit.pid}, {by}), {len(self.crowd.in_flight)} in flight")

    async def _look(self) -> None:
        while True:
            await asyncio.to_thread(self.victims.look)
            self.crowd.watch(self.victims.unready_at)
            for sample in self.crowd.counts.samples[self.shown :]:
                self._say(sample)
                self.shown += 1
            asked = time.monotonic()
            await asyncio.sleep(LOOK_S)  # bound: the run
            self.late_ms.append((time.monotonic() - asked - LOOK_S) * 1000.0)

    async def _scrape(self) -> None:
        while True:
            answer = await asyncio.to_thread(self._get, "/metrics")
            if answer is not None:
                self.routers.look(answer.text)
            await asyncio.sleep(SCRAPE_S)  # bound: the run

    async def _ask_receipts(self) -> None:
        """Which of the streams that paused after a fault on an engine have moved."""
        while True:
            stream = await self.crowd.paused.get()
            is_hit = any(fault_of(gap, self.victims.hits) is not None for gap in stream.gaps)
            answer = await asyncio.to_thread(self._get, f"/admin/requests/{stream.request_id}") if is_hit else None
            if answer is not None and answer.json()["continued"]:
                self.moved.append(stream)
            self.crowd.paused.task_done()

    async def _leaked(self) -> int:
        """What the quota actor still counts once all clients are gone."""
        deadline = time.monotonic() + SETTLED_S
        while True:
            left = await asyncio.to_thread(self._leases)
            if not any(left.values()) or time.monotonic() > deadline:
                break
            await asyncio.sleep(LOOK_S)  # bound: SETTLED_S
        self._say(f"left: {left}")
        return sum(left.values())

    def _leases(self) -> dict[str, int]:
        answer = self._get("/admin/quota")
        if answer is None or answer.json()["recovering"]:
            return {"no answer": 1}
        figures = answer.json()
        return {
            "slots": sum(one["slots_used"] for one in figures["engines"]),
            "engines with tokens in use": sum(bool(one["kv_tokens_used"]) for one in figures["engines"]),
            "sessions": len(figures["sessions"]),
            "waiting": sum(one["waiting"] for queue in figures["queues"] for one in queue["classes"].values()),
            "engines gone": abs(len(figures["engines"]) - len(self.victims.ready_engines())),
        }

    def _get(self, path: str) -> requests.Response | None:
        """An answer with status 200, if there is one now."""
        headers = {"Authorization": f"Bearer {self.stage.key}", "Connection": "close"}
        with contextlib.suppress(requests.RequestException):
            answer = requests.get(f"{self.stage.cluster.url}{path}", headers=headers, timeout=ASK_S)
            return answer if answer.status_code == 200 else None
        return None

    async def _until(self, holds: Callable[[], bool], bound_s: float, expected: str) -> None:
        deadline = time.monotonic() + bound_s
        while not await asyncio.to_thread(holds):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{expected}: not within {bound_s:g} s")
            await asyncio.sleep(LOOK_S)  # bound: bound_s

    def _say(self, text: str) -> None:
        self.console.print(f"  {time.monotonic() - self.began:6.1f} s  {text}", highlight=False, markup=False)


def measure(options: argparse.Namespace, faults: list[Fault], plan: ChaosPlan, console: Console) -> dict[str, Any]:
    """The run on a stack of its own; the result.

    Raises:
        BenchmarkError: the stack does not come up, or something does not come back.
    """
    keys = [f"sk-{secrets.token_hex(16)}" for _ in CLASSES]
    known_keys = [key_of(number, key) for number, key in enumerate(keys)]
    draw = random.Random(f"{options.seed} victims")
    has_core = options.engine == "vllm"
    with (
        stack(configuration(options.engine, options.engines), known_keys, logs=options.logs) as stage,
        Victims(stage, draw, options.engines, has_core=has_core) as victims,
        clients_first() as is_first,
    ):
        console.print(f"clients run before the servers: {is_first}", highlight=False)
        crowd = Crowd(stage.cluster.url, keys, options.seed)
        chaos = Chaos(stage, victims, crowd, plan, options.seed, console)
        leaked = asyncio.run(_run(chaos, acts_of(faults), options.engine))
    pauses = longest_pauses(chaos.moved, victims.hits)
    teacher = Teacher(ensure_tiny_model()) if has_core else None
    found = result(crowd.counts, victims.hits, chaos.routers, pauses, leaked, teacher)
    for table in tables(found, chaos.at_edge, victims, pauses):
        console.print(table)
    console.print(
        f"the clients themselves were late by p99, most: {p99(chaos.late_ms):.0f}, {max(chaos.late_ms):.0f} ms"
    )
    for line in [*victims.notes, *_more(crowd.counts)]:
        console.print(line, highlight=False, markup=False)
    late = missed(found, chaos.at_edge)
    console.print(f"bars missed: {', '.join(late) or 'none'}", highlight=False)
    return found


async def _run(chaos: Chaos, acts: list[Act], engine: str) -> int:
    try:
        return await chaos.run(acts, engine)
    except* BenchmarkError as errors:
        raise errors.exceptions[0] from None
    finally:
        await chaos.crowd.close()


def _more(counts: Counts) -> Iterator[str]:
    yield f"refused before they began, and repeated: {dict(counts.refused)}"
    yield f"attempts that found no endpoint, and were repeated: {counts.repeats_of_unsent}"
    yield f"failed by what: {dict(counts.failed)}"
    yield from counts.samples


def main(arguments: list[str] | None = None) -> int:
    """0 when the zeros are zeros; 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="about two minutes, of which the start is one")
    parser.add_argument("--engine", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--minutes", type=float, help="of load")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", type=Fault, choices=list(Fault), help="these kinds alone")
    parser.add_argument("--logs", type=Path, help="the folder in which the logs of the stack are kept")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=CONSOLE_WIDTH)
    plan = (QUICK if options.quick else FULL)[options.engine]
    span_s = plan.span_s if options.minutes is None else 60.0 * options.minutes
    plan = ChaosPlan(span_s, plan.requests if options.requests is None else options.requests, plan.pool, plan.tokens)
    faults = possible_faults(options.engine)
    console.print(f"not on this stack: {', '.join(one for one in Fault if one not in faults) or 'nothing'}")
    faults = [one for one in faults if not options.only or one in options.only]
    console.print(here(seed=options.seed, engine=options.engine, engines=options.engines, span_s=span_s))
    with figures_or_exit(console):
        found = measure(options, faults, plan, console)
    write_json(found)
    return 1 if any(found[name] for name in ("failed", "hung", "mismatched", "duplicated_tokens")) else 0
