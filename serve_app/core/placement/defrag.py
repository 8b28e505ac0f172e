"""Which replicas to drain and where each restarts so that an engine fits on its node that does not: fewest bytes first.

A step drains one replica and restarts it elsewhere: its old copy is released before the new one is placed, so it may
land on what it leaves. Each replica that leaves the node finds another place in one step; a replica elsewhere is not
moved to make that place (docs/decisions.md).

Invariant: steps fit in order, and after the last one the engine fits; no steps where nothing helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.placement.fragmentation import Free
from serve_app.core.placement.policy import tightest

MAX_SUBSETS = 256  # of the replicas on the node, by bytes: all of them for eight replicas


class Spot(NamedTuple):
    """Devices of a node."""

    node: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine that is placed on one node. `amount`: its bytes on each of its devices."""

    replica_id: str
    spot: Spot
    amount: int

    @property
    def bytes_to_move(self) -> int:
        """What a restart has to load."""
        return self.amount * len(self.spot.devices)


@dataclass(frozen=True, slots=True)
class Move:
    """One step: drain a replica, release what it has, start it at its target."""

    replica: Replica
    target: Spot


def make_room(
    nodes: Mapping[str, Free], movable: Sequence[Replica], node: str, ranks: int, amount: int
) -> tuple[Move, ...]:
    """The steps after which so many ranks of an engine fit on a node.

    Args:
        nodes: bytes free of each device, by node.
        movable: replicas that may be drained.

    Returns:
        None of them when the ranks fit as it is, or when nothing was found that helps.
    """
    enough: list[set[str]] = []
    for leaving in _subsets([replica for replica in movable if replica.spot.node == node]):
        names = {replica.replica_id for replica in leaving}
        if any(fewer <= names for fewer in enough):
            continue
        after = {name: list(free) for name, free in nodes.items()}
        for replica in leaving:
            _take(after, replica.spot, -replica.amount)
        devices = tightest(after.get(node, ()), ranks, amount)  # of a node that has left nothing is known
        if devices is None:
            continue
        enough.append(names)
        _take(after, Spot(node, devices), amount)
        moves = _relocate(nodes, after, leaving)
        if moves is not None:
            return moves
    return ()


def _subsets(replicas: Sequence[Replica]) -> Iterator[tuple[Replica, ...]]:
    """Subsets by bytes, the empty one first, `MAX_SUBSETS` at most."""
    ordered = sorted(replicas, key=lambda replica: (replica.bytes_to_move, replica.replica_id))
    heap: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for _ in range(MAX_SUBSETS):
        if not heap:
            return
        bytes_to_move, chosen = heapq.heappop(heap)
        yield tuple(ordered[index] for index in chosen)
        for index in range(chosen[-1] + 1 if chosen else 0, len(ordered)):  # each subset once: by its members in order
            heapq.heappush(heap, (bytes_to_move + ordered[index].bytes_to_move, (*chosen, index)))


def _relocate(
    nodes: Mapping[str, Free], after: dict[str, list[int]], leaving: Sequence[Replica]
) -> tuple[Move, ...] | None:
    """Where each that leaves restarts, in one step and clear of the engine's place; largest first, the fullest node
    first. `after`: what is free once all have left and the engine is there."""
    now = {name: list(free) for name, free in nodes.items()}
    moves: list[Move] = []
    for replica in sorted(leaving, key=lambda replica: -replica.bytes_to_move):
        _take(now, replica.spot, -replica.amount)
        both = {name: [min(pair) for pair in zip(now[name], after[name], strict=True)] for name in now}
        ranks = len(replica.spot.devices)
        fits = (
            (name, tightest(both[name], ranks, replica.amount)) for name in sorted(both, key=lambda n: sum(both[n]))
        )
        target = next((Spot(name, devices) for name, devices in fits if devices is not None), None)
        if target is None:
            return None
        _take(now, target, replica.amount)
        _take(after, target, replica.amount)
        moves.append(Move(replica, target))
    return tuple(moves)


def _take(free: dict[str, list[int]], spot: Spot, amount: int) -> None:
    for device in spot.devices:
        free[spot.node][device] -= amount
