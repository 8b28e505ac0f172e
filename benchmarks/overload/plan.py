"""What a run of `benchmarks.overload` measures: its windows, arms, levels and what its clients do. Pure.

Levels, as everywhere here: the first token within 5, 20, 100 times the unloaded p50 TTFT for high, normal, low, and a
mean gap between tokens within 3 times the unloaded p50, both of vLLM's own server in the same run. What clients do is
derived from them. Who asks for `normal` or `low` is a program and sends half its TTFT level as deadline (for the start;
the other half is the prompt's); a person, `high`, sends none. All leave without a word when `PATIENCE_FACTORS` times
their level have passed without a first token, and none comes back.

Windows are planned for the capacity that is found: where the bar is, as many `high` requests are offered as a p99
takes, if that can be had in `most_s`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.arms import OURS, VLLM
from benchmarks.common.traces import DATA
from benchmarks.endpoint.size import add_size_arguments
from benchmarks.endpoint.target import add_target_arguments, is_asked_for, target_of
from benchmarks.overload.offered_load import GROUP_SHARES, GROUPS, HIGH, LOW, NORMAL

FIFO = "fifo"
ARMS = (VLLM, OURS, FIFO)
PEAK = 4.0  # the multiple that the bars are about
BASE = 0.5  # the multiple whose p99 of the high group is the yardstick
# requests of a class: three lie beyond either; below, a ratio is that of single ones
ENOUGH_P99 = 300
ENOUGH_P90 = 30
MULTIPLES = (0.5, 1.0, 2.0, 3.0, PEAK)
QUICK_MULTIPLES = (0.5, 1.0, PEAK)
TTFT_FACTORS: Mapping[str, float] = {HIGH: 5.0, NORMAL: 20.0, LOW: 100.0}
ITL_FACTOR = 3.0
DEADLINE_SHARE = 0.5  # of the TTFT level: to be granted by; the rest is for the prompt, beside others
# Times the TTFT level. People leave a silent page after some ten seconds, which is fifty times what an unloaded server
# takes; at four times their level they left before the longest prompts could be read, loaded or not.
PATIENCE_FACTORS: Mapping[str, float] = {HIGH: 10.0, NORMAL: 4.0, LOW: 4.0}
MAX_NUM_SEQS = 8  # few enough for the other core to be at half; a full batch of them misses the ITL level
DEPTH = 3  # times the built-in model's layers: with 1 the other core is at 0.72 under 4x, with 2 at 0.46 to 0.57
ROUNDS = 3  # the machine at hand changes its speed by a fifth within a quarter of an hour
MAX_MODEL_LEN = 4096  # one request in two thousand of the scaled trace is longer
SPARE = 1.1  # of a window: arrivals are drawn, and so is how many come
CLOSED_FACTOR = 2  # clients for each slot when capacity is measured: a slot that comes free has somebody waiting
UNLOADED = "unloaded"
CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. Spans in seconds; `window_s` has those of `ours` by multiple, the other arms have `other_s`.
    `ours` is measured in `rounds` parts, each with all multiples: a machine that changes its speed does so for all."""

    arms: tuple[str, ...]
    multiples: tuple[float, ...]
    window_s: Mapping[float, float]
    rounds: int
    other_s: float
    closed_s: float
    warmup_s: float
    tail_s: float
    max_num_seqs: int
    depth: int
    seed: int
    folder: str
    most_s: float  # of one window of `ours`, however slow the machine is

    def sized(self, levels: Levels) -> Plan:
        """With windows as long as the `high` group needs for a p99 where the bar is, at the capacity that was found;
        where that is more than `most_s`, so long."""
        share = GROUP_SHARES[GROUPS.index(HIGH)]

        def span_s(multiple: float) -> float:
            wanted = SPARE * ENOUGH_P99 / (share * multiple * levels.capacity_rps)
            planned = self.window_s[multiple]
            return max(planned, min(wanted, self.most_s)) if multiple in (BASE, PEAK) else planned

        return replace(self, window_s={multiple: span_s(multiple) for multiple in self.window_s})

    def windows(self, arm: str) -> list[tuple[float, float, int]]:
        """Multiple, length and round of each window of an arm, in order."""
        if arm != OURS:
            return [(multiple, self.other_s, 0) for multiple in self.multiples]
        rounds = range(self.rounds)
        return [(multiple, self.window_s[multiple] / self.rounds, one) for one in rounds for multiple in self.multiples]

    def seed_of(self, multiple: float, part: int = 0) -> int:
        """The same requests for every arm at one multiple, others at another, and in another round."""
        return self.seed * 1_000 + round(100 * multiple) + part

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        return found | {"window_s": {f"{m:g}": s for m, s in self.window_s.items()}}


