"""What a decision of the waiting line costs: `python -m benchmarks.admission [--quick]`.

The pure line with 1,000 replicas, all full, 100,000 requests waiting and 1,000 tenants, in a steady state: requests
end and the next ones are granted, new ones come (into a full line: some are refused or shed others), streams report
their tokens, callers leave. A decision is one of those events with all its actions, timed by itself. Four cases: slots
alone; slots and KV tokens, with costs from hundreds to thousands of tokens; the same with guaranteed shares; and with
preemption, where `low` holds every slot at first and stops for the others. What has stopped comes again: one event.
Bar of the last: 5,000 decisions a CPU second. The quota actor's largest events have theirs in `benchmarks.exchange`.

A collection of garbage looks at all that waits and runs, so the longest one is told beside the longest decision, which
it makes. What a million requests leave behind in memory is measured by `benchmarks.residue`. That a decision costs no
more in a larger fleet, and that the quota actor does its largest events a part at a time, is tested by counted steps
(`tests/core/queue/test_preemption_look.py`, `test_preemption_choice.py`, `tests/core/shared_queue/test_cost.py`).

Prints conditions, a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.own_pools import set_replica
from benchmarks.common.stats import quantile_us
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy, TenantPolicy
from serve_app.types import RequestClass

REPLICAS = 1_000
WAITING = 100_000
TENANTS = 1_000
SLOTS = 64  # of each replica
KV_TOKENS = 40_000  # of each replica where they are bounded: tokens then run out before slots
GUARANTEED = 100  # tenants with a share of a two-hundredth each, where there are shares
EVENTS = 400_000
QUICK_EVENTS = 60_000
CLASS_WEIGHTS = (50, 40, 9, 1)  # low, normal, high, critical
EVENT_WEIGHTS = {"done": 40, "arrive": 40, "progress": 15, "cancel": 5}
WAIT_S = 1e6  # nobody times out here
STOP = "stop"  # the event of what has stopped: its place is free, and it comes again


@dataclass(frozen=True)
class Case:
    name: str
    kv_tokens: int | None = None
    shares: bool = False
    preempts: bool = False


WITH_PREEMPTION = Case("with preemption", KV_TOKENS, preempts=True)
CASES = (
    Case("slots"),
    Case("slots and KV tokens", KV_TOKENS),
    Case("with shares", KV_TOKENS, shares=True),
    WITH_PREEMPTION,
)


class Load:
    """A line in its steady state, and the events that keep it there."""

    def __init__(self, case: Case, draw: random.Random) -> None:
        self._draw = draw
        self._case = case
        self._now = 0.0
        self._made = 0
        self._running: list[str] = []
        self._places: dict[str, int] = {}  # in that list
        self._arrivals: dict[str, Arrival] = {}  # of those that may stop
        self._stopping: deque[str] = deque()
        self._waiting: list[str] = []  # some of them have left meanwhile
        tenants = {}
        if case.shares:
            tenants = {f"tenant-{number}": TenantPolicy(2.0, 0.005) for number in range(GUARANTEED)}
        self.queue = Admission(QueuePolicy(WAITING, WAIT_S, WAIT_S, tenants=tenants))
        for number in range(REPLICAS):
            set_replica(self.queue, f"replica-{number}", SLOTS, 0.0, case.kv_tokens)
        while self.queue.waiting < WAITING:
            arrival = self._arrival()
            if case.preempts:
                arrival = self._arrivals[arrival.request_id] = replace(arrival, request_class=RequestClass.LOW)
            self.took(self.queue.on_arrive(arrival, self._now))

    def event(self) -> tuple[str, Callable[[], list[Action]]]:
        """The next event, ready to be sent."""
        self._now += 1e-4
        if self._stopping:
            return STOP, partial(self._stopped, self._stopping.popleft())
        kind = self._draw.choices(list(EVENT_WEIGHTS), list(EVENT_WEIGHTS.values()))[0]
        if kind == "arrive" or not self._running or not self._waiting:
            return "arrive", partial(self.queue.on_arrive, self._arrival(), self._now)
        if kind == "cancel":
            return kind, partial(self.queue.on_cancel, self._gives_up(), self._now)
        if kind == "progress":
            return kind, partial(self.queue.on_progress, self._draw.choice(self._running), 16, self._now)
        name = self._draw.choice(self._running)
        self._leaves(name)
        return kind, partial(self.queue.on_done, name, self._now, 200, self._draw.randrange(600))

    def took(self, actions: list[Action]) -> None:
        """What was granted runs, and what is to stop does."""
        for action in actions:
            if isinstance(action, Grant):
                self._places[action.request_id] = len(self._running)
                self._running.append(action.request_id)
            elif isinstance(action, Preempt):
                self._stopping.append(action.request_id)

    def _stopped(self, name: str) -> list[Action]:
        self._leaves(name)
        arrival = self._arrivals[name]
        actions = self.queue.on_done(name, self._now, arrival.prompt_tokens, 0)
        again = self._arrivals[name] = replace(arrival, preempted=arrival.preempted + 1, accepted=True, age_s=1.0)
        return actions + self.queue.on_arrive(again, self._now)

    def _leaves(self, name: str) -> None:
        """It runs no more."""
        at = self._places.pop(name, None)
        if at is None:
            return
        last = self._running.pop()
        if last != name:
            self._running[at] = last
            self._places[last] = at

    def _gives_up(self) -> str:
        at = self._draw.randrange(len(self._waiting))
        self._waiting[at], self._waiting[-1] = self._waiting[-1], self._waiting[at]
        name = self._waiting.pop()
        self._leaves(name)
        return name

    def _arrival(self) -> Arrival:
        draw = self._draw
        self._made += 1
        request_id = f"request-{self._made}"
        if self._made % 10 == 0:
            self._waiting.append(request_id)
        prompt = int(draw.lognormvariate(5.5, 1.2)) + 1
        tenant = int(TENANTS * draw.random() ** 2)  # the first tenants ask most
        arrival = Arrival(
            request_id,
            draw.choices(list(RequestClass), CLASS_WEIGHTS)[0],
            f"tenant-{tenant}",
            8 if draw.random() < 0.02 else 1,
            min(KV_TOKENS, prompt + 256),
            self._now + WAIT_S if draw.random() < 0.2 else None,
            prompt_tokens=min(prompt, KV_TOKENS - 256),
            preemptible=self._case.preempts,
        )
        if self._case.preempts:
            self._arrivals[request_id] = arrival
        return arrival


@contextmanager
def collections(spans_s: list[float]) -> Iterator[None]:
    """Note how long each collection of garbage within the block takes."""
    began = 0.0

    def look(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            spans_s.append(time.perf_counter() - began)

    gc.callbacks.append(look)
    try:
        yield
    finally:
        gc.callbacks.remove(look)


def measure(case: Case, events: int, seed: int) -> dict[str, Any]:
    """Times of decisions in microseconds, by event, and decisions per second of all together.

    Wall clock, as a caller feels it; beside it the thread's own CPU time, which what else runs here does not lengthen.
    A collection of garbage is told apart: which decision it falls in is chance, and one is an eighth of a quick run.
    """
    load = Load(case, random.Random(seed))
    times: dict[str, list[int]] = {kind: [] for kind in (*EVENT_WEIGHTS, STOP)}
    cpu: list[int] = []
    collected_s: list[float] = []
    clock = time.perf_counter_ns
    cpu_clock = time.thread_time_ns
    with collections(collected_s):
        for _ in range(events):
            kind, send = load.event()
            before = len(collected_s)
            cpu_began = cpu_clock()
            began = clock()
            actions = send()
            span = clock() - began
            cpu_span = cpu_clock() - cpu_began
            paused = round(sum(collected_s[before:]) * 1e9)
            times[kind].append(span - paused)
            cpu.append(cpu_span - paused)
            load.took(actions)
    every = [span for spans in times.values() for span in spans]
    return {
        "decisions_per_s": round(len(every) / (sum(every) / 1e9)),
        "decisions_per_cpu_s": round(len(cpu) / (sum(cpu) / 1e9)),
        "cpu_p99_us": quantile_us(cpu, 0.99),
        "p50_us": quantile_us(every, 0.5),
        "p99_us": quantile_us(every, 0.99),
        "max_us": quantile_us(every, 1.0),
        "longest_collection_us": round(max(collected_s, default=0.0) * 1e6, 1),
        "waiting": load.queue.waiting,
        "running": len(load.queue.scheduler.running),
        "stops": len(times[STOP]),
        "by_event": {kind: quantile_us(spans, 0.99) if spans else 0.0 for kind, spans in times.items()},
    }


def show(console: Console, cases: dict[str, dict[str, Any]]) -> None:
    """A table of what was measured."""
    title = f"{REPLICAS} replicas, {WAITING} waiting, {TENANTS} tenants; p99 by event, all in us"
    spans = ("a second", "a CPU second", "p50", "p99", "CPU p99", "max", "collection")
    table = Table("case", *spans, *EVENT_WEIGHTS, STOP, title=title)
    for name, found in cases.items():
        keys = (
            "decisions_per_s",
            "decisions_per_cpu_s",
            "p50_us",
            "p99_us",
            "cpu_p99_us",
            "max_us",
            "longest_collection_us",
        )
        figures = tuple(found[key] for key in keys)
        table.add_row(name, *map(str, (*figures, *found["by_event"].values())))
    console.print(table)


def decisions(console: Console, events: int, seed: int) -> dict[str, Any]:
    """All cases, and the worst of their figures; preemption has its own."""
    gc.freeze()  # what is there now, imports above all, is no part of the line
    cases: dict[str, dict[str, Any]] = {}
    for case in CASES:
        cases[case.name] = measure(case, events, seed)
        gc.collect()
    show(console, cases)
    with_preemption = cases[WITH_PREEMPTION.name]
    others = [found for found in cases.values() if found is not with_preemption]
    return {
        "decision_p99_ms": round(max(found["p99_us"] for found in others) / 1000, 3),
        "decisions_per_s": min(found["decisions_per_s"] for found in others),
        "decision_cpu_p99_ms": round(max(found["cpu_p99_us"] for found in others) / 1000, 3),
        "decisions_per_cpu_s": min(found["decisions_per_cpu_s"] for found in others),
        "preemption_decisions_per_cpu_s": with_preemption["decisions_per_cpu_s"],
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer events")
    parser.add_argument("--seed", type=int, default=1, help="of the decisions' load")
    options = parser.parse_args()
    console = Console(stderr=True)
    conditions = here(seed=options.seed, replicas=REPLICAS, waiting=WAITING, tenants=TENANTS)
    console.print(conditions)
    result = decisions(console, QUICK_EVENTS if options.quick else EVENTS, options.seed)
    write_json({**result, "conditions": conditions})


if __name__ == "__main__":
    main()
