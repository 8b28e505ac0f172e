"""Routing by key: keys stay where they are, loads stay bounded, the closed get nothing."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.routing.bounded_ring import (
    FREE_SHARE,
    LOAD_BOUND,
    POINTS_PER_REPLICA,
    BoundedRing,
    HashRing,
    ReplicaChoice,
    Route,
)
from tests.effort import examples

KEYS = [f"key-{number}" for number in range(2000)]
names = st.sets(st.text(min_size=1, max_size=12), min_size=1, max_size=12)
NOISE = 5  # standard deviations of a share, which is one in the root of POINTS


def ring_of(*members: str) -> HashRing:
    ring = HashRing()
    for member in members:
        ring.add(member)
    return ring


def homes(ring: HashRing) -> dict[str, str]:
    return {key: next(iter(ring.walk(key))) for key in KEYS}


def routing_of(replicas: dict[str, int], free_share: float = 0.0, bound: float = LOAD_BOUND) -> BoundedRing:
    routing = BoundedRing(bound, free_share)
    for replica_id, slots in replicas.items():
        routing.set_slots(replica_id, slots)
    return routing


def even(count: int, slots: int = 100) -> dict[str, int]:
    return {f"r{number}": slots for number in range(count)}


def take(routing: BoundedRing, key: str | None, draw: random.Random, slots: int = 1) -> ReplicaChoice | None:
    choice = routing.choose(key, draw, slots)
    if choice is not None:
        routing.add_load(choice.replica_id, slots)
    return choice


def test_the_order_in_which_replicas_come_does_not_matter() -> None:
    assert homes(ring_of("a", "b", "c")) == homes(ring_of("c", "a", "b"))


@settings(deadline=None, max_examples=examples(30))
@given(names, st.text(min_size=1, max_size=12))
def test_a_replica_that_comes_takes_its_share_of_the_keys_and_moves_no_other(members: set[str], new: str) -> None:
    members.discard(new)
    before = ring_of(*members)
    after = ring_of(*members, new)
    if not members:
        return
    old = homes(before)
    now = homes(after)
    moved = [key for key in KEYS if old[key] != now[key]]
    assert all(now[key] == new for key in moved)
    share = len(KEYS) / (len(members) + 1)
    assert len(moved) <= share * (1 + NOISE / math.sqrt(POINTS_PER_REPLICA)) + NOISE * math.sqrt(share)


@settings(deadline=None, max_examples=examples(30))
@given(names)
def test_a_replica_that_leaves_moves_its_own_keys_alone(members: set[str]) -> None:
    gone, *stay = sorted(members)
    ring = ring_of(*members)
    before = homes(ring)
    ring.remove(gone)
    if stay:
        after = homes(ring)
        assert all(after[key] == before[key] for key in KEYS if before[key] != gone)
        assert gone not in after.values()
        ring.add(gone)
        assert homes(ring) == before
    else:
        assert list(ring.walk("key")) == []


def test_keys_are_spread_evenly() -> None:
    counts = Counter(homes(ring_of(*even(8))).values())
    assert max(counts.values()) < 1.5 * len(KEYS) / 8
    assert min(counts.values()) > 0.5 * len(KEYS) / 8


def test_a_walk_meets_every_replica() -> None:
    assert set(ring_of("a", "b", "c").walk("key")) == {"a", "b", "c"}


def test_removing_a_stranger_changes_nothing() -> None:
    ring = ring_of("a", "b")
    before = list(ring.walk("key"))
    ring.remove("stranger")
    assert list(ring.walk("key")) == before
    assert len(before) == 2 * POINTS_PER_REPLICA


def test_the_points_of_a_name_are_the_same_in_every_router_and_version() -> None:
    ring = ring_of("a", "b", "replica#3")
    assert [next(ring.walk(key)) for key in ("key", "\ud800", "", "tenant/session")] == ["b", "a", *["replica#3"] * 2]


def test_a_key_goes_home_while_its_home_has_room() -> None:
    routing = routing_of(even(4))
    draw = random.Random(1)
    first = routing.choose("key", draw)
    assert first is not None
    assert first.route is Route.HOME
    assert all(routing.choose("key", draw) == first for _ in range(5))


def test_a_popular_key_spills_to_the_same_next_replica() -> None:
    routing = routing_of(even(4))
    draw = random.Random(1)
    taken = [take(routing, "key", draw) for _ in range(200)]
    assert Counter(choice.route for choice in taken if choice is not None)[Route.NEXT] > 100
    home = taken[0]
    spilled = next(c for c in taken if c is not None and c.route is Route.NEXT)
    assert home is not None
    again = routing_of(even(4))
    again.add_load(home.replica_id, 10)
    assert again.choose("key", random.Random(2)) == spilled


@pytest.mark.parametrize("free_share", [0.0, FREE_SHARE])
def test_no_replica_has_more_than_its_bound_under_one_key(free_share: float) -> None:
    routing = routing_of(even(5), free_share)
    draw = random.Random(1)
    for number in range(1, 400):
        take(routing, "key", draw)
        most = max(routing.load(name) for name in even(5))
        assert most <= max(math.ceil(LOAD_BOUND * number / 5), 100 * free_share)


def test_while_little_runs_a_key_stays_at_home() -> None:
    routing = routing_of(even(4, slots=64), FREE_SHARE)
    draw = random.Random(1)
    assert {take(routing, "key", draw) for _ in range(4)} == {routing_of(even(4)).choose("key", draw)}


def test_every_slot_is_used_before_anyone_is_turned_away() -> None:
    routing = routing_of({"small": 3, "large": 30})
    draw = random.Random(1)
    assert all(take(routing, key, draw) is not None for key in [None, "key", "other"] * 11)
    assert take(routing, None, draw) is None
    assert take(routing, "key", draw) is None


def test_larger_replicas_take_more() -> None:
    routing = routing_of({"small": 20, "large": 80})
    draw = random.Random(1)
    for _ in range(50):
        take(routing, "key", draw)
    assert routing.load("small") <= math.ceil(LOAD_BOUND * 50 * 0.2)
    assert routing.load("large") <= math.ceil(LOAD_BOUND * 50 * 0.8)


def test_two_choices_keep_loads_closer_than_one_would() -> None:
    routing = routing_of(even(100, slots=1000), bound=100.0)
    draw = random.Random(1)
    for _ in range(10_000):
        choice = take(routing, None, draw)
        assert choice is not None
        assert choice.route is Route.TWO_CHOICES
    loads = [routing.load(name) for name in even(100)]
    assert max(loads) <= 105  # with one choice about 130


def test_of_two_replicas_the_less_busy_is_always_taken() -> None:
    routing = routing_of(even(2))
    draw = random.Random(1)
    routing.add_load("r0", 10)
    assert {routing.choose(None, draw) for _ in range(50)} == {ReplicaChoice("r1", Route.TWO_CHOICES)}


def test_a_large_request_goes_where_its_slots_are_free() -> None:
    routing = routing_of({"small": 2, "large": 8})
    draw = random.Random(1)
    routing.add_load("large", 4)
    assert routing.choose(None, draw, slots=4) == ReplicaChoice("large", Route.LEAST_BUSY)
    assert routing.choose("key", draw, slots=5) is None


def test_a_closed_replica_gets_nothing_and_its_keys_come_home() -> None:
    routing = routing_of(even(4))
    draw = random.Random(1)
    before = {key: routing.choose(key, draw) for key in KEYS}
    routing.set_open("r2", False)
    during = {key: routing.choose(key, draw) for key in KEYS}
    for key in KEYS:
        was = before[key]
        now = during[key]
        assert was is not None
        assert now is not None
        assert now.replica_id != "r2"
        assert (now == was) == (was.replica_id != "r2")
    routing.set_open("r2", True)
    assert {key: routing.choose(key, draw) for key in KEYS} == before


def test_with_no_replica_open_there_is_no_choice() -> None:
    routing = routing_of({"a": 4, "b": 0})
    draw = random.Random(1)
    routing.set_open("a", False)
    routing.set_open("stranger", True)
    assert (routing.choose("key", draw), routing.choose(None, draw), routing.open_replicas) == (None, None, [])
    assert (routing.load_bound("a"), routing.load_bound("b"), routing.load_bound("stranger")) == (0, 0, 0)


def test_wrong_figures_change_nothing() -> None:
    routing = routing_of({"a": 4})
    with pytest.raises(ValueError, match="slots"):
        routing.set_slots("a", -1)
    with pytest.raises(ValueError, match="bound"):
        BoundedRing(bound=1.0)
    with pytest.raises(ValueError, match="free_share"):
        BoundedRing(free_share=2.0)
    routing.add_load("stranger", 3)
    routing.add_load("a", -1)
    assert (routing.load("stranger"), routing.load("a"), routing.load_bound("a")) == (0, 0, 2)


class RoutingMachine(RuleBasedStateMachine):
    """Replicas come, shrink, close and leave while requests are placed; the books are kept a second time here."""

    @initialize(bound=st.sampled_from([1.1, LOAD_BOUND, 2.0]), free_share=st.sampled_from([0.0, FREE_SHARE, 0.5]))
    def start(self, bound: float, free_share: float) -> None:
        self.bound = bound
        self.free_share = free_share
        self.routing = BoundedRing(bound, free_share)
        self.slots: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        self.closed: set[str] = set()

    def usable(self) -> list[str]:
        return [name for name, slots in self.slots.items() if slots and name not in self.closed]

    @rule(name=st.sampled_from("abcdef"), slots=st.integers(0, 20))
    def resize(self, name: str, slots: int) -> None:
        self.routing.set_slots(name, slots)
        self.slots[name] = slots
        self.loads.setdefault(name, 0)

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), is_open=st.booleans())
    def set_open(self, data: st.DataObject, is_open: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.slots)))
        self.routing.set_open(name, is_open)
        (self.closed.discard if is_open else self.closed.add)(name)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.slots)))
        self.routing.drop_replica(name)
        del self.slots[name], self.loads[name]
        self.closed.discard(name)

    @precondition(lambda self: any(self.loads.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, load in self.loads.items() if load)))
        self.routing.add_load(name, -1)
        self.loads[name] -= 1

    @rule(
        key=st.none() | st.sampled_from("xyz"),
        slots=st.sampled_from([1, 1, 1, 3]),
        seed=st.integers(0, 9),
        times=st.integers(1, 5),
    )
    def place(self, key: str | None, slots: int, seed: int, times: int) -> None:
        for _ in range(times):
            choice = self.routing.choose(key, random.Random(seed), slots)
            able = [name for name in self.usable() if self.loads[name] + slots <= self.slots[name]]
            assert (choice is None) == (not able)
            if choice is None:
                return
            assert choice.replica_id in able
            name = choice.replica_id
            total = sum(self.loads[one] for one in self.usable()) + slots
            share = self.bound * total * self.slots[name] / sum(self.slots[one] for one in self.usable())
            within = max(math.ceil(share), self.free_share * self.slots[name])
            if slots == 1 or choice.route is not Route.LEAST_BUSY:
                assert self.loads[name] + slots <= within
            self.loads[name] += slots
            self.routing.add_load(name, slots)

    @invariant()
    def loads_agree(self) -> None:
        assert len(self.routing.open_replicas) == len(self.usable())
        assert all(self.routing.load(name) == load for name, load in self.loads.items())


TestRoutingMachine = RoutingMachine.TestCase
TestRoutingMachine.settings = settings(deadline=None)
