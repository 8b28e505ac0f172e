"""What a run of the throughput benchmark measures: its arguments, sizes, order and prompts' seeds. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.arms import KINDS, ModelChoice

MAX_TOKENS = 128  # the answer length of every figure measured for the design
CLIENTS = (1, 8, 32, 64)  # alone, a team, half and all of the engine's batch
CURVE_CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE_SLOTS = 128  # of the engine: every client of the longest row has one, else its latency would be a queue's
CURVE_KV_BYTES_PER_SLOT = 2**22  # 1,024 tokens of the built-in model in float32; a request of these has at most 400
# fewer than three give no median to speak of
ROUNDS = 5
QUICK_ROUNDS = 3
# the slowest answer takes about 1.5 s at 64 clients
WARMUP_S = 3.0
QUICK_WARMUP_S = 1.5
# 40 answers of one client; 20 when quick
WINDOW_S = 10.0
QUICK_WINDOW_S = 5.0
MAX_REQUESTS = 2000  # of a window: on a fast machine more answers sharpen nothing
QUICK_BUDGET_S = 450.0  # below the eight minutes promised, with room to stop the servers and do the sums
QUICK_CURVE_WINDOW_S = 6.0  # two answers of each of 128 clients on two cores, thirty of one client
QUICK_CURVE_ARM_BUDGET_S = 330.0  # a curve of one arm is promised in six minutes


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `budget_s` None: all rounds, however long they take."""

    arms: tuple[str, ...]
    clients: tuple[int, ...]
    rounds: int
    warmup_s: float
    window_s: float
    max_requests: int
    seed: int
    budget_s: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def labels_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """Names for arms: the kind, with a number from the second of its kind on ("vllm", "vllm#2")."""
    return tuple(k if kinds[:i].count(k) == 0 else f"{k}#{kinds[:i].count(k) + 1}" for i, k in enumerate(kinds))


def order(plan: Plan, up: Collection[str] | None) -> Iterator[tuple[str, int]]:
    """The windows of one round, as (arm, clients).

    `up` None: both arms stay up and alternate at each client count, A B A B. Otherwise one arm is up at a time, and the
    one in `up` begins: A B, B A, A B over the rounds, which saves a start in two and lets slow drift cancel.
    """
    if up is None:
        yield from [(arm, clients) for clients in plan.clients for arm in plan.arms]
    else:
        arms = sorted(plan.arms, key=lambda arm: arm not in up)
        yield from [(arm, clients) for arm in arms for clients in plan.clients]


def seed_of(plan: Plan, round_number: int, clients: int) -> int:
    """The prompts of a window: the same for both arms, new in each round, so that no prefix cache helps."""
    return (plan.seed * 1_000 + round_number) * 1_000 + clients


def parse_arguments(arguments: Sequence[str], description: str) -> argparse.Namespace:
    """The command line; exits with code 2 and a message when it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=description.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="at most eight minutes: fewer and shorter windows")
    parser.add_argument("--batch-curve", action="store_true", help="1 to 128 clients in powers of two, as factors")
    parser.add_argument("--plot", type=Path, help="with --batch-curve: a file for its plot, .svg or .png")
    parser.add_argument("--arms", default="vllm,ours", help="baseline first; vllm,vllm: the noise")
    parser.add_argument("--clients", help="comma separated client counts")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--idle", choices=("auto", "up", "stop"), default="auto", help="what the idle arm does")
    parser.add_argument("--model", help="a model folder instead of the built-in model")
    parser.add_argument("--vllm-arg", action="append", default=[], help="one more argument for the baseline's command")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and resampling")
    options = parser.parse_args(arguments)
    kinds = options.arms.split(",")
    if not 1 <= len(kinds) <= 2 or not set(kinds) <= set(KINDS):
        parser.error(f"--arms takes one or two of {', '.join(KINDS)}")
    default = CURVE_CLIENTS if options.batch_curve else CLIENTS
    options.clients = tuple(int(c) for c in options.clients.split(",")) if options.clients else default
    if options.batch_curve and 1 not in options.clients:
        parser.error("--batch-curve needs 1 among the clients: its factors are over one client")
    if options.plot is not None and not options.batch_curve:
        parser.error("--plot draws the curve of --batch-curve")
    options.arms = labels_of(kinds)
    return options


def model_of(options: argparse.Namespace, path: str) -> ModelChoice:
    """What all arms serve. For a batch curve every client has a slot, and KV cache for its longest request."""
    model = ModelChoice(path)
    if not options.batch_curve:
        return model
    slots = max(CURVE_SLOTS, *options.clients)
    kv_cache_bytes = max(model.kv_cache_bytes, slots * CURVE_KV_BYTES_PER_SLOT)
    return replace(model, max_num_seqs=slots, kv_cache_bytes=kv_cache_bytes)


def plan_of(options: argparse.Namespace) -> Plan:
    """Sizes for a full or a quick run."""
    quick = options.quick
    window_s = QUICK_WINDOW_S
    budget_s = QUICK_BUDGET_S
    if options.batch_curve:
        window_s = QUICK_CURVE_WINDOW_S
        budget_s = min(QUICK_BUDGET_S, QUICK_CURVE_ARM_BUDGET_S * len(options.arms))
    return Plan(
        arms=options.arms,
        clients=options.clients,
        rounds=options.rounds or (QUICK_ROUNDS if quick else ROUNDS),
        warmup_s=QUICK_WARMUP_S if quick else WARMUP_S,
        window_s=window_s if quick else WINDOW_S,
        max_requests=MAX_REQUESTS,
        seed=options.seed,
        budget_s=budget_s if quick else None,
    )
