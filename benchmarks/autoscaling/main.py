"""Policies of scaling: `python -m benchmarks.autoscaling [--loads azure,step] [--starts 5,30,90] [--quick]`.

Eight loads (`loads`), each with starts of 5, 30 and 90 seconds, in the simulator: one router, replicas of an estimated
profile with eight slots. Arms are our policies and what others do (`baselines`), each swept on its one number until it
meets the same attainment: 99% of that which forty replicas reach. Its cost is in replica hours from the sixth minute
on, when all know the load; requests count from then on, too.

Regret: (cost - clairvoyant) / (static - clairvoyant), 0 is clairvoyant and 1 a fixed number of replicas.

Also the actions of each of our policies, with its own defaults, in 40 minutes of a constant load, and of one that flaps
each minute; and what these defaults reach and cost on every load, without a sweep.

Prints conditions, tables, and as its last line one JSON object; its bars: a regret of at most 0.20 at starts of 30
seconds; no other policy reaches the same at less; no action at constant load.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoscaling.policies import POLICIES, OngoingRequestsPolicy, PredictivePolicy, ReplicaPolicy, SloPolicy
from autoscaling.simulator import (
    AT_ONCE,
    SETTLE_S,
    ClassPlan,
    ModelPlan,
    NodePlan,
    RequestEnd,
    ScalingPlan,
    ServeDelays,
    Simulation,
    Summary,
    World,
)
from benchmarks.autoscaling.baselines import Apa, Clairvoyant, Kpa, ServeDefault, Static, clairvoyant_plan
from benchmarks.autoscaling.loads import CONSTANT, FLAPPING, MEAN_REPLICAS, SPAN_S, Load, loads
from benchmarks.common.conditions import processor, versions
from benchmarks.common.output import write_json
from benchmarks.common.run import CONSOLE_WIDTH
from benchmarks.common.traces import DATA, MODEL
from serve_app.core.queue import QueuePolicy
from serve_app.types import RequestClass

STARTS_S = (5.0, 30.0, 90.0)
AMPLE = 40
LAST_S = 300.0  # for what waits at the end
SHARE = 0.99  # of the attainment of ample replicas
TRIES = 6
BAR = 0.20
BAR_START_S = 30.0
OWN_DELAYS = ServeDelays()  # of `ongoing`, as shipped
SERVE_DELAYS = ServeDelays(upscale_s=30.0, downscale_s=600.0)
OURS = ("slo", "ongoing")
STATIC = "static"
CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with one number that is swept: more of it means more replicas.

    Args:
        make: the policy, by the number, the load, and the seconds of a start.
        least, most: between which the number is sweeped.
    """

    make: Callable[[float, Load, float], ReplicaPolicy]
    least: float
    most: float
    delays: ServeDelays = AT_ONCE


def _clairvoyant(factor: float, load: Load, start_s: float) -> ReplicaPolicy:
    runs = [(one.at_s, load.run_s(one)) for one in load.requests]
    return Clairvoyant(clairvoyant_plan(runs, load.profile.slots, 1.0 / factor, start_s, SPAN_S), SETTLE_S)


def _by_target(kind: Callable[[float], ReplicaPolicy], factor: float, load: Load, start_s: float) -> ReplicaPolicy:
    return kind(load.profile.slots / factor)


class Ongoing(OngoingRequestsPolicy):
    """The default, with a target."""

    def __init__(self, target: float) -> None:
        super().__init__()
        self._target = target

    def decide(self, signals: Any) -> Any:
        return super().decide(replace(signals, target_ongoing=self._target))


