"""Which devices an engine gets, and what fragmentation is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.placement import Demand, PlacementPolicy, Workload, tightest_fit

TOTAL = 4
FREE = st.lists(st.integers(0, TOTAL), min_size=1, max_size=4)
DEMANDS = st.builds(Demand, st.integers(1, 3), st.integers(1, TOTAL), st.integers(1, 3))


def learned(*demands: Demand) -> PlacementPolicy:
    """A policy that goes by these demands and no others."""
    policy = PlacementPolicy()
    policy.workload = Workload(dict.fromkeys(demands, 1.0))
    return policy


def test_fragmentation_is_the_part_of_what_is_free_that_the_expected_demands_cannot_use() -> None:
    small = Workload({Demand(1, 30): 1})
    large = Workload({Demand(1, 60): 1})
    assert large.fragmentation([]) == large.fragmentation([[0, 0]]) == 0
    assert large.fragmentation([[80, 80, 80, 80]]) == 0, "four empty GPUs are whole"
    halves = [[40, 40], [40, 40]]
    assert (small.fragmentation(halves), large.fragmentation(halves)) == (0, 1)
    assert large.fragmentation([[80, 40], [40]]) == 0.5
    assert Workload({Demand(1, 30): 1, Demand(1, 60): 1}).fragmentation(halves) == 0.5
    assert Workload({Demand(2, 60): 1}).fragmentation([[80, 80], [80]]) == pytest.approx(1 / 3)
    assert Workload({}).fragmentation(halves) == 0, "nobody asks"


@pytest.mark.parametrize("figures", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_demand_needs_ranks_an_amount_and_a_group(figures: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="Demand"):
        Demand(*figures)


def test_while_nothing_is_known_the_fullest_node_and_device_are_the_best() -> None:
    fuller = PlacementPolicy().choose([80, 50], 1, 40)
    emptier = PlacementPolicy().choose([80, 80], 1, 40)
    assert fuller is not None
    assert emptier is not None
    assert fuller < emptier
    assert fuller[1] == (1,)
    assert PlacementPolicy().choose([80, 70, 80], 2, 40) == (150.0, (1, 0))


def test_a_broken_device_is_filled_before_a_whole_one_is_broken() -> None:
    policy = learned(Demand(1, 40), Demand(1, 80))
    broken = policy.choose([80, 40], 1, 40)
    whole = policy.choose([80], 1, 40)
    assert broken is not None
    assert whole is not None
    assert broken[1] == (1,)
    assert broken < whole


def test_a_policy_learns_what_it_has_seen() -> None:
    policy = PlacementPolicy()
    for _ in range(4):
        policy.observe(Demand(1, 40))
    assert policy.workload
    assert policy.workload.usable([39, 40, 80]) == 120.0


def fragment_by_definition(free: list[int], weights: dict[Demand, float]) -> float:
    """F_n(M) as the paper has it, demand by demand."""
    sum_ = 0.0
    for demand, weight in weights.items():
        wide = [have for have in free if have >= demand.amount]
        sum_ += weight * demand.groups * (sum(free) - (sum(wide) if len(wide) >= demand.ranks else 0))
    return sum_ / sum(weight * demand.groups for demand, weight in weights.items())


@given(FREE, st.dictionaries(DEMANDS, st.floats(0.1, 9), min_size=1, max_size=5))
def test_fragment_is_the_papers(free: list[int], weights: dict[Demand, float]) -> None:
    fragment = sum(free) - Workload(weights).usable(free)
    assert fragment == pytest.approx(fragment_by_definition(free, weights), abs=1e-9)


@given(FREE, st.integers(1, TOTAL), st.lists(DEMANDS, min_size=1, max_size=4))
def test_the_device_chosen_adds_least_fragment(free: list[int], amount: int, known: list[Demand]) -> None:
    choice = learned(*known).choose(free, 1, amount)
    weights = dict.fromkeys(known, 1.0)
    eligible = [device for device, have in enumerate(free) if have >= amount]
    assert (choice is None) == (not eligible)
    increases = []
    for device in eligible:
        after = [*free[:device], free[device] - amount, *free[device + 1 :]]
        increases.append(fragment_by_definition(after, weights) - fragment_by_definition(free, weights))
    if choice is not None:
        assert choice[0] == pytest.approx(min(increases), abs=1e-9)


@given(FREE, st.integers(1, 3), st.integers(1, TOTAL))
def test_ranks_fit_exactly_where_as_many_devices_have_enough(free: list[int], ranks: int, amount: int) -> None:
    devices = tightest_fit(free, ranks, amount)
    assert (devices is not None) == (sum(have >= amount for have in free) >= ranks)
    if devices is not None:
        assert len(set(devices)) == ranks
        assert all(free[device] >= amount for device in devices)
