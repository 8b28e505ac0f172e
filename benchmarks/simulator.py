"""How fast the simulator is: `python -m benchmarks.simulator [--quick] [--replicas 1,8,64,1000] [--load 0.4]`.

A synthetic load of chats (`autoscaling.simulator.SyntheticLoad`) on a fixed number of replicas of a profile, at a part
of what these can produce. Every request takes the way of production: estimate, replica choice, KV budget, the queue of
three routers and the quota actor, a replica's batch, its end. Times are CPU seconds of one core: other processes of the
machine do not count, but for what they take of its caches.

Figures by number of replicas: requests a minute of CPU, the virtual time, the share of the first tokens within a
second, refusals, messages to the quota actor. While requests wait, each event is such a message, and these cost most.

Prints conditions, a table, and as its last line one JSON object; its bar is 100,000 requests a minute at 64 replicas.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaling.simulator import (
    PROFILES,
    ModelPlan,
    NodePlan,
    ScalingPlan,
    SimulatedRequest,
    Simulation,
    Summary,
    SyntheticLoad,
    World,
)
from benchmarks.common.conditions import here
from benchmarks.common.output import write_json

MODEL = "m"
PROFILE = PROFILES["8b-h100"]
REPLICAS = (1, 8, 64, 1000)
REQUESTS = 20_000
QUICK_REQUESTS = 2_000
MEAN_OUTPUT_TOKENS = 219.0  # of `synthetic.CHAT`
BAR = 100_000.0
BAR_REPLICAS = 64


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one run. `virtual_s`: the time that was simulated; `in_time`: first tokens within a second."""

    replicas: int
    requests: int
    requests_per_minute: float
    virtual_s: float
    cpu_s: float
    in_time: float
    refused: int
    messages: int


def world(replicas: int) -> World:
    """A fixed number of replicas."""
    nodes = -(-replicas // 8)
    scaling = ScalingPlan(replicas, replicas)
    return World((ModelPlan(MODEL, PROFILE, scaling=scaling),), NodePlan(gpus=8, least=nodes, most=nodes))


def requests(replicas: int, load: float, count: int, seed: int) -> list[SimulatedRequest]:
    """Chats at a part of what the replicas can produce with half of their slots in use."""
    slots = PROFILE.slots / 2
    step_s = PROFILE.step_s + slots * PROFILE.sequence_s + PROFILE.kv_tokens / 4 * PROFILE.kv_token_s
    rate = load * replicas * slots / step_s / MEAN_OUTPUT_TOKENS
    span_s = 2.0 * count / rate
    return list(islice(SyntheticLoad(MODEL, rate, span_s, day_swing=0.0, seed=seed).requests(), count))


def measure(replicas: int, load: float, count: int, seed: int) -> Speed:
    """One run."""
    asked = requests(replicas, load, count, seed)
    summary = Summary()
    in_time = 0
    simulation = Simulation(world(replicas), asked, summary.add)
    began = time.process_time()
    simulation.run()
    cpu_s = time.process_time() - began
    for figures in summary.by_class.values():
        in_time += figures.first_token.count_within(1.0)
    return Speed(
        replicas,
        len(asked),
        round(len(asked) / cpu_s * 60.0),
        round(simulation.clock.now - simulation.began_s, 1),
        round(cpu_s, 2),
        round(in_time / len(asked), 4),
        sum(figures.refusals.total() for figures in summary.by_class.values()),
        sum(router.link.messages for router in simulation.routers),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=str(__doc__))
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)), help="numbers of replicas")
    parser.add_argument("--load", type=float, default=0.4, help="part of what the replicas can produce")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    conditions = here(profile=asdict(PROFILE), load=options.load, seed=options.seed)
    console.print(conditions)
    count = QUICK_REQUESTS if options.quick else REQUESTS
    table = Table("replicas", "requests", "requests/min of CPU", "virtual s", "CPU s", "in time", "refused", "messages")
    found: dict[str, Any] = {}
    for replicas in map(int, options.replicas.split(",")):
        speed = measure(replicas, options.load, count, options.seed)
        found[str(replicas)] = asdict(speed)
        table.add_row(*(f"{value:,}" for value in asdict(speed).values()))
        console.print(f"  {replicas} replicas: {speed.requests_per_minute:,.0f} requests a minute")
    console.print(table)
    if str(BAR_REPLICAS) in found:
        is_met = found[str(BAR_REPLICAS)]["requests_per_minute"] >= BAR
        console.print(f"{BAR:,.0f} requests a minute at {BAR_REPLICAS} replicas: {'met' if is_met else 'missed'}")
    write_json({"speed": found, "conditions": conditions})


if __name__ == "__main__":
    main()
