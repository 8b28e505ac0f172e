"""Defragmentation: which replicas to drain, and where each restarts, so that an engine fits on a node; fewest bytes.

A step drains one replica and restarts it elsewhere. The memory of its old copy is released before the new one is
placed, so the new one may use it. Each replica that leaves the node is placed elsewhere in one step; no replica of
another node is moved for that (docs/decisions.md).

Invariant: each step fits in order, and after the last one the engine fits; no steps if no plan is found.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.placement.fragmentation import FreeBytes
from serve_app.core.placement.policy import tightest_fit

MAX_SUBSETS = 256  # of the replicas on the node, by bytes: all of them for eight replicas


class NodeDevices(NamedTuple):
    """Devices of a node."""

    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """An engine replica on one node. `amount`: its bytes on each of its devices."""

    replica_id: str
    location: NodeDevices
    amount: int

    @property
    def bytes_to_move(self) -> int:
        """The bytes that a restart loads."""
        return self.amount * len(self.location.devices)


@dataclass(frozen=True, slots=True)
class Move:
    """One step: drain a replica, release its memory, start it at its target."""

    replica: PlacedReplica
    target: NodeDevices


def plan_moves(
    nodes: Mapping[str, FreeBytes], movable: Sequence[PlacedReplica], node: str, ranks: int, amount: int
) -> tuple[Move, ...]:
    """The steps after which `ranks` ranks of an engine, with `amount` bytes each, fit on a node.

    Args:
        nodes: free bytes of each device, by node.
        movable: replicas that may be drained.

    Returns:
        No steps if the ranks fit already, or if no plan is found.
    """
    enough: list[set[str]] = []
    for leaving in _subsets([replica for replica in movable if replica.location.node == node]):
        names = {replica.replica_id for replica in leaving}
        if any(fewer <= names for fewer in enough):
            continue
        after = {name: list(free) for name, free in nodes.items()}
        for replica in leaving:
            _take(after, replica.location, -replica.amount)
        devices = tightest_fit(after.get(node, ()), ranks, amount)  # a node that has left has no entry
        if devices is None:
            continue
        enough.append(names)
        _take(after, NodeDevices(node, devices), amount)
        moves = _relocate(nodes, after, leaving)
        if moves is not None:
            return moves
    return ()


def _subsets(replicas: Sequence[PlacedReplica]) -> Iterator[tuple[PlacedReplica, ...]]:
    """Subsets by bytes to move, the empty one first, at most `MAX_SUBSETS`."""
    ordered = sorted(replicas, key=lambda replica: (replica.bytes_to_move, replica.replica_id))
    heap: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for _ in range(MAX_SUBSETS):
        if not heap:
            return
        bytes_to_move, chosen = heapq.heappop(heap)
        yield tuple(ordered[index] for index in chosen)
        for index in range(chosen[-1] + 1 if chosen else 0, len(ordered)):  # members in rising order: each subset once
            heapq.heappush(heap, (bytes_to_move + ordered[index].bytes_to_move, (*chosen, index)))


def _relocate(
    nodes: Mapping[str, FreeBytes], after: dict[str, list[int]], leaving: Sequence[PlacedReplica]
) -> tuple[Move, ...] | None:
    """A target for each leaving replica, in one step and clear of the engine's devices; largest replica first, fullest
    node first. `after`: free bytes when all have left and the engine is placed."""
    now = {name: list(free) for name, free in nodes.items()}
    moves: list[Move] = []
    for replica in sorted(leaving, key=lambda replica: -replica.bytes_to_move):
        _take(now, replica.location, -replica.amount)
        both = {name: [min(pair) for pair in zip(now[name], after[name], strict=True)] for name in now}
        ranks = len(replica.location.devices)
        fits = (
            (name, tightest_fit(both[name], ranks, replica.amount)) for name in sorted(both, key=lambda n: sum(both[n]))
        )
        target = next((NodeDevices(name, devices) for name, devices in fits if devices is not None), None)
        if target is None:
            return None
        _take(now, target, replica.amount)
        _take(after, target, replica.amount)
        moves.append(Move(replica, target))
    return tuple(moves)


def _take(free: dict[str, list[int]], location: NodeDevices, amount: int) -> None:
    for device in location.devices:
        free[location.node][device] -= amount
