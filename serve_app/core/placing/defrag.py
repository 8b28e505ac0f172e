"""Which replicas to drain and where each restarts so that a demand fits that does not: fewest bytes moved.

A step drains one replica and restarts it elsewhere: its old copy is released before the new one is placed, so it may
land on what it leaves. Steps run in order, and each fits at its moment.

Two searches:
- `_first_that_works`: what to take off one node, with each drained replica restarted in one step where there is room.
  Quick at any size, and not always the fewest bytes.
- `search` (defrag_search.py): every order of steps by bytes moved, chains and second moves of a replica included, below
  what the first found. When it ends within `MAX_STATES` the plan is the best there is (`exact`), else the best found.

A pipeline's stages stay where Ray has put them: demands and replicas here are of one group.

Invariant: a plan's steps fit in order, and after the last one its placement fits; no plan where nothing helps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serve_app.core.placing.defrag_search import MAX_STATES, search
from serve_app.core.placing.placement import Demand, Node, Placement, Room, Slot
from serve_app.core.placing.placement_policies import tightest
from serve_app.core.placing.replicas import Move, Replica, apply, rooms_of

MAX_SUBSETS = 256  # of the replicas on one node, by bytes: all of them for eight replicas
MAX_EVICTIONS = 64  # tried in full, by bytes: more only where all of them have nowhere to go


@dataclass(frozen=True, slots=True)
class DefragmentationPlan:
    """Steps in order, then where the demand goes. `exact`: no plan moves fewer bytes."""

    moves: tuple[Move, ...]
    placement: Placement
    bytes_to_move: int
    exact: bool


@dataclass(frozen=True, slots=True)
class _Eviction:
    """What leaves so that the demand fits, and where that then goes."""

    bytes_to_move: int
    leaving: tuple[Replica, ...]
    placement: Placement


def plan_defragmentation(
    nodes: Sequence[Node], replicas: Sequence[Replica], demand: Demand, max_states: int = MAX_STATES
) -> DefragmentationPlan | None:
    """The steps that make room for a demand; none when it fits as it is.

    Args:
        nodes: with what is free of them now, beside the replicas.
        replicas: what is placed; those that are not movable stay.
        demand: what is to fit.
        max_states: of the exact search, arrangements looked at.

    Returns:
        None when no order of steps makes it fit, or none was found within the bound.

    Raises:
        ValueError: a replica's placement is not on the nodes given, or the demand is a pipeline's.
    """
    if demand.groups > 1:
        raise ValueError(f"{demand}: nothing is moved for a pipeline")
    movable = [replica for replica in replicas if replica.movable]
    rooms = rooms_of(nodes, movable)
    quick = _first_that_works(rooms, movable, demand)
    limit = None if quick is None else sum(move.bytes_to_move for move in quick[0])
    better, finished = search(rooms, movable, demand, limit, max_states)
    if better is not None:
        moves: tuple[Move, ...] = better
        after = {room.node_id: Room(room.as_node(), room.index) for room in rooms}
        for move in moves:
            apply(after, move)
        placement = _pack(list(after.values()), demand)
        assert placement is not None  # the search ends where the demand fits
    elif quick is not None:
        moves, placement = quick
    else:
        return None
    return DefragmentationPlan(moves, placement, sum(move.bytes_to_move for move in moves), finished)


def _first_that_works(
    rooms: Sequence[Room], movable: Sequence[Replica], demand: Demand
) -> tuple[tuple[Move, ...], Placement] | None:
    """The cheapest eviction whose replicas all find another place in one step each."""
    present = _pack([Room(room.as_node(), room.index) for room in rooms], demand)
    if present is not None:
        return (), present
    evictions = (eviction for room in rooms for eviction in _node_evictions(room, movable, demand))
    for eviction in heapq.nsmallest(MAX_EVICTIONS, evictions, key=lambda e: (e.bytes_to_move, len(e.leaving))):
        moves = _relocate(rooms, eviction)
        if moves is not None:
            return moves, eviction.placement
    return None


def _node_evictions(room: Room, movable: Sequence[Replica], demand: Demand) -> Iterator[_Eviction]:
    """The sets of replicas whose leaving lets the demand onto this node, by bytes; nothing that contains another."""
    if len(room.total) < demand.ranks or not demand.allows(room.model):
        return
    here = [replica for replica in movable if any(slot.node_id == room.node_id for slot in replica.placement.slots)]
    found: list[frozenset[str]] = []
    for bytes_to_move, leaving in _subsets(here):
        names = frozenset(replica.replica_id for replica in leaving)
        if any(smaller <= names for smaller in found):
            continue
        empty = Room(room.as_node(), room.index)
        for replica in leaving:
            for slot in replica.placement.slots:
                if slot.node_id == room.node_id:
                    empty.give_back(slot)
        slot_ = _pack_group(empty, demand)
        if slot_ is not None:
            found.append(names)
            yield _Eviction(bytes_to_move, leaving, Placement((slot_,)))


def _subsets(replicas: Sequence[Replica]) -> Iterator[tuple[int, tuple[Replica, ...]]]:
    """Subsets by bytes, the empty one first, `MAX_SUBSETS` at most."""
    ordered = sorted(replicas, key=lambda replica: (replica.bytes_to_move, replica.replica_id))
    heap: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for _ in range(MAX_SUBSETS):
        if not heap:
            return
        bytes_to_move, chosen = heapq.heappop(heap)
        yield bytes_to_move, tuple(ordered[i] for i in chosen)
        last = chosen[-1] if chosen else -1
        for i in range(last + 1, len(ordered)):  # each subset once: by its members in order
            heapq.heappush(heap, (bytes_to_move + ordered[i].bytes_to_move, (*chosen, i)))


def _relocate(rooms: Sequence[Room], eviction: _Eviction) -> tuple[Move, ...] | None:
    """Where each that leaves restarts, in one step and clear of the demand's place; largest first."""
    now = {room.node_id: Room(room.as_node(), room.index) for room in rooms}
    final = {room.node_id: Room(room.as_node(), room.index) for room in rooms}
    for replica in eviction.leaving:
        for slot in replica.placement.slots:
            final[slot.node_id].give_back(slot)
    for slot in eviction.placement.slots:
        final[slot.node_id].take(slot)
    moves: list[Move] = []
    for replica in sorted(eviction.leaving, key=lambda replica: -replica.demand.amount * replica.demand.ranks):
        for slot in replica.placement.slots:
            now[slot.node_id].give_back(slot)
        both = [_common(now[node_id], final[node_id]) for node_id in now]
        target = _pack(both, replica.demand)
        if target is None:
            return None
        for slot in target.slots:
            now[slot.node_id].take(slot)
            final[slot.node_id].take(slot)
        moves.append(Move(replica.replica_id, replica.placement, target, replica.bytes_to_move))
    return tuple(moves)


def _common(one: Room, other: Room) -> Room:
    """What is free in both: now, and when everything is where it goes."""
    free = tuple(min(pair) for pair in zip(one.free, other.free, strict=True))
    cpu, memory = min(one.cpu, other.cpu), min(one.memory, other.memory)
    return Room(Node(one.node_id, cpu, memory, free, one.total, one.model), one.index)


def _pack(rooms: Sequence[Room], demand: Demand) -> Placement | None:
    """Any place for a demand, the tightest node first."""
    for room in sorted(rooms, key=lambda room: (sum(room.free), room.index)):
        slot = _pack_group(room, demand)
        if slot is not None:
            return Placement((slot,))
    return None


def _pack_group(room: Room, demand: Demand) -> Slot | None:
    return room.slot(demand, tightest(room, demand, room.eligible(demand))) if room.fits(demand) else None
