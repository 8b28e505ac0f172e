"""Where pods go, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.openb.fgd import BestFit, Fgd, FirstFit, PodPolicy, TraceWorkload
from benchmarks.openb.placer import MAX_RANKINGS, ByAmounts, Ours, Placer
from benchmarks.openb.pods import Node, Placement, Pod, Slot

FRACTION = Pod(1, 40, cpu_milli=1)
WHOLE = Pod(1, 80, cpu_milli=1, whole=True)
POLICIES: dict[str, Callable[[], PodPolicy]] = {
    "first_fit": FirstFit,
    "best_fit": lambda: BestFit(100, 160),
    "fgd": lambda: Fgd(TraceWorkload({FRACTION: 1, WHOLE: 1})),
    "ours": lambda: ByAmounts(Ours(), BestFit(100, 160)),
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> PodPolicy:
    return POLICIES[request.param]()


def node(name: str, *free: int, cpu: int = 100, memory: int = 100, model: str = "") -> Node:
    return Node(name, cpu, memory, free, (80,) * len(free), model)


def placed(placement: Placement | None) -> list[tuple[str, tuple[int, ...]]]:
    assert placement is not None
    return [(slot.node_id, slot.devices) for slot in placement.slots]


def test_a_tensor_parallel_group_stays_on_one_node(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80), node("b", 80, 80)], policy)
    assert placed(placer.place(Pod(2, 80))) == [("b", (0, 1))]
    assert Placer([node("a", 80), node("b", 80)], policy).place(Pod(2, 80)) is None


def test_pipeline_stages_may_be_on_different_nodes(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80), node("b", 80, 80)], policy)
    slots = placed(placer.place(Pod(2, 80, groups=2)))
    assert sorted(slots) == [("a", (0, 1)), ("b", (0, 1))]


def test_ranks_of_one_engine_never_share_a_device(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80)], policy)
    assert placer.place(Pod(1, 20, groups=3)) is None
    assert sorted(placed(placer.place(Pod(1, 20, groups=2)))) == [("a", (0,)), ("a", (1,))]


def test_a_whole_device_is_one_nobody_has_anything_of(policy: PodPolicy) -> None:
    placer = Placer([node("a", 79), node("b", 80)], policy)
    placement = placer.place(Pod(1, 10, whole=True))
    assert placed(placement) == [("b", (0,))]
    assert placement is not None
    assert placement.slots[0].amounts == (80,)


def test_deciding_takes_nothing_and_what_is_taken_comes_back(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80), node("b", 80)], policy)
    before = placer.nodes()
    placement = placer.place(Pod(1, 30, groups=2, cpu_milli=3, memory_bytes=4))
    assert placer.nodes() == before
    assert placement is not None
    placer.take(placement)
    assert placer.nodes() != before
    placer.give_back(placement)
    assert placer.nodes() == before


def test_a_placement_that_no_longer_fits_changes_nothing(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80)], policy)
    placement = placer.place(Pod(1, 50, groups=2))
    assert placement is not None
    placer.take(placement)
    before = placer.nodes()
    with pytest.raises(ValueError, match=r"device"):
        placer.take(placement)
    assert placer.nodes() == before


def test_what_was_not_taken_cannot_be_given_back(policy: PodPolicy) -> None:
    placer = Placer([node("a", 50), node("b", 80)], policy)
    wrong = Placement((Slot("a", (0,), (30,), 1, 0), Slot("b", (0,), (1,), 1, 0)))
    before = placer.nodes()
    with pytest.raises(ValueError, match="was not taken"):
        placer.give_back(wrong)
    assert placer.nodes() == before


def test_models_cpu_and_memory_are_constraints(policy: PodPolicy) -> None:
    nodes = [node("old", 80, model="P100"), node("busy", 80, cpu=1, model="H100"), node("free", 80, model="H100")]
    placer = Placer(nodes, policy)
    demand = Pod(1, 10, cpu_milli=2, memory_bytes=2, models=frozenset({"H100"}))
    assert placed(placer.place(demand)) == [("free", (0,))]


def test_best_fit_takes_the_node_left_with_least_and_first_fit_the_first() -> None:
    nodes = [node("a", 80), node("b", 50)]
    assert placed(Placer(nodes, BestFit(100, 80)).place(FRACTION)) == [("b", (0,))]
    assert placed(Placer(nodes, FirstFit()).place(FRACTION)) == [("a", (0,))]


def test_fgd_fills_a_broken_device_before_it_breaks_a_whole_one() -> None:
    placer = Placer([node("a", 80), node("b", 80, 40)], Fgd(TraceWorkload({FRACTION: 1, WHOLE: 1})))
    assert placed(placer.place(FRACTION)) == [("b", (1,))]


def test_ours_goes_by_best_fit_while_nothing_is_known() -> None:
    nodes = [node("a", 80), node("b", 50)]
    assert placed(Placer(nodes, ByAmounts(Ours(), BestFit(100, 80))).place(FRACTION)) == [("b", (0,))]


def test_a_demand_asked_for_again_sees_what_changed_since(policy: PodPolicy) -> None:
    placer = Placer([node(f"n{i}", 80) for i in range(5)], policy)
    for _ in range(5):
        placement = placer.place(WHOLE)
        assert placement is not None
        placer.take(placement)
    assert placer.place(WHOLE) is None
    placer.give_back(placement)
    assert placer.place(WHOLE) == placement


def test_scores_are_kept_for_a_bounded_number_of_demands() -> None:
    placer = Placer([node("a", 80)], FirstFit())
    for amount in range(1, MAX_RANKINGS + 50):
        placer.place(Pod(1, amount))
    assert len(placer.rankings) == MAX_RANKINGS


def test_a_node_that_came_gets_what_fits_nowhere_else(policy: PodPolicy) -> None:
    placer = Placer([node("a", 40)], policy)
    assert placer.place(WHOLE) is None
    placer.add_node(node("b", 80))
    assert placed(placer.place(WHOLE)) == [("b", (0,))]
    assert [each.node_id for each in placer.nodes()] == ["a", "b"]


def test_a_placement_on_an_unknown_node_changes_nothing(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80)], policy)
    known = placer.place(FRACTION)
    assert known is not None
    unknown = Placement((*known.slots, Slot("b", (0,), (1,), 1, 0)))
    with pytest.raises(KeyError):
        placer.take(unknown)
    assert placer.nodes() == [node("a", 80)]
    placer.take(known)
    before = placer.nodes()
    with pytest.raises(KeyError):
        placer.give_back(unknown)
    assert placer.nodes() == before


def test_two_nodes_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Placer([node("a", 80), node("a", 80)], FirstFit())


@pytest.mark.parametrize("free", [((81,), (80,)), ((-1,), (80,)), ((80, 80), (80,))])
def test_a_node_cannot_have_more_free_than_there_is(free: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="node a"):
        Node("a", 1, 1, *free)


def test_a_demand_needs_a_group_and_its_ranks_an_amount() -> None:
    for wrong in ({"ranks": 1, "amount": 0}, {"ranks": 1, "amount": 1, "groups": 0}, {"ranks": -1, "amount": 1}):
        with pytest.raises(ValueError, match="Pod"):
            Pod(**wrong)


def test_fragment_is_what_the_expected_demands_cannot_use() -> None:
    workload = TraceWorkload({Pod(1, 40, cpu_milli=1): 1, Pod(2, 80, cpu_milli=1, whole=True): 1})
    # half of the demands use the 60 and not the 20; the other half find one whole device and need two
    assert workload.fragment(node("a", 80, 60, 20)) == 160 - (80 + 60) / 2
    assert workload.fragment(node("a", 80, 80)) == 0
    assert workload.fragment(node("a", 80, 80, cpu=0)) == 160
