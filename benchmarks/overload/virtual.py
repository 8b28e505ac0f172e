"""Overload in virtual time: `python -m benchmarks.overload.virtual [--seeds 3] [--slots 8] [--span-s 400]`.

The requests of `benchmarks.overload`, the real `Admission`, and one engine that is a formula: a step takes 2.6 ms and
0.55 ms a sequence and 45 us a prompt token, prompts are read in chunks of 2,048 tokens (the built-in model, three times
as deep, on one core). What else the machine does has no part in it. A request that is stopped leaves at the end of the
step in which that is decided and reads its prompt and what it has produced again when it goes on, as if no prefix were
cached. Arms, with the same requests at the same moments:

    guard slots   up to half of the slots are kept free while `high` comes, and nothing is stopped
    preemption    no slot is kept free; whoever is below stops for `high` and `normal`
    both          a quarter of the slots at most, and preemption: the defaults
    high alone    nobody else comes: what no order of service can better

Per arm and seed, at half and at four times the capacity: p99 of the first token of `high`, its ratio, the goodput of
requests within their levels over the best arm's, output tokens/s, the part of computed tokens that were computed again.
Prints the table and as its last line one JSON object; its bar is `high_ttft_p99_ratio_4x` at most 1.3 in each seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.output import write_json
from benchmarks.common.own_pools import set_replica
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.traces import DATA, TraceMissingError
from benchmarks.overload.answers import quantile
from benchmarks.overload.offered_load import GROUPS, HIGH, Lengths, Offer, lengths, offers
from benchmarks.overload.plan import BASE, MAX_MODEL_LEN, MAX_NUM_SEQS, PEAK, Levels
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy
from serve_app.types import RequestClass

STEP_S = 2.6e-3
SEQUENCE_S = 0.55e-3
PROMPT_TOKEN_S = 45e-6
CHUNK_TOKENS = 2048
ALONE = "high alone"
# The share of guard slots, and whether requests stop.
ARMS = {"guard slots": (0.5, False), "preemption": (0.0, True), "both": (0.25, True), ALONE: (0.0, False)}
BAR = 1.3
MAX_QUEUED = 1000
UNBOUNDED_S = 1e9
CLOSED_S = 120.0
CLOSED_FACTOR = 2


@dataclass(slots=True)
class Run:
    """A request in the engine, or one that was stopped there. Tokens."""

    offer: Offer
    produced: int = 0
    to_read: int = 0
    first_s: float | None = None
    ended_s: float | None = None
    stopped: int = 0
    keeps_place: bool = True
    is_stopping: bool = False


@dataclass(slots=True)
class Engine:
    """One replica in virtual time, and the line before it.

    Args:
        levels: of deadlines and patience; None: nobody is in a hurry.
    """

    slots: int
    policy: QueuePolicy
    levels: Levels | None
    stops: bool
    now: float = 0.0
    queue: Admission = field(init=False)
    waiting: dict[str, Run] = field(default_factory=dict)
    running: dict[str, Run] = field(default_factory=dict)
    ended: list[Run] = field(default_factory=list)
    computed: int = 0
    again: int = 0

    def __post_init__(self) -> None:
        self.queue = Admission(self.policy)
        set_replica(self.queue, "engine", self.slots, 0.0)

    def arrive(self, offer: Offer) -> None:
        run = self.waiting[str(offer.number)] = Run(offer)
        self._enter(run, age_s=0.0)

    def _enter(self, run: Run, age_s: float) -> None:
        offer = run.offer
        deadline = None
        if self.levels is not None and not run.stopped:
            deadline_ms = self.levels.deadline_ms(offer.group)
            deadline = None if deadline_ms is None else offer.at_s + deadline_ms / 1e3
        arrival = Arrival(
            str(offer.number),
            RequestClass[offer.group.upper()],
            f"tenant-{offer.tenant}",
            cost_tokens=offer.prompt_tokens + offer.output_tokens,
            prompt_tokens=offer.prompt_tokens,
            deadline=deadline,
            accepted=bool(run.stopped),
            age_s=age_s,
            preemptible=self.stops,
            preempted=run.stopped,
            produced_tokens=run.produced,
        )
        self.take(self.queue.on_arrive(arrival, self.now))

    def leave(self, offer: Offer) -> None:
        """Its client has had no first token for too long."""
        name = str(offer.number)
        run = self.waiting.get(name) or self.running.get(name)
        if run is not None and run.first_s is None:
            self.waiting.pop(name, None)
            self.running.pop(name, None)
            self.ended.append(run)
            self.take(self.queue.on_cancel(name, self.now))

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Preempt):
                run = self.running[action.request_id]
                run.is_stopping = True
                run.keeps_place = action.keeps_place
                continue
            run = self.waiting.pop(action.request_id)
            if isinstance(action, Grant):
                run.to_read = run.offer.prompt_tokens + run.produced
                self.again += run.to_read if run.stopped else 0
                self.running[action.request_id] = run
            else:
                self.ended.append(run)

    def step(self) -> None:
        """One step of what runs at its beginning."""
        batch = dict(self.running)
        room = CHUNK_TOKENS
        read = 0
        deciding: list[tuple[str, Run]] = []
        for name, run in batch.items():
            if run.to_read:
                chunk = min(run.to_read, room)
                run.to_read -= chunk
                room -= chunk
                read += chunk
            if not run.to_read:
                deciding.append((name, run))
        self.now += STEP_S + SEQUENCE_S * len(batch) + PROMPT_TOKEN_S * read
        self.computed += read + len(deciding)
        for name, run in deciding:
            run.produced += 1
            run.first_s = self.now if run.first_s is None else run.first_s
            self.take(self.queue.on_progress(name, 1, self.now))
        for name, run in batch.items():
            if run.produced >= run.offer.output_tokens:
                del self.running[name]
                run.ended_s = self.now
                self.ended.append(run)
                self.take(self.queue.on_done(name, self.now, run.offer.prompt_tokens, run.produced))
        for name, run in list(self.running.items()):
            if run.is_stopping:
                self._stop(name, run)

    def _stop(self, name: str, run: Run) -> None:
        del self.running[name]
        run.stopped += 1
        run.is_stopping = False
        self.take(self.queue.on_done(name, self.now, run.offer.prompt_tokens, run.produced))
        self.waiting[name] = run
        self._enter(run, age_s=self.now - run.offer.at_s if run.keeps_place else 0.0)


def simulate(engine: Engine, load: Sequence[Offer], span_s: float) -> None:
    """Offer the load for `span_s` seconds, and let what has begun end."""
    leaves: list[tuple[float, int]] = []
    coming = iter(load)
    following = next(coming, None)
    while following is not None or engine.running or engine.waiting:
        due = engine.queue.next_due() if engine.waiting else None
        times = [
            math.inf if following is None else following.at_s,
            leaves[0][0] if leaves else math.inf,
            math.inf if due is None else due,
        ]
        if engine.running and min(times) > engine.now:
            engine.step()
            continue
        if min(times) == math.inf:
            break
        engine.now = max(engine.now, min(times))
        if following is not None and following.at_s <= engine.now:
            engine.arrive(following)
            if engine.levels is not None:
                heapq.heappush(leaves, (following.at_s + engine.levels.patience_s(following.group), following.number))
            following = next(coming, None)
        elif leaves and leaves[0][0] <= engine.now:
            engine.leave(load[heapq.heappop(leaves)[1]])
        else:
            engine.take(engine.queue.on_tick(engine.now))


def levels_of(drawn_from: Lengths, slots: int, seed: int) -> Levels:
    """Unloaded latencies, and the capacity with the slots always full."""
    policy = QueuePolicy(MAX_QUEUED, UNBOUNDED_S)
    alone = Engine(1, policy, None, stops=False)
    spaced = offers(drawn_from, 0.2, CLOSED_S * 5, seed)
    simulate(alone, spaced, CLOSED_S)
    firsts = [run.first_s - run.offer.at_s for run in alone.ended if run.first_s is not None]
    full = Engine(slots, policy, None, stops=False)
    crowd = [replace(offer, at_s=0.0) for offer in offers(drawn_from, 10.0, 40.0, seed)]
    simulate(full, crowd, CLOSED_S)
    return Levels(median(firsts), 1e3 * (STEP_S + SEQUENCE_S), len(crowd) / full.now)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm and load."""

    first_p99_s: float
    highs: int
    goodput: float
    tokens_per_s: float
    again_share: float
    stops: int
    unfinished: int


