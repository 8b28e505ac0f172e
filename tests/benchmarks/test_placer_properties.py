"""Placement under any order of demands and departures: never over capacity, and a refusal only where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.openb.fgd import BestFit, Fgd, FirstFit, PodPolicy, TraceWorkload
from benchmarks.openb.placer import Ours, Placer
from benchmarks.openb.pods import Node, Placement, Pod, Room

TOTAL = 4


@st.composite
def nodes(draw: st.DrawFn, most: int = 3) -> list[Node]:
    """Up to three nodes of up to three devices of four units, partly free."""
    found = []
    for i in range(draw(st.integers(1, most))):
        free = tuple(draw(st.lists(st.integers(0, TOTAL), min_size=1, max_size=3)))
        found.append(Node(f"n{i}", free, (TOTAL,) * len(free)))
    return found


def pods() -> st.SearchStrategy[Pod]:
    return st.builds(Pod, st.integers(1, 3), st.integers(1, TOTAL), st.booleans())


def policies(known: Sequence[Pod]) -> dict[str, PodPolicy]:
    return {"first_fit": FirstFit(), "best_fit": BestFit(), "fgd": fgd_of(known), "ours": Ours()}


def need_of(pod: Pod) -> int:
    return TOTAL if pod.whole else pod.amount


def fits_somehow(free: list[Node], pod: Pod) -> bool:
    """Whether some node has as many devices with enough as the pod has ranks."""
    return any(sum(have >= need_of(pod) for have in node.free) >= pod.ranks for node in free)


def check(before: list[Node], pod: Pod, placement: Placement) -> None:
    node = next(one for one in before if one.node_id == placement.node_id)
    assert len(set(placement.devices)) == len(placement.devices) == pod.ranks
    for device, amount in zip(placement.devices, placement.amounts, strict=True):
        assert amount == need_of(pod) <= node.free[device]


@pytest.mark.parametrize("name", ["first_fit", "best_fit", "fgd", "ours"])
@settings(deadline=None)
@given(st.data())
def test_a_pod_gets_a_place_exactly_when_there_is_one(name: str, data: st.DataObject) -> None:
    known = data.draw(st.lists(pods(), min_size=1, max_size=4))
    placer = Placer(data.draw(nodes()), policies(known)[name])
    live: list[Placement] = []
    for _ in range(data.draw(st.integers(1, 8))):
        before = placer.nodes()
        if live and data.draw(st.booleans()):
            placer.give_back(live.pop(data.draw(st.integers(0, len(live) - 1))))
            continue
        pod = data.draw(st.sampled_from(known))
        placement = placer.place(pod)
        assert placer.nodes() == before
        assert (placement is not None) == fits_somehow(before, pod)
        if placement is not None:
            check(before, pod, placement)
            placer.take(placement)
            live.append(placement)
        placer.nodes()  # a Node refuses less than nothing and more than all


@settings(deadline=None)
@given(st.data())
def test_everything_given_back_is_what_was_there(data: st.DataObject) -> None:
    placer = Placer(data.draw(nodes()), Ours())
    before = placer.nodes()
    live = []
    for pod in data.draw(st.lists(pods(), max_size=6)):
        placement = placer.place(pod)
        if placement is not None:
            placer.take(placement)
            live.append(placement)
    for placement in live:
        placer.give_back(placement)
    assert placer.nodes() == before


@pytest.mark.parametrize("make", [lambda known: FirstFit(), lambda known: BestFit(), lambda known: fgd_of(known)])
@settings(deadline=None)
@given(st.data())
def test_kept_scores_choose_as_fresh_ones_do(make: Callable[[list[Pod]], PodPolicy], data: st.DataObject) -> None:
    known = data.draw(st.lists(pods(), min_size=1, max_size=3))
    placer = Placer(data.draw(nodes(most=5)), make(known))
    for pod in data.draw(st.lists(st.sampled_from(known), max_size=12)):
        placement = placer.place(pod)
        assert placement == Placer(placer.nodes(), make(known)).place(pod)
        if placement is not None:
            placer.take(placement)


def fgd_of(known: Sequence[Pod]) -> PodPolicy:
    return Fgd(TraceWorkload(dict.fromkeys(known, 1.0)))


def fragment_by_definition(node: Node, weights: dict[Pod, float]) -> float:
    """F_n(M) as the paper has it, pod by pod."""
    sum_ = 0.0
    for pod, weight in weights.items():
        wide = [f for f in node.free if f >= pod.amount and (f == TOTAL or not pod.whole)]
        sum_ += weight * (sum(node.free) - (sum(wide) if len(wide) >= pod.ranks else 0))
    return sum_ / sum(weights.values())


@given(nodes(most=1), st.dictionaries(pods(), st.floats(0.1, 9), min_size=1, max_size=5))
def test_fragment_is_the_papers(item: list[Node], weights: dict[Pod, float]) -> None:
    fragment = TraceWorkload(weights).fragment(item[0])
    assert fragment == pytest.approx(fragment_by_definition(item[0], weights), abs=1e-9)
    assert -1e-9 <= fragment <= sum(item[0].free) + 1e-9


@given(nodes(most=1), st.integers(1, TOTAL), st.lists(pods(), min_size=1, max_size=4))
def test_the_device_chosen_adds_least_fragment(item: list[Node], amount: int, known: list[Pod]) -> None:
    pod = Pod(1, amount)
    room = Room(item[0])
    weights = dict.fromkeys(known, 1.0)
    eligible = room.eligible(pod)
    if not eligible:
        return
    score, _ = Fgd(TraceWorkload(weights)).choose(room, pod, eligible)
    increases = []
    for device in eligible:
        after = Room(item[0])
        after.take(after.placement(pod, [device]))
        increases.append(fragment_by_definition(after.as_node(), weights) - fragment_by_definition(item[0], weights))
    assert score == pytest.approx(min(increases), abs=1e-9)
