"""Overload in virtual time: `python -m benchmarks.overload.virtual [--seeds 3] [--slots 8] [--span-s 400]`.

The requests of `benchmarks.overload` in `autoscaling.simulator`: three routers, the quota actor, and one replica of the
profile `tiny-cpu` (the built-in model, three times as deep, on one core). What else the machine does has no part in it.
A request that is stopped computes its prompt and what it has produced again when it goes on, as if no prefix were
cached. Arms, with the same requests at the same moments:

    guard slots   up to half of the slots are kept free while `high` comes, and nothing is stopped
    preemption    no slot is kept free; whoever is below stops for `high` and `normal`
    both          a quarter of the slots at most, and preemption: the defaults
    high alone    nobody else comes: what no order of service can better

Per arm and seed, at half and at four times the capacity: p99 of the first token of `high`, its ratio, the goodput of
requests within their levels, output tokens/s, the part of computed tokens that were computed again, stops. Prints the
table and as its last line one JSON object; its bar is `high_ttft_p99_ratio_4x` at most 1.3 in each seed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaling.simulator import PROFILES, ClassPlan, EngineProfile, RequestEnd, SimulatedRequest
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.stats import lower_quantile
from benchmarks.common.traces import DATA, MODEL, TraceMissingError
from benchmarks.common.worlds import one_model, play_all
from benchmarks.overload.offered_load import GROUPS, HIGH, Lengths, Offer, lengths, offers
from benchmarks.overload.plan import BASE, MAX_MODEL_LEN, MAX_NUM_SEQS, PEAK, Levels
from serve_app.core.queue import QueuePolicy
from serve_app.types import Outcome, RequestClass

ALONE = "high alone"
# The share of guard slots, and whether requests stop.
ARMS = {"guard slots": (0.5, False), "preemption": (0.0, True), "both": (0.25, True), ALONE: (0.0, False)}
BAR = 1.3
MAX_QUEUED = 1000
UNLOADED_RPS = 0.2
UNLOADED_S = 600.0
CROWD = 400  # requests at once, whose end tells the capacity


def requests_of(load: Iterable[Offer]) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(
            one.at_s,
            f"tenant-{one.tenant}",
            RequestClass[one.group.upper()],
            MODEL,
            one.prompt_tokens,
            one.output_tokens,
        )
        for one in load
    ]


def levels_of(drawn_from: Lengths, profile: EngineProfile, seed: int) -> Levels:
    """Unloaded latencies, and the capacity with the slots always full."""
    spaced = requests_of(offers(drawn_from, UNLOADED_RPS, UNLOADED_S, seed))
    _, alone = play_all(one_model(replace(profile, slots=1)), spaced)
    crowd = [replace(one, at_s=0.0) for one in requests_of(offers(drawn_from, CROWD / 40.0, 40.0, seed))]
    _, full = play_all(one_model(profile), crowd)
    firsts = [end.first_s - end.offered_s for end in alone if end.first_s is not None]
    took_s = max(end.ended_s - end.offered_s for end in full)
    return Levels(median(firsts), 1e3 * (profile.step_s + profile.sequence_s), len(crowd) / took_s)


def class_of(group: str, levels: Levels) -> ClassPlan:
    """What the clients of a group do."""
    deadline_ms = levels.deadline_ms(group)
    deadline_s = None if deadline_ms is None else deadline_ms / 1e3
    return ClassPlan(levels.ttft_level_s(group), levels.patience_s(group), deadline_s)


def figures(ends: Sequence[RequestEnd], span_s: float, levels: Levels) -> dict[str, float]:
    """Of one arm and load."""
    highs = [end for end in ends if end.request_class is RequestClass.HIGH]
    firsts = [math.inf if end.first_s is None else end.first_s - end.offered_s for end in highs]
    again = sum(end.again_tokens for end in ends)
    computed = again + sum(end.prompt_tokens + end.output_tokens for end in ends if end.first_s is not None)
    whole = [end for end in ends if end.outcome is Outcome.OK]
    return {
        "high_ttft_p99_ms": round(1e3 * (lower_quantile(firsts, 0.99) or math.nan), 1),
        "highs": len(highs),
        "goodput": round(sum(end.output_tokens for end in whole if _is_good(end, levels)) / span_s, 1),
        "tokens_per_s": round(sum(end.output_tokens for end in whole) / span_s, 1),
        "recomputed_share": round(again / computed, 4),
        "preempted": sum(max(0, end.runs - 1) for end in ends),
        "unfinished": sum(end.first_s is not None for end in ends) - len(whole),
    }


def _is_good(end: RequestEnd, levels: Levels) -> bool:
    """Whether an answer met the levels of its group: for the first token, and for the mean gap."""
    assert end.first_s is not None
    gap_ms = 1e3 * (end.ended_s - end.first_s) / max(1, end.output_tokens - 1)
    return end.is_in_time and gap_ms <= levels.itl_level_ms


def measure(drawn_from: Lengths, arm: str, seed: int, slots: int, span_s: float) -> dict[float, dict[str, float]]:
    """By multiple of the capacity."""
    share, preempts = ARMS[arm]
    profile = replace(PROFILES["tiny-cpu"], slots=slots)
    levels = levels_of(drawn_from, profile, seed)
    queue = QueuePolicy(MAX_QUEUED, 60.0, guard_slots_share=share)
    classes = {RequestClass[group.upper()]: class_of(group, levels) for group in GROUPS}
    world = one_model(profile, queue, classes=classes, preempts=preempts)
    found: dict[float, dict[str, float]] = {}
    for multiple in (BASE, PEAK):
        load = offers(drawn_from, multiple * levels.capacity_rps, span_s, 1000 * seed + round(100 * multiple))
        _, ends = play_all(world, requests_of(one for one in load if arm != ALONE or one.group == HIGH))
        found[multiple] = figures(ends, span_s, levels)
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
    table = Table("arm", "seed", "p99 of `high` at 0.5x, 4x, ms (n)", "ratio", "goodput", "tokens/s", "again", "stops")
    result: dict[str, Any] = {arm: [] for arm in ARMS}
    for seed, arm in itertools.product(range(1, options.seeds + 1), ARMS):
        found = measure(drawn_from, arm, seed, options.slots, options.span_s)
        low = found[BASE]
        high = found[PEAK]
        ratio = round(high["high_ttft_p99_ms"] / low["high_ttft_p99_ms"], 3)
        figures_4x = {"high_ttft_p99_ratio_4x": ratio, **high}
        result[arm].append({name: value if math.isfinite(value) else None for name, value in figures_4x.items()})
        spans = " and ".join(f"{one['high_ttft_p99_ms']:.0f} ({one['highs']})" for one in (low, high))
        cells = (ratio, *(high[name] for name in ("goodput", "tokens_per_s", "recomputed_share", "preempted")))
        table.add_row(arm, str(seed), spans, *(f"{cell:g}" for cell in cells))
        console.print(f"  {arm}, seed {seed}: {ratio:.2f}")
    console.print(table)
    for arm, seeds in result.items():
        met = all((one["high_ttft_p99_ratio_4x"] or math.inf) <= BAR for one in seeds)
        console.print(f"{arm}: high_ttft_p99_ratio_4x at most {BAR}: {'met' if met else 'missed'}")
    write_json(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