ARMS: Mapping[str, Arm] = {
    CLAIRVOYANT: Arm(_clairvoyant, 0.4, 4.0),
    STATIC: Arm(lambda number, load, start_s: Static(number), 4.0, float(AMPLE)),
    "slo": Arm(lambda safety, load, start_s: SloPolicy(safety), 0.02, 20.0),
    "predictive": Arm(lambda safety, load, start_s: PredictivePolicy(safety, load.season_s or SPAN_S), 0.02, 20.0),
    "ongoing": Arm(partial(_by_target, Ongoing), 0.3, 8.0, OWN_DELAYS),
    "serve": Arm(partial(_by_target, ServeDefault), 0.3, 8.0, SERVE_DELAYS),
    "kpa": Arm(partial(_by_target, Kpa), 0.3, 8.0),
    "apa": Arm(partial(_by_target, Apa), 0.3, 8.0),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `cost` in replica hours; `number`: of the arm."""

    attainment: float
    cost: float
    actions: int
    number: float


@cache
def _loads(data: Path) -> dict[str, Load]:
    return loads(data)


def run(load: Load, start_s: float, policy: ReplicaPolicy, number: float, delays: ServeDelays, first: int) -> Outcome:
    """One run of a load."""
    profile = replace(load.profile, start_s=start_s)
    scaling = ScalingPlan(1, 2 * AMPLE, first, target_ongoing=float(profile.slots), control_s=1.0, delays=delays)
    world = World(
        (ModelPlan(MODEL, profile, QueuePolicy(max_queued=100_000, max_wait_s=600.0), scaling),),
        NodePlan(gpus=2 * AMPLE, gpu_bytes=profile.memory_bytes),
        {RequestClass.NORMAL: ClassPlan(ttft_slo_s=load.slo_s)},
        routers=1,
    )
    summary = Summary()

    def consume(end: RequestEnd) -> None:
        if end.offered_s >= SETTLE_S + load.warm_s:
            summary.add(end)

    simulation = Simulation(world, load.requests, consume, lambda plan: policy)
    simulation.run_for(load.warm_s)
    (before,) = simulation.use()
    simulation.run_for(SPAN_S - load.warm_s)
    (after,) = simulation.use()
    simulation.run(LAST_S)
    actions = len(after.changes) - len(before.changes)
    missing = simulation.offered - simulation.ended  # what still waits has missed its level
    attainment = summary.in_time / (summary.offered + missing)
    return Outcome(attainment, after.gpu_hours - before.gpu_hours, actions, number)


def _tried(load: Load, start_s: float, arm: Arm, number: float) -> Outcome:
    number = round(number) if arm is ARMS[STATIC] else number
    first = number if arm is ARMS[STATIC] else round(1.25 * MEAN_REPLICAS)
    return run(load, start_s, arm.make(number, load, start_s), number, arm.delays, int(first))


def least(load: Load, start_s: float, arm: Arm, goal: float) -> Outcome | None:
    """The cheapest run that meets the goal; None: even the most does not."""
    low = arm.least
    high = arm.most
    best: Outcome | None = None
    for _ in range(TRIES):
        number = math.sqrt(low * high)
        found = _tried(load, start_s, arm, number)
        if found.attainment >= goal:
            best = found if best is None or found.cost < best.cost else best
            high = number
        else:
            low = number
    return best


def _is_compared(arm: str, load: Load) -> bool:
    """A forecast by the time of day is `slo` where no season comes back."""
    return arm != "predictive" or load.season_s is not None


def compared(case: str, start_s: float, arms: Sequence[str], data: Path) -> dict[str, Outcome | None]:
    """All arms on one load."""
    load = _loads(data)[case]
    ample = _tried(load, start_s, ARMS[STATIC], AMPLE)
    found = {arm: least(load, start_s, ARMS[arm], SHARE * ample.attainment) for arm in arms if _is_compared(arm, load)}
    found["ample"] = ample
    for name in OURS:
        found[f"{name} as shipped"] = run(load, start_s, POLICIES[name](), 0.0, OWN_DELAYS, round(1.25 * MEAN_REPLICAS))
    return found


def regret(found: Mapping[str, Outcome | None], arm: str) -> float | None:
    """See the module; None: it does not meet the attainment."""
    outcome, best, fixed = (found.get(name) for name in (arm, CLAIRVOYANT, STATIC))
    if outcome is None or best is None or fixed is None or fixed.cost <= best.cost:
        return None
    return (outcome.cost - best.cost) / (fixed.cost - best.cost)


def _table(found: Mapping[tuple[str, float], Mapping[str, Outcome | None]]) -> Table:
    table = Table("load", "start s", "arm", "attainment", "replica hours", "regret", "actions", "number", box=None)
    for (name, start_s), outcomes in found.items():
        for arm, outcome in outcomes.items():
            if outcome is None:
                table.add_row(name, f"{start_s:g}", arm, "missed", "", "", "", "")
                continue
            part = regret(outcomes, arm)
            table.add_row(
                name,
                f"{start_s:g}",
                arm,
                f"{outcome.attainment:.4f}",
                f"{outcome.cost:.2f}",
                "" if part is None else f"{part:.2f}",
                str(outcome.actions),
                f"{outcome.number:.2f}",
            )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="azure,mooncake,step,seasonal,clients-1,clients-2,clients-3")
    parser.add_argument("--starts", default=",".join(f"{one:g}" for one in STARTS_S))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one load, one start")
    options = parser.parse_args(arguments)
    names = ["step"] if options.quick else options.loads.split(",")
    starts = [BAR_START_S] if options.quick else [float(one) for one in options.starts.split(",")]
    arms = options.arms.split(",")
    console = Console(width=CONSOLE_WIDTH)
    console.print(f"{processor()}; {versions()}")
    cases = [(name, start_s) for start_s in starts for name in names]
    with ProcessPoolExecutor(options.processes) as pool:
        coming = {pool.submit(compared, name, start_s, arms, options.data): (name, start_s) for name, start_s in cases}
        turns = [pool.submit(_actions, name, load, options.data) for load in (CONSTANT, FLAPPING) for name in OURS]
        found = {}
        for ended in track(as_completed(coming), "loads", len(cases), console=Console(stderr=True)):
            found[coming[ended]] = ended.result()
            console.print(_table({coming[ended]: ended.result()}))  # an hour and more for all
        actions = [answer.result() for answer in turns]
    constant = dict(zip(OURS, actions[: len(OURS)], strict=True))
    flapping = dict(zip(OURS, actions[len(OURS) :], strict=True))
    write_json(summary_of(found, arms) | {"actions_constant_load": constant, "actions_flapping_load": flapping})


def _actions(name: str, load: str, data: Path) -> int:
    """The actions of one of our policies as shipped."""
    policy = POLICIES[name]()
    return run(_loads(data)[load], BAR_START_S, policy, 0.0, OWN_DELAYS, round(1.25 * MEAN_REPLICAS)).actions


def summary_of(found: Mapping[tuple[str, float], Mapping[str, Outcome | None]], arms: Iterable[str]) -> dict[str, Any]:
    """The JSON object, without the constant load."""
    policies = [arm for arm in arms if arm not in (STATIC, CLAIRVOYANT)]
    regrets = {
        arm: {f"{name}/{start_s:g}": regret(outcomes, arm) for (name, start_s), outcomes in found.items()}
        for arm in policies
    }
    means = {arm: [one for one in of.values() if one is not None] for arm, of in regrets.items()}
    best = min(policies, key=lambda arm: (-len(means[arm]), sum(means[arm]) / max(1, len(means[arm]))))
    at_bar = {name: regret(outcomes, best) for (name, start_s), outcomes in found.items() if start_s == BAR_START_S}
    cost = {
        f"{name}/{start_s:g}": {arm: None if one is None else round(one.cost, 3) for arm, one in outcomes.items()}
        for (name, start_s), outcomes in found.items()
    }
    attainment = {
        f"{name}/{start_s:g}": {arm: None if one is None else round(one.attainment, 4) for arm, one in outcomes.items()}
        for (name, start_s), outcomes in found.items()
    }
    return {
        "best_policy": best,
        "regret_30s": at_bar,
        "regret": regrets,
        "attainment": attainment,
        "cost": cost,
        "bar": BAR,
        "pass": all(one is not None and one <= BAR for one in at_bar.values()),
    }
