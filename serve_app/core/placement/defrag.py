"""Defragmentation: which replicas to drain, and where each restarts, so that an engine fits on a node; fewest bytes.

A step drains one replica and restarts it elsewhere. The memory of its old copy is released before the new one is
placed, so the new one may use it. Each replica that leaves the node is placed elsewhere in one step; no replica of
another node is moved for that (docs/decisions.md).

Invariant: each step fits in order, and after the last one the engine fits; no steps if no plan is found.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.placement.policy import tightest_fit

MAX_SUBSETS = 256  # of the replicas on the node, by bytes: all of them for eight replicas


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """An engine replica on one node. `devices`: their keys, `node/index`; `amount`: its bytes on each."""

    replica_id: str
    devices: tuple[str, ...]
    amount: int

    @property
    def bytes_to_move(self) -> int:
        """The bytes that a restart loads."""
        return self.amount * len(self.devices)


@dataclass(frozen=True, slots=True)
class Move:
    """One step: drain a replica, release its memory, start it on its target devices."""

    replica: PlacedReplica
    target: tuple[str, ...]


def plan_moves(
    free: Mapping[str, int], movable: Sequence[PlacedReplica], node: str, ranks: int, amount: int
) -> tuple[Move, ...]:
    """The steps after which `ranks` ranks of an engine, with `amount` bytes each, fit on a node.

    Args:
        free: free bytes by device key.
        movable: replicas that may be drained.

    Returns:
        No steps if the ranks fit already, or if no plan is found.
    """
    nodes: dict[str, list[str]] = {}
    for key in free:
        nodes.setdefault(key.rpartition("/")[0], []).append(key)
    there = set(nodes.get(node, ()))  # a node that has left has no devices
    enough: list[set[str]] = []
    for leaving in _subsets([replica for replica in movable if there.issuperset(replica.devices)]):
        names = {replica.replica_id for replica in leaving}
        if any(fewer <= names for fewer in enough):
            continue
        after = dict(free)
        for replica in leaving:
            _take(after, replica.devices, -replica.amount)
        devices = _fit(after, nodes.get(node, ()), ranks, amount)
        if devices is None:
            continue
        enough.append(names)
        _take(after, devices, amount)
        moves = _relocate(nodes.values(), dict(free), after, leaving)
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
    nodes: Collection[Sequence[str]], now: dict[str, int], after: dict[str, int], leaving: Sequence[PlacedReplica]
) -> tuple[Move, ...] | None:
    """A target for each leaving replica, in one step and clear of the engine's devices; largest replica first, fullest
    node first. `after`: free bytes when all have left and the engine is placed."""
    moves: list[Move] = []
    for replica in sorted(leaving, key=lambda replica: -replica.bytes_to_move):
        _take(now, replica.devices, -replica.amount)
        both = {key: min(now[key], after[key]) for key in now}
        fullest_first = sorted(nodes, key=lambda keys: sum(both[key] for key in keys))
        fits = (_fit(both, keys, len(replica.devices), replica.amount) for keys in fullest_first)
        target = next((devices for devices in fits if devices is not None), None)
        if target is None:
            return None
        _take(now, target, replica.amount)
        _take(after, target, replica.amount)
        moves.append(Move(replica, target))
    return tuple(moves)


def _fit(free: Mapping[str, int], keys: Sequence[str], ranks: int, amount: int) -> tuple[str, ...] | None:
    """`tightest_fit` on these devices."""
    found = tightest_fit([free[key] for key in keys], ranks, amount)
    return None if found is None else tuple(keys[index] for index in found)


def _take(free: dict[str, int], devices: Sequence[str], amount: int) -> None:
    for key in devices:
        free[key] -= amount
