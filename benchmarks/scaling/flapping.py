"""A load that flaps each minute, on a running stack: `python -m benchmarks.scaling --flapping`.

Simulated engines, as shipped but for their bounds: `LOW` clients ask without pause, and every other minute `HIGH` more.
Each policy has a stack of its own. Counted: changes of the target, replica hours, requests, and how many of the
decisions that its controller has recorded come out of a new policy again (`serve-app scaling --replay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from autoscaling import recorded_decisions
from benchmarks.common.scaling_stack import MODEL, Clients, stack
from benchmarks.scaling.watch import Look, Watch

POLICIES = ("ongoing", "slo")
MINUTES = 8
FLAP_S = 60.0
SLOTS = 8
LOW = 4
HIGH = 20  # three replicas are wanted for both together
TOKENS = 100  # of an answer: a second
START_S = 15.0
LEVEL_S = 5.0  # of first tokens


def configuration(policy: str) -> dict[str, Any]:
    model = {
        "name": MODEL,
        "engine": "simulated",
        "max_num_seqs": SLOTS,
        "cpus_per_rank": 0.5,
        "replicas": {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": SLOTS, "policy": policy},
        "simulated": {"decode_step_s": 0.01, "start_s": START_S},
    }
    levels = {"classes": {"normal": {"ttft_slo_s": LEVEL_S}}}
    return {"models": [model], "admission": levels, "scaling": {"record_decisions": True}}


def measure(policy: str) -> dict[str, Any]:
    """What one policy did. Raises BenchmarkError: the stack does not come up."""
    with stack(configuration(policy)) as stage, Watch(stage.cluster.environment(), [MODEL]) as watch:
        steady = Clients(stage, LOW, TOKENS)
        began = steady.start()
        everybody = [steady]
        for minute in range(MINUTES):
            more = Clients(stage, HIGH if minute % 2 else 0, TOKENS)
            more.start()
            everybody.append(more)
            time.sleep(max(0.0, began + (minute + 1) * FLAP_S - time.monotonic()))
            more.finish()
        steady.finish()
        looks = [look for look in watch.looks(MODEL) if look.at >= began]
        replays = recorded_decisions.replayed(recorded_decisions.lines_of(stage.cluster.state.records))
    return figures(looks) | {
        "answered": sum(clients.answered for clients in everybody),
        "failed": sum(len(clients.failures) for clients in everybody),
        "decisions": sum(replay.decisions for replay in replays),
        "decisions_differing": sum(replay.differing for replay in replays),
    }


def figures(looks: list[Look]) -> dict[str, Any]:
    """The changes of the target, and the hours of all replicas that were there."""
    hours = sum(len(before.replicas) * (after.at - before.at) for before, after in pairwise(looks)) / 3600.0
    actions = sum(before.target != after.target for before, after in pairwise(looks))
    return {"actions": actions, "replica_hours": round(hours, 3), "targets": sorted({look.target for look in looks})}


def flapping(tell: Callable[[str], None], measured: Callable[[str], dict[str, Any]] = measure) -> dict[str, Any]:
    """The figures by policy."""
    found = {}
    for policy in POLICIES:
        found[policy] = measured(policy)
        tell(f"  {policy}: {found[policy]}")
    return found
