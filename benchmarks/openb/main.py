"""FGD's protocol on the published GPU trace: `python -m benchmarks.openb [--quick]`.

Pods of the trace ("Beware of Fragmentation", ATC'23) are sampled with replacement onto its nodes. A pod of several GPUs
takes whole ones on one node. Only GPUs can run short: production's placement decides by their free amounts alone, among
nodes that Ray offers, so pods without a GPU, CPU, host memory and GPU models (none of which this trace asks for) are
left out.

    arrivals   none departs, until 130% of the cluster's GPUs have been asked for: the share of GPUs unallocated when
               demand reaches 100%, as the paper measures it
    steady     the cluster starts full: live demand is 110% of its GPUs. Pods then arrive as a Poisson process and stay
               an exponential time of one mean for all (the trace's own lifetimes have a mean 48 times their median:
               a handful of pods would decide the figure). What does not fit is lost. The share of GPUs unallocated,
               averaged over time after a warm-up

The same seeds, pods and times for every policy. `ours` is production's and learns from what arrives; `fgd` is given the
trace's own distribution beforehand. The bound holds for every scheduler: see bound.py.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.conditions import here
from benchmarks.common.output import write_json
from benchmarks.common.traces import DATA, TraceMissingError
from benchmarks.openb.bound import unallocated_bound
from benchmarks.openb.fgd import BestFit, Fgd, FirstFit, PodPolicy, TraceWorkload
from benchmarks.openb.placer import Ours, Placer
from benchmarks.openb.pods import Node, Placement, Pod

NODES_FILE = "openb_gpu_nodes.csv"
PODS_FILE = "openb_gpu_pods.csv"
DEVICE_MILLI = 1000  # a GPU in the trace's unit
# ten: the paper's number
SEEDS = 10
QUICK_SEEDS = 2
ARRIVALS_UNTIL = 1.3  # of the cluster's GPUs: the paper's
MEASURED_AT = 1.0
STEADY_DEMAND = 1.1  # of the cluster's GPUs, alive at a time if nothing were lost
# mean lifetimes: e^-2, 14%, of what was there at the start is left
STEADY_WARMUP = 2.0
STEADY_WINDOW = 2.0
QUICK_WARMUP = 1.0
QUICK_WINDOW = 0.5
CONSOLE_WIDTH = 130  # of tables when the output is not a terminal
OURS = "ours"
BEST_FIT = "best_fit"
FIRST_FIT = "first_fit"
FGD = "fgd"
BOUND = "bound"
FGD_MARGIN = 0.05  # relative: ours may be this much worse than FGD


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: seeds, and mean lifetimes of the steady variant."""

    seeds: int = SEEDS
    warmup: float = STEADY_WARMUP
    window: float = STEADY_WINDOW


def load(folder: Path = DATA) -> tuple[list[Node], list[Pod]]:
    """The trace's nodes and pods that have GPUs.

    Raises:
        TraceMissingError: it is not in the folder.
    """
    if not (folder / NODES_FILE).exists() or not (folder / PODS_FILE).exists():
        raise TraceMissingError(f"the trace ({NODES_FILE}, {PODS_FILE}) is not in {folder}")
    with (folder / NODES_FILE).open() as lines:
        nodes = [node_of(row) for row in csv.DictReader(lines) if int(row["gpu"])]
    with (folder / PODS_FILE).open() as lines:
        return nodes, [pod_of(row) for row in csv.DictReader(lines) if int(row["num_gpu"])]


def node_of(row: Mapping[str, str]) -> Node:
    """A line of the nodes' file."""
    devices = (DEVICE_MILLI,) * int(row["gpu"])
    return Node(row["sn"], devices, devices)


def pod_of(row: Mapping[str, str]) -> Pod:
    """A line of the pods' file."""
    milli = int(row["gpu_milli"])
    return Pod(int(row["num_gpu"]), milli, whole=milli == DEVICE_MILLI)


def policies(pods: Sequence[Pod]) -> dict[str, Callable[[], PodPolicy]]:
    """What is compared, each made anew for a run."""
    workload = TraceWorkload(Counter(pods))
    return {OURS: Ours, BEST_FIT: BestFit, FIRST_FIT: FirstFit, FGD: lambda: Fgd(workload)}


def arrivals(nodes: Sequence[Node], pods: Sequence[Pod], policy: PodPolicy, seed: int) -> tuple[float, list[Pod]]:
    """Nothing departs; the share of GPUs unallocated when demand is what it is measured at, and the pods till then."""
    draw = random.Random(seed)
    placer = Placer(nodes, policy)
    capacity = sum(sum(node.total) for node in nodes)
    demanded = allocated = 0
    came: list[Pod] = []
    unallocated: float | None = None
    while demanded < ARRIVALS_UNTIL * capacity:
        pod = draw.choice(pods)
        placement = placer.place(pod)
        demanded += pod.ranks * pod.amount
        if placement is not None:
            placer.take(placement)
            allocated += pod.ranks * pod.amount
        if unallocated is None:
            came.append(pod)
            if demanded >= MEASURED_AT * capacity:
                unallocated = 1 - allocated / capacity
    assert unallocated is not None  # more is demanded in the end than where it is measured
    return unallocated, came


@dataclass(frozen=True, slots=True)
class Visit:
    """A pod of the steady variant and when it comes and would go, in mean lifetimes."""

    pod: Pod
    comes: float
    goes: float