@dataclass(frozen=True, slots=True)
class Levels:
    """The unloaded p50s of vLLM's own server, and what follows from them. `capacity_rps` in requests a second."""

    ttft_s: float
    itl_ms: float
    capacity_rps: float

    def ttft_level_s(self, group: str) -> float:
        return TTFT_FACTORS[group] * self.ttft_s

    @property
    def itl_level_ms(self) -> float:
        return ITL_FACTOR * self.itl_ms

    def deadline_ms(self, group: str) -> int | None:
        """What a client of the group sends as `X-Deadline-Ms`; None: nothing."""
        if group == HIGH:
            return None
        return max(1, round(1e3 * DEADLINE_SHARE * self.ttft_level_s(group)))

    def patience_s(self, group: str) -> float:
        return PATIENCE_FACTORS[group] * self.ttft_level_s(group)

    def as_json(self) -> dict[str, Any]:
        return {
            "unloaded_ttft_p50_ms": round(1e3 * self.ttft_s, 2),
            "unloaded_itl_p50_ms": round(self.itl_ms, 3),
            "capacity_requests_per_s": round(self.capacity_rps, 2),
            "ttft_level_ms": {group: round(1e3 * self.ttft_level_s(group), 1) for group in GROUPS},
            "itl_level_ms": round(self.itl_level_ms, 2),
            "deadline_ms": {group: self.deadline_ms(group) for group in GROUPS},
            "patience_ms": {group: round(1e3 * self.patience_s(group), 1) for group in GROUPS},
        }


def parse_arguments(arguments: Sequence[str], description: str) -> argparse.Namespace:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=description.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="at most five minutes: fewer and shorter windows")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of them; levels need vllm, or a --raw that has it")
    parser.add_argument("--scale", type=float, default=1.0, help="of the windows' lengths")
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, help="slots of the engine")
    parser.add_argument("--depth", type=int, default=DEPTH, help="times the built-in model's layers")
    parser.add_argument("--data", type=Path, default=DATA, help="where the trace is")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals, lengths and texts")
    parser.add_argument("--raw", type=Path, help="a folder for each window's result; one that is there stands")
    parser.add_argument("--plot", type=Path, help="a file for the plot, .svg or .png")
    add_target_arguments(parser)
    add_size_arguments(parser)
    parser.add_argument(
        "--unloaded", type=_unloaded, metavar="TTFT_MS,ITL_MS", help="with one client: not measured then"
    )
    options = parser.parse_args(arguments)
    options.target = target_of(parser, options, tenants=1) if is_asked_for(parser, options) else None
    options.arms = tuple(arm for arm in ARMS if arm in options.arms.split(","))
    if not options.scale > 0:
        parser.error("--scale must be above 0")
    if options.depth < 1:
        parser.error("--depth must be at least 1")
    if not options.arms:
        parser.error(f"--arms takes some of {', '.join(ARMS)}")
    return options


def _unloaded(text: str) -> tuple[float, float]:
    """In the units of `Levels`."""
    first_ms, gap_ms = (float(part) for part in text.split(","))
    return first_ms / 1e3, gap_ms


def plan_of(options: argparse.Namespace) -> Plan:
    """Sizes for a full or a quick run. Where a bar is, the windows are longer: a tenth of the requests is `high`,
    and the best of several windows is the luckiest where they are short."""
    multiples: tuple[float, ...]
    if options.quick:
        multiples = QUICK_MULTIPLES
        windows = {0.5: 25.0, 1.0: 12.0, PEAK: 25.0}
        sizes = {"other_s": 8.0, "closed_s": 8.0, "warmup_s": 4.0, "tail_s": 2.0, "most_s": 40.0}
    else:
        multiples = MULTIPLES
        windows = {0.5: 180.0, 1.0: 60.0, 2.0: 90.0, 3.0: 90.0, PEAK: 120.0}
        sizes = {"other_s": 40.0, "closed_s": 30.0, "warmup_s": 8.0, "tail_s": 6.0, "most_s": 900.0}
    sizes |= {name: options.scale * sizes[name] for name in ("other_s", "closed_s", "most_s")}
    return Plan(
        arms=options.arms,
        multiples=multiples,
        window_s={multiple: options.scale * span_s for multiple, span_s in windows.items()},
        rounds=1 if options.quick else ROUNDS,
        max_num_seqs=options.max_num_seqs,
        depth=options.depth,
        seed=options.seed,
        folder=str(options.data),
        **sizes,
    )
