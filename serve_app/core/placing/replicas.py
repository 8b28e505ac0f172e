"""What a plan moves: replicas, one step of a plan, and the free amounts as steps are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.placing.placement import Demand, Node, Placement, Room


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine that is placed.

    Args:
        replica_id: unique.
        demand: what it needs wherever it is.
        placement: where it is.
        movable: it may be drained and restarted.
        bytes_to_move: what a restart has to load.
    """

    replica_id: str
    demand: Demand
    placement: Placement
    movable: bool
    bytes_to_move: int


@dataclass(frozen=True, slots=True)
class Move:
    """One step: drain a replica, release what it has, start it at its target."""

    replica_id: str
    source: Placement
    target: Placement
    bytes_to_move: int


def rooms_of(nodes: Sequence[Node], replicas: Sequence[Replica]) -> list[Room]:
    """The nodes as rooms.

    Raises:
        ValueError: a replica is on a node that is not there, or has more of it than there is.
    """
    rooms = {node.node_id: Room(node, index) for index, node in enumerate(nodes)}
    unknown = {slot.node_id for replica in replicas for slot in replica.placement.slots} - rooms.keys()
    if unknown:
        raise ValueError(f"replicas are on nodes that are not known: {sorted(unknown)}")
    without = {node.node_id: Room(node) for node in nodes}
    for replica in replicas:
        for slot in replica.placement.slots:
            without[slot.node_id].give_back(slot)
    return list(rooms.values())


def apply(rooms: Mapping[str, Room], move: Move) -> None:
    """Take one step.

    Raises:
        ValueError: the target does not fit; the replica's source is released then.
    """
    for slot in move.source.slots:
        rooms[slot.node_id].give_back(slot)
    for slot in move.target.slots:
        rooms[slot.node_id].take(slot)