def visits(nodes: Sequence[Node], pods: Sequence[Pod], seed: int, until: float) -> list[Visit]:
    """Those there at the start, then those that come; ordered by when they come."""
    draw = random.Random(seed)
    capacity = sum(sum(node.total) for node in nodes)
    found: list[Visit] = []
    demanded = 0
    while demanded < STEADY_DEMAND * capacity:  # an exponential time has no memory: what is left of it is one again
        found.append(Visit(draw.choice(pods), 0.0, draw.expovariate(1.0)))
        demanded += found[-1].pod.ranks * found[-1].pod.amount
    rate = STEADY_DEMAND * capacity / fmean(pod.ranks * pod.amount for pod in pods)
    now = draw.expovariate(rate)
    while now < until:
        found.append(Visit(draw.choice(pods), now, now + draw.expovariate(1.0)))
        now += draw.expovariate(rate)
    return found


def steady(nodes: Sequence[Node], coming: Sequence[Visit], policy: PodPolicy, since: float, until: float) -> float:
    """Visits come and go; the share of GPUs unallocated from `since` to `until`, over time."""
    placer = Placer(nodes, policy)
    capacity = sum(sum(node.total) for node in nodes)
    leaving: list[tuple[float, int, Placement]] = []
    used = 0.0  # milli-GPU times mean lifetimes inside the window
    for number, visit in enumerate(coming):
        while leaving and leaving[0][0] <= visit.comes:
            placer.give_back(heapq.heappop(leaving)[2])
        placement = placer.place(visit.pod)
        if placement is not None:
            placer.take(placement)
            heapq.heappush(leaving, (visit.goes, number, placement))
            used += visit.pod.ranks * visit.pod.amount * overlap(visit, since, until)
    return 1 - used / (capacity * (until - since))


def overlap(visit: Visit, since: float, until: float) -> float:
    """For how long of a window a visit is there."""
    return max(0.0, min(visit.goes, until) - max(visit.comes, since))


def run(plan: Plan, folder: Path = DATA, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Both variants with all seeds: the means under "openb", all figures under "openb_runs".

    Raises:
        TraceMissingError: the trace is not there.
    """
    nodes, pods = load(folder)
    until = plan.warmup + plan.window
    runs: dict[str, dict[str, list[float]]] = {}

    def note(name: str, variant: str, unallocated: float) -> None:
        runs.setdefault(name, {}).setdefault(variant, []).append(unallocated)

    for seed in range(plan.seeds):
        coming = visits(nodes, pods, seed, until)
        came: list[Pod] = []
        for name, make in policies(pods).items():
            at_100, came = arrivals(nodes, pods, make(), seed)
            in_steady = steady(nodes, coming, make(), plan.warmup, until)
            note(name, "unallocated_at_100", at_100)
            note(name, "unallocated_steady", in_steady)
            say(f"seed {seed} {name:>9}: {at_100:.2%} at 100%, {in_steady:.2%} steady")
        stays: dict[Pod, float] = {}
        for visit in coming:
            stay = overlap(visit, plan.warmup, until) / plan.window
            stays[visit.pod] = stays.get(visit.pod, 0.0) + stay
        note(BOUND, "unallocated_at_100", unallocated_bound(nodes, Counter(came), DEVICE_MILLI))
        note(BOUND, "unallocated_steady", unallocated_bound(nodes, stays, DEVICE_MILLI))
    return {
        "openb": {name: {variant: fmean(all_) for variant, all_ in figures.items()} for name, figures in runs.items()},
        "openb_runs": runs,
    }


def verdicts(means: Mapping[str, Mapping[str, float]]) -> list[tuple[str, bool]]:
    """The bars, and whether each is met."""
    found = []
    for variant in ("unallocated_at_100", "unallocated_steady"):
        ours, fgd, best = (means[name][variant] for name in (OURS, FGD, BEST_FIT))
        found.append((f"{variant}: ours {ours:.4f}, no worse than best fit's {best:.4f}", ours <= best))
        limit = fgd * (1 + FGD_MARGIN)
        found.append((f"{variant}: ours {ours:.4f}, at most FGD's {fgd:.4f} and 5% of it", ours <= limit))
    return found


def show(console: Console, result: Mapping[str, Any]) -> None:
    """The table and the bars."""
    table = Table(title="GPUs unallocated, mean over seeds and standard deviation between them")
    for heading in ("policy", "at 100% demand", "steady at 110%"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, runs in result["openb_runs"].items():
        cells = [f"{fmean(all_):.2%} ± {stdev(all_) if len(all_) > 1 else 0:.2%}" for all_ in runs.values()]
        table.add_row(name, *cells)
    console.print(table)
    for text, met in verdicts(result["openb"]):
        console.print(f"  {'met' if met else 'MISSED'}: {text}", style=None if met else "red")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when figures were got, or when there is no trace to get them from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds and a shorter steady state, under two minutes")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the trace")
    options = parser.parse_args(arguments)
    plan = Plan(QUICK_SEEDS, QUICK_WARMUP, QUICK_WINDOW) if options.quick else Plan()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else CONSOLE_WIDTH)
    console.print_json(data=here(plan=asdict(plan)))
    try:
        result = run(plan, options.data, console.print)
    except TraceMissingError as missing:
        console.print(f"skipped: {missing}", style="yellow")
        return 0
    show(console, result)
    write_json({"openb": result["openb"]})
    return 0
