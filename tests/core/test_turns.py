"""Whose work is next, for works that have no slot and no cost."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.turns import TenantTurns


def all_of(turns: TenantTurns[str]) -> list[str]:
    """The works in their order, one at a time."""
    done = []
    while (begun := turns.begin()) is not None:
        done.append(begun[1])
        turns.end(begun[0])
    return done


def test_tenants_take_turns_and_the_works_of_each_keep_their_order() -> None:
    turns = TenantTurns[str]()
    for work in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.arrive(work[0], work)
    assert all_of(turns) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_tenant_runs_no_more_than_its_part_and_waits_no_longer_than_its_bound() -> None:
    turns = TenantTurns[int](max_waiting=3)
    assert [turns.arrive("heavy", n) for n in range(4)] == [True, True, True, False]
    assert turns.arrive("light", 9)
    assert [turns.begin(4, 2) for _ in range(4)] == [("heavy", 0), ("light", 9), ("heavy", 1), None]
    assert turns.waiting == 1
    turns.end("heavy")
    assert turns.begin(4, 2) == ("heavy", 2)


def test_a_work_that_does_not_fit_keeps_its_turn() -> None:
    turns = TenantTurns[int]()
    for tenant, work in (("a", 2), ("b", 9), ("a", 1)):
        turns.arrive(tenant, work)
    begun = [turns.begin_if(lambda work: work <= 5) for _ in range(2)]
    assert begun == [("a", 2), None]
    assert [turns.begin_if(lambda _: True) for _ in range(3)] == [("b", 9), ("a", 1), None]


def test_a_work_that_goes_on_is_behind_other_tenants_and_before_its_own() -> None:
    turns = TenantTurns[str]()
    for work in ("a1", "a2", "b1"):
        turns.arrive(work[0], work)
    begun = turns.begin()
    assert begun == ("a", "a1")
    turns.go_on(*begun)
    assert turns.waiting == 3
    assert all_of(turns) == ["b1", "a1", "a2"]


def test_a_work_that_leaves_has_no_turn() -> None:
    turns = TenantTurns[str]()
    turns.arrive("a", "a1")
    turns.arrive("a", "a2")
    turns.leave("a", "a1")
    turns.arrive("b", "b1")
    turns.leave("b", "b1")
    assert all_of(turns) == ["a2"]
    assert not turns.waiting


works = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["arrive", "end", "leave"])), max_size=60)


@given(works, st.integers(1, 4), st.integers(1, 3))
def test_bounds_hold_and_every_work_runs_once(events: list[tuple[str, str]], at_once: int, of_tenant: int) -> None:
    turns = TenantTurns[int](max_waiting=5)
    running = Counter[str]()
    waiting = set[tuple[str, int]]()
    begun = set[int]()

    def begin_all() -> None:
        while (found := turns.begin(at_once, of_tenant)) is not None:
            waiting.remove(found)
            assert found[1] not in begun
            begun.add(found[1])
            running[found[0]] += 1
        assert running.total() <= at_once
        assert max(running.values(), default=0) <= of_tenant
        assert turns.waiting == len(waiting)

    for number, (tenant, event) in enumerate(events):
        if event == "arrive" and turns.arrive(tenant, number):
            waiting.add((tenant, number))
        elif event == "end" and running[tenant]:
            turns.end(tenant)
            running[tenant] -= 1
        elif event == "leave" and (own := [one for one in waiting if one[0] == tenant]):
            waiting.remove(own[0])
            turns.leave(*own[0])
        begin_all()
    for tenant in list(running.elements()) + [tenant for tenant, _ in waiting]:
        turns.end(tenant)
        running[tenant] -= 1
        begin_all()
    assert not waiting
