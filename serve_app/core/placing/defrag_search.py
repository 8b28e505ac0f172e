"""The steps that make room for a demand with fewest bytes, by looking at every arrangement in the order of bytes moved.

Uniform-cost search (Dijkstra) over arrangements: where every movable replica is. A step moves one of them to any place
it fits once its old copy is released. Arrangements that differ only in which of several untouched things alike was
taken (empty nodes of one shape, devices nobody has anything of) count once.

Invariant: when it ends by itself, no order of steps below the limit makes the demand fit, or the one returned moves
fewest bytes, and among those has fewest steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations

from serve_app.core.placing.placement import Demand, Placement, Room
from serve_app.core.placing.replicas import Move, Replica

MAX_STATES = 20_000  # arrangements generated: about a second, and all there are for six replicas on four small nodes
SMALL = 6  # movable replicas; beyond it an arrangement costs more in proportion, and as many fewer are looked at

_State = tuple[Placement, ...]  # of the movable replicas, in their order
_Step = tuple[int, Placement]  # which replica, and where it goes


def search(
    rooms: Sequence[Room], movable: Sequence[Replica], demand: Demand, limit: int | None, max_states: int = MAX_STATES
) -> tuple[tuple[Move, ...] | None, bool]:
    """The cheapest order of steps that moves fewer than `limit` bytes.

    Returns:
        The steps, None when there are none, and whether that is certain: False when `max_states` was reached first.
    """
    start: _State = tuple(replica.placement for replica in movable)
    empty = [Room(room.as_node(), room.index) for room in rooms]
    _each(empty, start, take=False)
    costs: dict[_State, tuple[int, int]] = {start: (0, 0)}
    came_from: dict[_State, tuple[_State, int]] = {}
    heap: list[tuple[int, int, int, _State]] = [(0, 0, 0, start)]
    generated, most = 0, max_states * SMALL // max(SMALL, len(movable))
    while heap:
        bytes_moved, steps, _, state = heapq.heappop(heap)
        if (bytes_moved, steps) > costs[state]:
            continue
        now = [Room(room.as_node(), room.index) for room in empty]
        _each(now, state, take=True)
        if any(room.fits(demand) for room in now):
            return _moves(movable, state, came_from), True
        for which, target in _steps(now, movable, state, None if limit is None else limit - bytes_moved):
            after = (*state[:which], target, *state[which + 1 :])
            cost = (bytes_moved + movable[which].bytes_to_move, steps + 1)
            if cost < costs.get(after, (cost[0] + 1, 0)):
                generated += 1
                if generated > most:
                    return None, False
                costs[after], came_from[after] = cost, (state, which)
                heapq.heappush(heap, (*cost, generated, after))
    return None, True


def _each(rooms: Sequence[Room], placements: Sequence[Placement], *, take: bool) -> None:
    by_id = {room.node_id: room for room in rooms}
    for placement in placements:
        for slot in placement.slots:
            if take:
                by_id[slot.node_id].take(slot)
            else:
                by_id[slot.node_id].give_back(slot)


def _steps(now: Sequence[Room], movable: Sequence[Replica], state: _State, below: int | None) -> Iterator[_Step]:
    """Every replica that may still move for fewer bytes than `below`, to every place it fits."""
    for which, replica in enumerate(movable):
        if below is not None and replica.bytes_to_move >= below:
            continue
        rooms = [Room(room.as_node(), room.index) for room in now]
        _each(rooms, [state[which]], take=False)
        settled = {slot.node_id for other in state for slot in other.slots}
        for target in _targets(rooms, replica.demand, settled):
            if target != state[which]:
                yield which, target


def _targets(rooms: Sequence[Room], demand: Demand, settled: set[str]) -> Iterator[Placement]:
    """Every place for a demand, nodes nobody movable is on counted once for each shape."""
    shapes: set[tuple[object, ...]] = set()
    for room in rooms:
        shape = (room.cpu, room.memory, tuple(room.free), room.total, room.model)
        if room.node_id not in settled:
            if shape in shapes:
                continue
            shapes.add(shape)
        if room.holds(demand):
            for devices in _devices(room, demand):
                yield Placement((room.slot(demand, devices),))


def _devices(room: Room, demand: Demand) -> Iterator[tuple[int, ...]]:
    """Every choice of devices for one group, those nobody has anything of by their order."""
    eligible = room.eligible(demand)
    untouched = [i for i in eligible if room.free[i] == room.total[i]]
    for devices in combinations(eligible, demand.ranks):
        fresh = [i for i in devices if i in untouched]
        alike = {room.total[i] for i in untouched}
        if len(alike) > 1 or fresh == untouched[: len(fresh)]:
            yield devices


def _moves(movable: Sequence[Replica], last: _State, came_from: dict[_State, tuple[_State, int]]) -> tuple[Move, ...]:
    """The steps to an arrangement, first to last."""
    moves: list[Move] = []
    state = last
    while state in came_from:
        before, which = came_from[state]
        replica = movable[which]
        moves.append(Move(replica.replica_id, before[which], state[which], replica.bytes_to_move))
        state = before
    return tuple(reversed(moves))
