"""One line for several routers, step by step; the clock is a number."""

from __future__ import annotations

from serve_app.core.exchange.lines import CALM_S
from serve_app.types import RequestClass
from tests.core.exchange_world import World

HIGH, LOW = RequestClass.HIGH, RequestClass.LOW


def connected(slots: int = 8, tokens: int = 800, routers: int = 2) -> World:
    world = World({"e": (slots, tokens)}, routers)
    world.settle(4)
    return world


def test_while_nobody_waits_a_router_grants_by_itself() -> None:
    world = connected()
    req = world.arrive("r0", LOW)
    assert (req.state, req.here) == ("runs", True)
    assert world.wire == []


def test_an_arrival_without_credit_is_granted_within_one_exchange() -> None:
    world = connected(slots=8, routers=2)
    reqs = [world.arrive("r0", LOW) for _ in range(4)]
    assert [req.here for req in reqs] == [True, True, False, False]
    world.settle(1)
    assert [req.state for req in reqs] == ["runs"] * 4
    assert not world.quota.lines._peers.word.contended


def test_who_waits_gets_what_another_router_does_not_use() -> None:
    world = connected(slots=4, routers=2)
    reqs = [world.arrive("r0", LOW) for _ in range(4)]
    world.settle(2)
    assert [req.state for req in reqs] == ["runs"] * 4
    world.accounted()


def test_a_higher_class_is_served_before_all_routers_lower_ones() -> None:
    world = connected(slots=2, routers=2)
    first = [world.arrive("r0", LOW), world.arrive("r1", LOW)]
    low = world.arrive("r0", LOW)
    world.settle(1)
    high = world.arrive("r1", HIGH)
    world.settle(1)
    assert (low.state, high.state) == ("waits", "waits")
    world.finish("r0", f"q{first[0].number}")
    assert low.state == "waits", "what is free is the line's, not the router's"
    world.settle(2)
    assert (low.state, high.state) == ("waits", "runs")
    world.finish("r1", f"q{high.number}")
    world.settle(2)
    assert low.state == "runs"


def test_credit_comes_back_to_the_routers_once_nobody_waits() -> None:
    world = connected(slots=2, routers=2)
    reqs = [world.arrive("r0", LOW) for _ in range(3)]
    world.settle(1)
    assert world.routers["r1"].line._accounts.credit("e")[0] == 0
    for req in reqs[:2]:
        world.finish("r0", f"q{req.number}")
    world.settle(1)
    world.finish("r0", f"q{reqs[2].number}")
    world.settle(1)
    world.wait(CALM_S)
    world.settle(3)
    assert world.arrive("r1", LOW).here
    world.accounted()


def test_a_dead_routers_requests_and_credit_come_back() -> None:
    world = connected(slots=2, routers=2)
    mine = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(1)
    waits = [world.arrive("r0", HIGH) for _ in range(2)]
    other = world.arrive("r1", LOW)
    world.settle(2)
    assert [req.state for req in (*mine, *waits, other)] == ["runs"] * 2 + ["waits"] * 3
    world.routers["r0"].alive = False
    world.routers["r0"].running.clear()
    for _ in range(6):
        world.wait(1.0)
        world.settle(1)
    assert other.state == "runs"
    assert list(world.quota.lines._peers._peers) == ["r1"]
    assert {engine for _, engine in world.quota.lines.requests().values()} == {"e"}


def test_the_actors_death_loses_nothing_and_grants_nothing_twice() -> None:
    world = connected(slots=2, routers=2)
    runs = [world.arrive("r0", LOW), world.arrive("r1", LOW)]
    waits = [world.arrive("r0", LOW), world.arrive("r1", HIGH)]
    world.settle(2)
    world.crash()
    world.perform(world.routers["r0"], world.routers["r0"].line.on_lost(world.now))
    world.settle(6)
    assert [req.state for req in (*runs, *waits)] == ["runs", "runs", "waits", "waits"]
    world.finish("r0", f"q{runs[0].number}")
    world.settle(2)
    assert [req.state for req in waits] == ["waits", "runs"]
    world.accounted()


def test_a_router_goes_on_from_its_credit_while_the_actor_is_away_and_not_for_ever() -> None:
    world = connected(slots=8, routers=2)
    world.crash()
    router = world.routers["r0"]
    world.perform(router, router.line.on_lost(world.now))
    reqs = [world.arrive("r0", LOW), world.arrive("r0", LOW), world.arrive("r0", LOW), world.arrive("r0", HIGH)]
    assert [req.state for req in reqs] == ["runs", "runs", "waits", "waits"]
    world.finish("r0", f"q{reqs[0].number}")
    assert [req.state for req in reqs] == ["done", "runs", "waits", "runs"], "class first"
    world.now += 10.0
    world.finish("r0", f"q{reqs[1].number}")
    assert reqs[2].state == "waits", "its credit may be another's by now"
    world.settle(8)
    assert reqs[2].state == "runs"
    world.accounted()
