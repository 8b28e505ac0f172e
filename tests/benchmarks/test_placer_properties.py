"""Placement under any order of demands and departures: never over capacity, and a refusal only where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.openb.fgd import BestFit, Fgd, FirstFit, PodPolicy, TraceWorkload, least_fragment
from benchmarks.openb.placer import ByAmounts, Ours, Placer
from benchmarks.openb.pods import Node, Placement, Pod, Room

TOTAL = 4
MODELS = ("A", "B")


@st.composite
def nodes(draw: st.DrawFn, most: int = 3) -> list[Node]:
    """Up to three nodes of up to three devices of four units, partly free."""
    found = []
    for i in range(draw(st.integers(1, most))):
        free = tuple(draw(st.lists(st.integers(0, TOTAL), min_size=1, max_size=3)))
        cpu = draw(st.integers(0, 6))
        memory = draw(st.integers(0, 6))
        model = draw(st.sampled_from(MODELS))
        found.append(Node(f"n{i}", cpu, memory, free, (TOTAL,) * len(free), model))
    return found


@st.composite
def demands(draw: st.DrawFn) -> Pod:
    return Pod(
        ranks=draw(st.integers(0, 3)),
        amount=draw(st.integers(1, TOTAL)),
        groups=draw(st.integers(1, 3)),
        cpu_milli=draw(st.integers(0, 3)),
        memory_bytes=draw(st.integers(0, 3)),
        whole=draw(st.booleans()),
        models=draw(st.frozensets(st.sampled_from(MODELS), max_size=1)),
    )


def policies(known: Sequence[Pod]) -> dict[str, PodPolicy]:
    return {
        "first_fit": FirstFit(),
        "best_fit": BestFit(6, 12),
        "fgd": Fgd(TraceWorkload(dict.fromkeys(known, 1.0))),
        "ours": ByAmounts(Ours(), BestFit(6, 12)),
    }


def fits_somehow(free: list[Node], demand: Pod) -> bool:
    """Every way to put group after group, each rank of the engine on its own device."""

    def rest(groups: int, used: frozenset[tuple[str, int]], load: dict[str, int]) -> bool:
        if groups == 0:
            return True
        for node in free:
            here = load.get(node.node_id, 0) + 1
            if demand.models and node.model not in demand.models:
                continue
            if here * demand.cpu_milli > node.cpu_milli or here * demand.memory_bytes > node.memory_bytes:
                continue
            need = [TOTAL if demand.whole else demand.amount] * demand.ranks
            open_ = [i for i in range(len(node.free)) if (node.node_id, i) not in used]
            for devices in combinations(open_, demand.ranks):
                taken = used | {(node.node_id, i) for i in devices}
                if all(node.free[i] >= n for i, n in zip(devices, need, strict=True)) and rest(
                    groups - 1, taken, load | {node.node_id: here}
                ):
                    return True
        return False

    return rest(demand.groups, frozenset(), {})


def check(before: list[Node], demand: Pod, placement: Placement) -> None:
    by_id = {node.node_id: node for node in before}
    assert len(placement.slots) == demand.groups
    devices = [(slot.node_id, device) for slot in placement.slots for device in slot.devices]
    assert len(set(devices)) == len(devices) == demand.ranks * demand.groups
    for slot in placement.slots:
        node = by_id[slot.node_id]
        assert demand.allows(node.model)
        for device, amount in zip(slot.devices, slot.amounts, strict=True):
            assert amount == (TOTAL if demand.whole else demand.amount) <= node.free[device]
    for name, node in by_id.items():
        here = [slot for slot in placement.slots if slot.node_id == name]
        assert sum(slot.cpu_milli for slot in here) <= node.cpu_milli
        assert sum(slot.memory_bytes for slot in here) <= node.memory_bytes


@pytest.mark.parametrize("name", ["first_fit", "best_fit", "fgd", "ours"])
@settings(deadline=None)
@given(st.data())
def test_a_demand_gets_a_place_exactly_when_there_is_one(name: str, data: st.DataObject) -> None:
    known = data.draw(st.lists(demands(), min_size=1, max_size=4))
    placer = Placer(data.draw(nodes()), policies(known)[name])
    live: list[Placement] = []
    for _ in range(data.draw(st.integers(1, 8))):
        before = placer.nodes()
        if live and data.draw(st.booleans()):
            placer.give_back(live.pop(data.draw(st.integers(0, len(live) - 1))))
            continue
        demand = data.draw(st.sampled_from(known))
        placement = placer.place(demand)
        assert placer.nodes() == before
        assert (placement is not None) == fits_somehow(before, demand)
        if placement is not None:
            check(before, demand, placement)
            placer.take(placement)
            live.append(placement)
        placer.nodes()  # a Node refuses less than nothing and more than all


@settings(deadline=None)
@given(st.data())
def test_everything_given_back_is_what_was_there(data: st.DataObject) -> None:
    placer = Placer(data.draw(nodes()), ByAmounts(Ours(), BestFit(6, 12)))
    before = placer.nodes()
    live = []
    for demand in data.draw(st.lists(demands(), max_size=6)):
        placement = placer.place(demand)
        if placement is not None:
            placer.take(placement)
            live.append(placement)
    for placement in live:
        placer.give_back(placement)
    assert placer.nodes() == before


@pytest.mark.parametrize("make", [lambda known: FirstFit(), lambda known: BestFit(6, 12), lambda known: fgd_of(known)])
@settings(deadline=None)
@given(st.data())
def test_kept_scores_choose_as_fresh_ones_do(make: Callable[[list[Pod]], PodPolicy], data: st.DataObject) -> None:
    known = data.draw(st.lists(demands(), min_size=1, max_size=3))
    placer = Placer(data.draw(nodes(most=5)), make(known))
    for demand in data.draw(st.lists(st.sampled_from(known), max_size=12)):
        placement = placer.place(demand)
        assert placement == Placer(placer.nodes(), make(known)).place(demand)
        if placement is not None:
            placer.take(placement)


def fgd_of(known: list[Pod]) -> PodPolicy:
    return Fgd(TraceWorkload(dict.fromkeys(known, 1.0)))


def fragment_by_definition(node: Node, weights: dict[Pod, float]) -> float:
    """F_n(M) as the paper has it, demand by demand."""
    sum_ = 0.0
    for demand, weight in weights.items():
        wide = [f for f in node.free if f >= demand.amount and (f == TOTAL or not demand.whole)]
        room = node.cpu_milli >= demand.cpu_milli and node.memory_bytes >= demand.memory_bytes
        fits = room and demand.allows(node.model) and demand.ranks > 0 and len(wide) >= demand.ranks
        sum_ += weight * demand.groups * (sum(node.free) - (sum(wide) if fits else 0))
    return sum_ / sum(weight * demand.groups for demand, weight in weights.items())


@given(nodes(most=1), st.dictionaries(demands(), st.floats(0.1, 9), min_size=1, max_size=5))
def test_fragment_is_the_papers(item: list[Node], weights: dict[Pod, float]) -> None:
    fragment = TraceWorkload(weights).fragment(item[0])
    assert fragment == pytest.approx(fragment_by_definition(item[0], weights), abs=1e-9)
    assert -1e-9 <= fragment <= sum(item[0].free) + 1e-9


@given(nodes(most=1), demands(), st.lists(demands(), min_size=1, max_size=4))
def test_the_device_chosen_adds_least_fragment(item: list[Node], demand: Pod, known: list[Pod]) -> None:
    demand = Pod(1, demand.amount, cpu_milli=demand.cpu_milli)
    room = Room(item[0])
    weights = dict.fromkeys(known, 1.0)
    eligible = room.eligible(demand)
    if not eligible or not room.holds(demand):
        return
    score, _ = least_fragment(TraceWorkload(weights), room, demand, eligible)
    increases = []
    for device in eligible:
        after = Room(item[0])
        after.take(after.slot(demand, [device]))
        increases.append(fragment_by_definition(after.as_node(), weights) - fragment_by_definition(item[0], weights))
    assert score == pytest.approx(min(increases), abs=1e-9)
