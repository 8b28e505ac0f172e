"""Choice of devices for an engine, among those its ranks can use.

Invariant: two ranks of an engine are never on one device, and each rank gets at least `least_bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from serve_app.core.memory.leases import Hold
from serve_app.core.placement import Demand, PlacementPolicy
from serve_app.errors import InsufficientMemory

if TYPE_CHECKING:
    from serve_app.core.memory.reports import EngineReport


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
        keys = [key for key in free if key.rpartition("/")[0] == node and key not in chosen.values()]
        devices = _best_on_node(report, len(ranks), [free[key] for key in keys], policy)
        if devices is None:
            where = f"{len(ranks)} devices of {node}" if len(ranks) > 1 else f"any device of {node}"
            raise InsufficientMemory(_shortage(report, where, max((free[key] for key in keys), default=None)))
        chosen |= {index: keys[device] for index, device in zip(ranks, devices, strict=True)}
    amount = min(report.wanted_bytes, *(free[key] for key in chosen.values()))
    return [Hold(chosen[index], amount) for index in range(len(report.ranks))]


def best_device(
    wanted_bytes: int, least_bytes: int, free: Mapping[str, int], nodes: Sequence[str], policy: PlacementPolicy
) -> Hold | None:
    """A device of any of these nodes for an engine of one rank: the policy's choice for the wanted amount, else the
    device with most free; None: none has the least."""
    by_node: dict[str, list[str]] = {}
    for key in free:
        by_node.setdefault(key.rpartition("/")[0], []).append(key)
    best: tuple[float, str] | None = None
    for node in (node for node in nodes if node in by_node):
        found = policy.choose([free[key] for key in by_node[node]], 1, wanted_bytes)
        if found is not None and (best is None or found[0] < best[0]):
            best = (found[0], by_node[node][found[1][0]])
    if best is not None:
        return Hold(best[1], wanted_bytes)
    keys = [key for node in nodes for key in by_node.get(node, ())]
    most = max(keys, key=lambda key: free[key], default=None)
    return Hold(most, free[most]) if most is not None and free[most] >= least_bytes else None


def _best_on_node(report: EngineReport, ranks: int, free: list[int], policy: PlacementPolicy) -> tuple[int, ...] | None:
    """The devices for `ranks` ranks on one node: the policy's choice for the wanted amount, else those with most free;
    None: too few have the least."""
    found = policy.choose(free, ranks, report.wanted_bytes)
    if found is not None:
        return found[1]
    most = sorted((index for index, left in enumerate(free) if left >= report.least_bytes), key=lambda i: -free[i])
    return tuple(most[:ranks]) if len(most) >= ranks else None


def _shortage(report: EngineReport, where: str, free: int | None) -> str:
    if free is None:
        return f"{where} is not known"
    return f"{where}: at least {report.least_bytes} bytes needed, {max(0, free)} free"
