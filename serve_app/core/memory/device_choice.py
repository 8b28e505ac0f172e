"""Choice of devices for an engine, among those its ranks can use.

Invariant: two ranks of an engine are never on one device, and each rank gets at least `least_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter

from serve_app.core.memory.leases import Hold
from serve_app.core.memory.reports import EngineReport
from serve_app.core.placement import Demand, PlacementPolicy
from serve_app.errors import InsufficientMemory


def unplaced_demands(report: EngineReport) -> list[Demand]:
    """The ranks of an engine without a fixed device, one demand per node."""
    ranks = Counter(rank.node for rank in report.ranks if rank.device is None)
    return [Demand(count, report.wanted_bytes) for count in ranks.values()]


def usable_devices(report: EngineReport, free: dict[str, int]) -> list[str]:
    """Keys of the devices that an engine can use."""
    fixed = {f"{rank.node}/{rank.device}" for rank in report.ranks if rank.device is not None}
    nodes = {rank.node for rank in report.ranks if rank.device is None}
    return [key for key in free if key in fixed or key.rpartition("/")[0] in nodes]


def choose_devices(report: EngineReport, free: dict[str, int], policy: PlacementPolicy) -> list[Hold]:
    """A device for each rank, and the same bytes on all: the wanted amount, or what is free down to the least.

    Raises:
        InsufficientMemory: names the node or device and the missing amount.
    """
    chosen = {index: f"{rank.node}/{rank.device}" for index, rank in enumerate(report.ranks) if rank.device is not None}
    for key in chosen.values():
        if free.get(key, -1) < report.least_bytes:
            raise InsufficientMemory(_shortage(report, key, free.get(key)))
    for node in {rank.node for rank in report.ranks if rank.device is None}:
        ranks = [index for index, rank in enumerate(report.ranks) if rank.node == node and rank.device is None]
        there = {key: free[key] for key in free if key.rpartition("/")[0] == node and key not in chosen.values()}
        devices = best_devices(len(ranks), report.wanted_bytes, report.least_bytes, there, (node,), policy)
        if devices is None:
            where = f"{len(ranks)} devices of {node}" if len(ranks) > 1 else f"any device of {node}"
            raise InsufficientMemory(_shortage(report, where, max(there.values(), default=None)))
        chosen |= dict(zip(ranks, devices, strict=True))
    amount = min(report.wanted_bytes, *(free[key] for key in chosen.values()))
    return [Hold(chosen[index], amount) for index in range(len(report.ranks))]


def best_devices(
    ranks: int, wanted: int, least: int, free: Mapping[str, int], nodes: Sequence[str], policy: PlacementPolicy
) -> list[str] | None:
    """Devices for the ranks of an engine on one of these nodes: the policy's choice for the wanted bytes, else those
    with most free; None: too few have the least.

    Args:
        nodes: one, if there are several ranks.
    """
    by_node: dict[str, list[str]] = {node: [] for node in nodes}
    for key in free:
        node = key.rpartition("/")[0]
        if node in by_node:
            by_node[node].append(key)
    choices = [
        (found[0], [keys[index] for index in found[1]])
        for keys in by_node.values()
        if (found := policy.choose([free[key] for key in keys], ranks, wanted)) is not None
    ]
    if choices:
        return min(choices, key=itemgetter(0))[1]
    enough = (key for keys in by_node.values() for key in keys if free[key] >= least)
    most = sorted(enough, key=lambda key: -free[key])[:ranks]
    return most if len(most) == ranks else None


def _shortage(report: EngineReport, where: str, free: int | None) -> str:
    if free is None:
        return f"{where} is not known"
    return f"{where}: at least {report.least_bytes} bytes needed, {max(0, free)} free"
