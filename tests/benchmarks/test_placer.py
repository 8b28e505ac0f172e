"""Where pods go, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.openb.fgd import BestFit, Fgd, FirstFit, PodPolicy, TraceWorkload
from benchmarks.openb.placer import MAX_RANKINGS, Ours, Placer
from benchmarks.openb.pods import Node, Placement, Pod

FRACTION = Pod(1, 40)
WHOLE = Pod(1, 80, whole=True)
POLICIES: dict[str, Callable[[], PodPolicy]] = {
    "first_fit": FirstFit,
    "best_fit": BestFit,
    "fgd": lambda: Fgd(TraceWorkload({FRACTION: 1, WHOLE: 1})),
    "ours": Ours,
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> PodPolicy:
    return POLICIES[request.param]()


def node(name: str, *free: int) -> Node:
    return Node(name, free, (80,) * len(free))


def placed(placement: Placement | None) -> tuple[str, tuple[int, ...]]:
    assert placement is not None
    return placement.node_id, placement.devices


def test_the_ranks_of_a_pod_stay_on_one_node_and_never_share_a_device(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80), node("b", 80, 80)], policy)
    assert placed(placer.place(Pod(2, 20))) == ("b", (0, 1))
    assert Placer([node("a", 80), node("b", 80)], policy).place(Pod(2, 20)) is None


def test_a_whole_device_is_one_nobody_has_anything_of(policy: PodPolicy) -> None:
    placer = Placer([node("a", 79), node("b", 80)], policy)
    placement = placer.place(Pod(1, 10, whole=True))
    assert placement == Placement("b", (0,), (80,))


def test_deciding_takes_nothing_and_what_is_taken_comes_back(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80), node("b", 80)], policy)
    before = placer.nodes()
    placement = placer.place(Pod(2, 30))
    assert placer.nodes() == before
    assert placement is not None
    placer.take(placement)
    assert placer.nodes() != before
    placer.give_back(placement)
    assert placer.nodes() == before


def test_a_placement_that_no_longer_fits_changes_nothing(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80, 80)], policy)
    placement = placer.place(Pod(2, 50))
    assert placement is not None
    placer.take(placement)
    before = placer.nodes()
    with pytest.raises(ValueError, match=r"device"):
        placer.take(placement)
    assert placer.nodes() == before


def test_what_was_not_taken_cannot_be_given_back(policy: PodPolicy) -> None:
    placer = Placer([node("a", 50, 80)], policy)
    before = placer.nodes()
    with pytest.raises(ValueError, match="was not taken"):
        placer.give_back(Placement("a", (0, 1), (30, 1)))
    assert placer.nodes() == before


def test_best_fit_takes_the_node_left_with_least_and_first_fit_the_first() -> None:
    nodes = [node("a", 80), node("b", 50)]
    assert placed(Placer(nodes, BestFit()).place(FRACTION)) == ("b", (0,))
    assert placed(Placer(nodes, FirstFit()).place(FRACTION)) == ("a", (0,))


def test_fgd_fills_a_broken_device_before_it_breaks_a_whole_one() -> None:
    placer = Placer([node("a", 80), node("b", 80, 40)], Fgd(TraceWorkload({FRACTION: 1, WHOLE: 1})))
    assert placed(placer.place(FRACTION)) == ("b", (1,))


def test_ours_goes_by_best_fit_while_nothing_is_known() -> None:
    nodes = [node("a", 80), node("b", 50)]
    assert placed(Placer(nodes, Ours()).place(FRACTION)) == ("b", (0,))


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


def test_a_placement_on_an_unknown_node_changes_nothing(policy: PodPolicy) -> None:
    placer = Placer([node("a", 80)], policy)
    unknown = Placement("b", (0,), (1,))
    with pytest.raises(KeyError):
        placer.take(unknown)
    with pytest.raises(KeyError):
        placer.give_back(unknown)
    assert placer.nodes() == [node("a", 80)]


def test_two_nodes_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Placer([node("a", 80), node("a", 80)], FirstFit())


@pytest.mark.parametrize("free", [((81,), (80,)), ((-1,), (80,)), ((80, 80), (80,))])
def test_a_node_cannot_have_more_free_than_there_is(free: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="node a"):
        Node("a", *free)


def test_a_pod_needs_a_rank_and_its_ranks_an_amount() -> None:
    for ranks, amount in ((1, 0), (0, 1), (-1, 1)):
        with pytest.raises(ValueError, match="Pod"):
            Pod(ranks, amount)


def test_fragment_is_what_the_expected_pods_cannot_use() -> None:
    workload = TraceWorkload({Pod(1, 40): 1, Pod(2, 80, whole=True): 1})
    # half of the pods use the 60 and not the 20; the other half find one whole device and need two
    assert workload.fragment(node("a", 80, 60, 20)) == 160 - (80 + 60) / 2
    assert workload.fragment(node("a", 80, 80)) == 0
