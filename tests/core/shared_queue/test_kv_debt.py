"""Requests that outgrow their estimates under the line of all routers: given at once, or owed before anybody begins."""

from __future__ import annotations

import pytest

from serve_app.core.queue.admission import QueuePolicy
from serve_app.core.shared_queue.kv_debt import KvDebt, OwedRequest
from serve_app.types import RequestClass
from tests.core.shared_queue.world import World

CRITICAL = RequestClass.CRITICAL
HIGH = RequestClass.HIGH
LOW = RequestClass.LOW
POOL = 1000


def running(slots: int = 4, tokens: int = 300, requests: int = 3) -> tuple[World, list[str]]:
    """One engine, two routers, and requests of the first that hold most of its tokens."""
    world = World({"e": (slots, POOL)}, 2)
    world.settle(4)
    reqs = [world.arrive("r0", LOW, tokens=tokens) for _ in range(requests)]
    world.settle(4)
    assert [req.state for req in reqs] == ["runs"] * requests
    return world, [f"q{req.number}" for req in reqs]


def owed(world: World, request_id: str) -> int:
    return world.routers["r0"].queue.in_flight.running[request_id].owed_tokens


@pytest.mark.parametrize("here", [True, False], ids=["granted from credit", "granted by the line"])
def test_what_low_answers_have_outgrown_their_estimates_by_holds_up_no_critical(here: bool) -> None:
    world = World({"e": (24, 10_000)}, 2, QueuePolicy(1000, 600.0))
    world.settle(4)
    holders = [] if here else [world.arrive("r0", LOW, tokens=1) for _ in range(24)]
    world.settle(4)
    lows = [world.arrive("r0", LOW, tokens=200) for _ in range(20)]
    for req in holders:
        world.finish("r0", f"q{req.number}")
    world.settle(6)
    assert {req.state for req in lows} == {"runs"}
    ids = [f"q{req.number}" for req in lows]
    router_queue = world.routers["r0"].queue
    for _ in range(12):  # 15,360 tokens beyond their 4,000
        for request_id in ids:
            router_queue.in_flight.grow(request_id, 64, world.now)
        world.settle(1)
    assert sum(owed(world, one) for one in ids) > 1000
    same = world.arrive("r1", LOW, tokens=200)
    began = world.now
    urgent = world.arrive("r1", CRITICAL, tokens=200)
    while urgent.state == "waits" and world.now < began + 10.0:
        world.settle(1)
    assert urgent.state == "runs", "4 slots are free"
    assert urgent.granted_s < began + 1.0
    assert same.state == "waits", "those of its own class are owed what it would take"
    for request_id in ids:
        world.finish("r0", request_id)
    world.finish("r1", f"q{urgent.number}")
    world.settle(6)
    assert not world.quota.queue.kv_debt.debts
    world.bring_to_rest()


def test_nobody_of_its_class_begins_while_one_that_runs_is_owed_tokens_and_what_comes_free_is_its() -> None:
    world, (first, second, third) = running()
    world.routers["r0"].queue.in_flight.grow(first, 250, world.now)
    world.settle(4)
    assert owed(world, first) == 250
    small = world.arrive("r1", HIGH, tokens=10)
    world.settle(4)
    assert small.state == "waits", "there are ten tokens, and they are owed to another"
    world.finish("r0", second)
    world.settle(4)
    assert owed(world, first) == 0
    assert small.state == "runs"
    for request_id in (first, third):
        world.finish("r0", request_id)
    world.settle(4)
    world.accounted()


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_the_end_of_a_request_that_is_owed_tokens_lets_others_begin(end: str) -> None:
    world, (first, *others) = running()
    world.routers["r0"].queue.in_flight.grow(first, 500, world.now)
    waits = world.arrive("r1", HIGH, tokens=100)
    world.settle(4)
    assert waits.state == "waits"
    (world.finish if end == "done" else world.cancel)("r0", first)
    world.settle(4)
    assert waits.state == "runs"
    assert not world.quota.queue.kv_debt.debts
    for request_id in others:
        world.finish("r0", request_id)
    world.settle(4)
    world.accounted()


def test_what_is_owed_is_repeated_to_the_next_actor() -> None:
    world, (first, second, third) = running()
    world.routers["r0"].queue.in_flight.grow(first, 350, world.now)
    world.settle(4)
    world.crash()
    world.settle(8)
    assert owed(world, first) == 350
    world.finish("r0", second)
    world.settle(6)
    assert owed(world, first) == 0
    for request_id in (first, third):
        world.finish("r0", request_id)
    world.settle(4)
    world.accounted()


def test_a_router_that_is_gone_is_owed_nothing() -> None:
    world, (first, *_) = running()
    world.routers["r0"].queue.in_flight.grow(first, 350, world.now)
    waits = world.arrive("r1", HIGH, tokens=10)
    world.settle(4)
    assert waits.state == "waits"
    world.restart_router("r0")
    world.settle(6)
    assert waits.state == "runs"
    assert not world.quota.queue.kv_debt.debts


def test_the_first_is_given_first_and_a_later_smaller_one_does_not_pass_it() -> None:
    growth = KvDebt()
    first = OwedRequest("r", "a", "t1", LOW)
    later = OwedRequest("r", "b", "", LOW)
    other = OwedRequest("s", "c", "t3", LOW)
    growth.add("e", first, 10)
    growth.add("e", later, 1)
    growth.add("e", first, 5)
    growth.add("f", other, 1)
    assert not growth.due("e", HIGH), "a higher class waits"
    assert growth.due("e", LOW) == [(first, 15), (later, 1)]
    assert growth.debts.keys() == {"e", "f"}
    for debtor, _ in growth.due("e", LOW):
        growth.end("e", debtor)
    assert growth.debts.keys() == {"f"}
    assert growth.forget_routers(["s"]) == ["f"]
    assert not growth.debts


def test_what_requests_hold_is_reported_with_the_beats() -> None:
    world, ids = running()
    assert world.quota.queue.in_use("e") == (3, 900)
    for request_id in ids:
        world.finish("r0", request_id)
    world.settle(4)
    assert world.quota.queue.in_use("e") == (0, 0)