def figures(engine: Engine, span_s: float, levels: Levels) -> Figures:
    firsts = [
        math.inf if run.first_s is None else run.first_s - run.offer.at_s
        for run in engine.ended
        if run.offer.group == HIGH
    ]
    good = 0
    for run in engine.ended:
        if run.ended_s is None or run.first_s is None:
            continue
        gap_ms = 1e3 * (run.ended_s - run.first_s) / max(1, run.offer.output_tokens - 1)
        if run.first_s - run.offer.at_s <= levels.ttft_level_s(run.offer.group) and gap_ms <= levels.itl_level_ms:
            good += run.offer.output_tokens
    made = sum(run.offer.output_tokens for run in engine.ended if run.ended_s is not None)
    return Figures(
        first_p99_s=quantile(firsts, 0.99) or math.nan,
        highs=len(firsts),
        goodput=good / span_s,
        tokens_per_s=made / span_s,
        again_share=engine.again / engine.computed,
        stops=sum(run.stopped for run in engine.ended),
        unfinished=sum(run.first_s is not None and run.ended_s is None for run in engine.ended),
    )


def measure(drawn_from: Lengths, arm: str, seed: int, slots: int, span_s: float) -> dict[float, Figures]:
    """By multiple of the capacity."""
    share, stops = ARMS[arm]
    levels = levels_of(drawn_from, slots, seed)
    found: dict[float, Figures] = {}
    for multiple in (BASE, PEAK):
        load = offers(drawn_from, multiple * levels.capacity_rps, span_s, 1000 * seed + round(100 * multiple))
        if arm == ALONE:
            load = [replace(one, number=at) for at, one in enumerate(one for one in load if one.group == HIGH)]
        engine = Engine(slots, QueuePolicy(MAX_QUEUED, 60.0, guard_slots_share=share), levels, stops=stops)
        simulate(engine, load, span_s)
        found[multiple] = figures(engine, span_s, levels)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload.virtual", description=str(__doc__))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=MAX_NUM_SEQS)
    parser.add_argument("--span-s", type=float, default=400.0, help="of virtual time, for each load")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else CONSOLE_WIDTH)
    try:
        drawn_from = lengths(options.data, MAX_MODEL_LEN)
    except TraceMissingError as error:
        console.print(f"failed: {error}", style="red")
        return 1
    console.print(f"{options.slots} slots, {options.span_s:g} s a load, groups {', '.join(GROUPS)}; levels by seed")
    table = Table("arm", "seed", "p99 of `high` at 0.5x, 4x, ms (n)", "ratio", "goodput", "tokens/s", "again", "stops")
    result: dict[str, Any] = {}
    for seed, arm in itertools.product(range(1, options.seeds + 1), ARMS):
        found = measure(drawn_from, arm, seed, options.slots, options.span_s)
        low = found[BASE]
        high = found[PEAK]
        ratio = high.first_p99_s / low.first_p99_s
        result.setdefault(arm, []).append(
            {
                "high_ttft_p99_ratio_4x": round(ratio, 3),
                "high_ttft_p99_4x_ms": round(1e3 * high.first_p99_s, 1),
                "goodput_4x": round(high.goodput, 1),
                "tokens_per_s_4x": round(high.tokens_per_s, 1),
                "recomputed_share": round(high.again_share, 4),
                "preempted": high.stops,
                "unfinished": high.unfinished,
            }
        )
        spans = f"{1e3 * low.first_p99_s:.0f}, {1e3 * high.first_p99_s:.0f} ({low.highs}, {high.highs})"
        cells = f"{ratio:.2f}", f"{high.goodput:.0f}", f"{high.tokens_per_s:.0f}", f"{high.again_share:.3f}"
        table.add_row(arm, str(seed), spans, *cells, str(high.stops))
        console.print(f"  {arm}, seed {seed}: {ratio:.2f}")
    console.print(table)
    for arm, seeds in result.items():
        met = all(one["high_ttft_p99_ratio_4x"] <= BAR for one in seeds)
        console.print(f"{arm}: high_ttft_p99_ratio_4x at most {BAR}: {'met' if met else 'missed'}")
    write_json(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
