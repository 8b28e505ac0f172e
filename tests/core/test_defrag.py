"""Plans that make room: every step fits when it is taken, and small ones move no more bytes than any order of steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.core.placing.defrag import plan_defragmentation
from serve_app.core.placing.placement import Demand, Node, Placement, Room, Slot
from serve_app.core.placing.replicas import Move, Replica, apply


def node(name: str, *free: int, total: int = 80, cpu: int = 100) -> Node:
    return Node(name, cpu, 1000, free, (total,) * len(free))


def replica(name: str, on: str, device: int, amount: int, bytes_to_move: int, movable: bool = True) -> Replica:
    demand = Demand(1, amount, cpu_milli=1)
    placed = Placement((Slot(on, (device,), (amount,), 1, 0),))
    return Replica(name, demand, placed, movable, bytes_to_move)


def test_two_halves_on_two_devices_make_a_whole_one() -> None:
    nodes = [node("a", 50, 50)]
    replicas = [replica("large", "a", 0, 30, 9), replica("small", "a", 1, 30, 5)]
    plan = plan_defragmentation(nodes, replicas, Demand(1, 80, whole=True))
    assert plan is not None
    assert [move.replica_id for move in plan.moves] == ["small"]
    assert plan.moves[0].target.slots[0].devices == (0,)
    assert plan.placement.slots[0].devices == (1,)
    assert plan.exact


def test_a_replica_that_may_not_move_stays() -> None:
    nodes = [node("a", 50, 50)]
    replicas = [replica("fixed", "a", 1, 30, 5, movable=False), replica("free", "a", 0, 30, 9)]
    plan = plan_defragmentation(nodes, replicas, Demand(1, 80, whole=True))
    assert plan is not None
    assert [move.replica_id for move in plan.moves] == ["free"]


def test_there_is_no_plan_where_nothing_would_help() -> None:
    nodes = [node("a", 20, 20)]
    replicas = [replica("x", "a", 0, 60, 1), replica("y", "a", 1, 60, 1)]
    assert plan_defragmentation(nodes, replicas, Demand(1, 80, whole=True)) is None


def test_what_fits_as_it_is_needs_no_step() -> None:
    plan = plan_defragmentation([node("a", 50, 50)], [replica("x", "a", 0, 30, 1)], Demand(1, 40))
    assert plan is not None
    assert plan.moves == ()
    assert plan.bytes_to_move == 0


def test_a_chain_of_steps_is_found_where_one_has_no_room() -> None:
    # the demand wants "a"; "x" has room only on "b", and only once "y" has left "b" for "c"
    nodes = [Node("a", 9, 9, (20,), (80,), "wanted"), node("b", 50), node("c", 30)]
    replicas = [replica("x", "a", 0, 60, 1), replica("y", "b", 0, 30, 1), replica("z", "c", 0, 50, 9, movable=False)]
    plan = plan_defragmentation(nodes, replicas, Demand(1, 80, whole=True, models=frozenset({"wanted"})))
    assert plan is not None
    assert [move.replica_id for move in plan.moves] == ["y", "x"]
    assert plan.exact
    assert_executable(nodes, plan.moves, plan.placement)


def test_nothing_is_moved_for_a_pipeline() -> None:
    with pytest.raises(ValueError, match="pipeline"):
        plan_defragmentation([node("a", 50)], [replica("x", "a", 0, 30, 1)], Demand(1, 80, groups=2, whole=True))


def test_a_large_cluster_gets_a_plan_within_the_bound() -> None:
    nodes = [node(f"n{i}", 40, 40) for i in range(200)]
    replicas = [replica(f"r{i}.{d}", f"n{i}", d, 40, 10 + i) for i in range(200) for d in (0, 1)]
    plan = plan_defragmentation(nodes, replicas, Demand(2, 80, whole=True), max_states=100)
    assert plan is not None
    assert not plan.exact
    assert plan.bytes_to_move == 20
    assert_executable(nodes, plan.moves, plan.placement)


def assert_executable(nodes: list[Node], moves: Sequence[Move], placement: Placement) -> None:
    rooms = {each.node_id: Room(each) for each in nodes}
    for move in moves:
        apply(rooms, move)
    for slot in placement.slots:
        rooms[slot.node_id].take(slot)
    devices = [(slot.node_id, device) for slot in placement.slots for device in slot.devices]
    assert len(set(devices)) == len(devices)


@st.composite
def small_clusters(draw: st.DrawFn) -> tuple[list[Node], list[Replica], Demand]:
    """Up to three nodes of two devices of 4 units, up to five replicas of 1 to 3 units."""
    size = draw(st.integers(1, 3))
    free = {f"n{i}": [4, 4] for i in range(size)}
    cpu = {f"n{i}": draw(st.integers(2, 6)) for i in range(size)}
    replicas = []
    for i in range(draw(st.integers(0, 5))):
        name, device, amount = draw(st.sampled_from(sorted(free))), draw(st.integers(0, 1)), draw(st.integers(1, 3))
        if free[name][device] >= amount and cpu[name] >= 1:
            free[name][device] -= amount
            cpu[name] -= 1
            replicas.append(replica(f"r{i}", name, device, amount, draw(st.integers(1, 4)), draw(st.booleans())))
    nodes = [Node(name, cpu[name], 0, tuple(free[name]), (4, 4)) for name in free]
    ranks, whole = draw(st.integers(1, 2)), draw(st.booleans())
    demand = Demand(ranks, draw(st.integers(1, 4)), cpu_milli=draw(st.integers(0, 3)), whole=whole)
    return nodes, replicas, demand


def fewest_bytes(nodes: list[Node], replicas: list[Replica], demand: Demand) -> int | None:
    """Dijkstra over all arrangements of one-rank replicas, written apart from the code under test."""
    movable = [r for r in replicas if r.movable]
    empty = {n.node_id: [n.cpu_milli, list(n.free)] for n in nodes}
    for r in movable:
        slot = r.placement.slots[0]
        empty[slot.node_id][0] += 1  # type: ignore[operator]
        empty[slot.node_id][1][slot.devices[0]] += r.demand.amount  # type: ignore[index]

    def left(state: tuple[tuple[str, int], ...]) -> dict[str, tuple[int, list[int]]]:
        rooms = {name: (cpu, list(free)) for name, (cpu, free) in empty.items()}  # type: ignore[call-overload, misc]
        for r, (name, device) in zip(movable, state, strict=True):
            rooms[name] = (rooms[name][0] - 1, rooms[name][1])
            rooms[name][1][device] -= r.demand.amount
        return rooms

    def legal(state: tuple[tuple[str, int], ...]) -> bool:
        return all(cpu >= 0 and min(free) >= 0 for cpu, free in left(state).values())

    def fits(state: tuple[tuple[str, int], ...]) -> bool:
        need = 4 if demand.whole else demand.amount
        return any(
            cpu >= demand.cpu_milli
            and any(min(free[d] for d in ds) >= need for ds in combinations((0, 1), demand.ranks))
            for cpu, free in left(state).values()
        )

    start = tuple((r.placement.slots[0].node_id, r.placement.slots[0].devices[0]) for r in movable)
    order, best = count(), {start: 0}
    heap = [(0, next(order), start)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if fits(state):
            return cost
        for i, r in enumerate(movable):
            for target in [(name, d) for name in empty for d in (0, 1)]:
                after = (*state[:i], target, *state[i + 1 :])
                if legal(after) and cost + r.bytes_to_move < best.get(after, 10**9):
                    best[after] = cost + r.bytes_to_move
                    heapq.heappush(heap, (best[after], next(order), after))
    return None


@settings(deadline=None)
@given(small_clusters())
def test_every_step_fits_and_no_order_of_steps_moves_fewer_bytes(
    case: tuple[list[Node], list[Replica], Demand],
) -> None:
    nodes, replicas, demand = case
    plan = plan_defragmentation(nodes, replicas, demand)
    best = fewest_bytes(nodes, replicas, demand)
    if plan is None:
        assert best is None
        return
    assert plan.exact
    assert plan.bytes_to_move == sum(move.bytes_to_move for move in plan.moves) == best
    assert {move.replica_id for move in plan.moves} <= {r.replica_id for r in replicas if r.movable}
    assert_executable(nodes, plan.moves, plan.placement)


@settings(deadline=None)
@given(small_clusters())
def test_the_quick_search_alone_gives_steps_that_fit(case: tuple[list[Node], list[Replica], Demand]) -> None:
    nodes, replicas, demand = case
    plan = plan_defragmentation(nodes, replicas, demand, max_states=0)
    if plan is not None:
        assert plan.bytes_to_move >= (fewest_bytes(nodes, replicas, demand) or 0)
        assert_executable(nodes, plan.moves, plan.placement)
