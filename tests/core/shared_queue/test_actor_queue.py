"""One line for several routers, step by step; the clock is a number."""

from __future__ import annotations

import pytest

from serve_app.core.memory import SessionRequest
from serve_app.core.queue import ClassBound, Grant, QueuePolicy
from serve_app.core.shared_queue.published_state import CALM_S
from serve_app.quota.report import figures
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW


def connected(slots: int = 8, tokens: int = 800, routers: int = 2) -> World:
    world = World({"e": (slots, tokens)}, routers)
    world.settle(4)
    return world


def test_while_nobody_waits_a_router_grants_by_itself() -> None:
    world = connected()
    req = world.arrive("r0", LOW)
    assert (req.state, req.here) == ("runs", True)
    assert world.in_transit == []


def test_an_arrival_without_credit_is_granted_within_one_exchange() -> None:
    world = connected(slots=8, routers=2)
    reqs = [world.arrive("r0", LOW) for _ in range(4)]
    assert [req.here for req in reqs] == [True, True, False, False]
    world.settle(1)
    assert [req.state for req in reqs] == ["runs"] * 4
    assert not world.quota.queue.router_sessions.state.contended


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
    assert world.routers["r1"].queue.accounts.credit("e")[0] == 0
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
    arrived = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(1)
    waits = [world.arrive("r0", HIGH) for _ in range(2)]
    other = world.arrive("r1", LOW)
    world.settle(2)
    assert [req.state for req in (*arrived, *waits, other)] == ["runs"] * 2 + ["waits"] * 3
    world.routers["r0"].alive = False
    world.routers["r0"].running.clear()
    for _ in range(6):
        world.wait(1.0)
        world.settle(1)
    assert other.state == "runs"
    assert list(world.quota.queue.router_sessions.by_router) == ["r1"]
    assert {one.engine for one in world.quota.queue.requests.by_ticket.values()} == {"e"}


def test_the_actors_death_loses_nothing_and_grants_nothing_twice() -> None:
    world = connected(slots=2, routers=2)
    runs = [world.arrive("r0", LOW), world.arrive("r1", LOW)]
    waits = [world.arrive("r0", LOW), world.arrive("r1", HIGH)]
    world.settle(2)
    world.crash()
    world.perform(world.routers["r0"], world.routers["r0"].queue.on_lost(world.now))
    world.settle(6)
    assert [req.state for req in (*runs, *waits)] == ["runs", "runs", "waits", "waits"]
    world.finish("r0", f"q{runs[0].number}")
    world.settle(2)
    assert [req.state for req in waits] == ["waits", "runs"]
    world.accounted()


def test_after_the_actors_death_an_engine_is_closed_for_as_long_as_a_router_that_may_hold_some_of_it_is_silent() -> (
    None
):
    world = connected(slots=8, routers=2)
    world.start_engine("new", 8, 800)  # of which the silent one has nothing yet
    world.notice("r0")
    world.crash()
    world.settle_one("r0")
    reqs = [world.arrive("r0", LOW) for _ in range(6)]
    assert [req.engine for req in reqs if req.here] == ["e", "e"], "its credit on the closed one"
    world.settle_one("r0")
    assert [req.engine for req in reqs if not req.here] == ["new"] * 4
    beyond = [world.arrive("r0", LOW) for _ in range(6)]
    world.settle_one("r0")
    assert [req.state for req in beyond] == ["runs"] * 4 + ["waits"] * 2, "six slots of the closed one are idle"
    world.settle_one("r1")
    world.settle(2)
    assert [req.engine for req in beyond[4:]] == ["e", "e"]
    world.accounted()


def test_where_all_engines_are_closed_after_the_actors_death_routers_go_on_from_credit_until_the_last_has_spoken() -> (
    None
):
    world = connected(slots=8, routers=3)
    world.crash()
    for name in ("r0", "r1"):
        world.settle_one(name)
    reqs = [world.arrive("r0", HIGH), world.arrive("r1", LOW), world.arrive("r1", HIGH)]
    assert [req.state for req in reqs] == ["runs", "runs", "waits"]
    world.finish("r1", f"q{reqs[1].number}")
    assert reqs[2].state == "runs", "from what its own request has given back"
    last = world.arrive("r0", LOW)
    assert (last.state, world.routers["r0"].queue.pending.count(MODEL)) == ("waits", 1)
    world.settle_one("r2")
    world.settle(3)
    assert last.state == "runs"
    world.accounted()


def test_a_router_goes_on_from_its_credit_while_the_actor_is_away_and_not_for_ever() -> None:
    world = connected(slots=8, routers=2)
    world.crash()
    router = world.routers["r0"]
    world.perform(router, router.queue.on_lost(world.now))
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


def reach(world: World, router: str, engine: str, usable: bool) -> None:
    """A router ejects an engine, or takes it back."""
    peer = world.routers[router]
    world.perform(peer, peer.queue.set_reachability(MODEL, engine, usable, world.now))


def with_one_that_lost_its_way() -> World:
    """Two routers; `r1` does not reach the engine."""
    world = connected(slots=2, routers=2)
    reach(world, "r1", "e", usable=False)
    world.settle(2)
    return world


def test_a_router_that_has_lost_its_way_takes_the_engines_from_nobody() -> None:
    world = with_one_that_lost_its_way()
    waits = world.arrive("r1", HIGH)
    reqs = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(2)
    assert [req.state for req in reqs] == ["runs", "runs"], "nobody waits for one that cannot run"
    assert waits.state == "waits"
    assert [one["replicas"] for one in figures(world.quota, world.now)["queues"]] == [["e"]]
    world.accounted()


def test_requests_of_a_router_that_reaches_an_engine_again_go_there_by_class_as_old_as_they_are() -> None:
    world = with_one_that_lost_its_way()
    low = world.arrive("r1", LOW)
    high = world.arrive("r1", HIGH)
    world.settle(1)
    others = [world.arrive("r0", LOW) for _ in range(3)]
    world.settle(2)
    assert [req.state for req in others] == ["runs", "runs", "waits"]
    reach(world, "r1", "e", usable=True)
    world.settle(2)
    world.finish("r0", f"q{others[0].number}")
    world.settle(2)
    assert (low.state, high.state, others[2].state) == ("waits", "runs", "waits")
    world.finish("r0", f"q{others[1].number}")
    world.finish("r1", f"q{high.number}")
    world.settle(2)
    assert (low.state, others[2].state) == ("runs", "runs")
    world.accounted()


def test_who_waits_is_not_sent_where_its_router_cannot_go_any_more() -> None:
    world = World({"e": (1, 200), "f": (1, 200)}, 2)
    world.settle(4)
    running = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(2)
    waits = [world.arrive("r1", HIGH) for _ in range(3)]
    world.settle(2)
    reach(world, "r1", "f", usable=False)
    world.settle(2)
    handed_in = world.arrive("r0", LOW)
    world.settle(2)
    for req in running:
        world.finish("r0", f"q{req.number}")
    world.settle(2)
    assert [(req.state, req.engine) for req in waits] == [("runs", "e"), ("waits", ""), ("waits", "")]
    assert (handed_in.state, handed_in.engine) == ("runs", "f"), "no class above it can have that"
    world.bring_to_rest()


def test_a_cancelled_request_that_could_go_nowhere_is_forgotten() -> None:
    world = with_one_that_lost_its_way()
    req = world.arrive("r1", LOW)
    world.settle(1)
    world.cancel("r1", f"q{req.number}")
    world.settle(2)
    assert not world.quota.queue.requests.by_ticket
    reach(world, "r1", "e", usable=True)
    world.settle(2)
    after = world.arrive("r1", LOW)
    world.settle(2)
    assert after.state == "runs"
    world.accounted()


def test_routers_that_have_ejected_different_engines_both_go_on_each_on_what_it_reaches() -> None:
    world = World({"e": (2, 200), "f": (2, 200)}, 2)
    world.settle(4)
    reach(world, "r0", "f", usable=False)
    reach(world, "r1", "e", usable=False)
    world.settle(2)
    reqs = [world.arrive(name, LOW) for name in ("r0", "r1", "r0", "r1")]
    world.settle(2)
    assert [(req.state, req.engine) for req in reqs] == [("runs", "e"), ("runs", "f")] * 2
    world.accounted()


@pytest.mark.parametrize(
    "policy",
    [
        QueuePolicy(max_queued=0, max_wait_s=60.0),
        QueuePolicy(max_queued=1000, max_wait_s=60.0, classes={LOW: ClassBound(max_queued=0)}),
    ],
    ids=["line", "class"],
)
def test_where_nobody_may_wait_every_slot_is_everybody_s(policy: QueuePolicy) -> None:
    world = World({"e": (2, 1000)}, 2, policy)
    world.settle(4)
    reqs = []
    for _ in range(2):
        reqs.append(world.arrive("r0", LOW))
        world.settle(1)
    assert [req.state for req in reqs] == ["runs", "runs"], "none of it is in another router's hands"
    late = world.arrive("r1", LOW)
    world.settle(1)
    assert late.state == "refused"
    world.finish("r0", f"q{reqs[0].number}")
    world.settle(1)
    again = world.arrive("r1", LOW)
    world.settle(1)
    assert again.state == "runs"
    world.accounted()


def test_a_queue_in_which_nobody_may_wait_any_more_takes_its_credit_back() -> None:
    world = connected(slots=2, routers=2)
    for name in ("r0", "r1"):
        world.routers[name].queue.serve(MODEL, QueuePolicy(max_queued=0, max_wait_s=60.0))
    world.settle(2)
    reqs = [world.arrive("r0", LOW), world.arrive("r0", LOW)]
    world.settle(1)
    assert [req.state for req in reqs] == ["runs", "runs"]
    for name in ("r0", "r1"):
        world.routers[name].queue.serve(MODEL, world.policy)
    for req in reqs:
        world.finish("r0", f"q{req.number}")
    world.settle(6)
    assert world.arrive("r1", LOW).here, "and lends again when some may wait"


def restated(world: World) -> None:
    """The actor dies, and its routers tell the next one who waits."""
    world.crash()
    for router in world.routers.values():
        world.perform(router, router.queue.on_lost(world.now))


def test_who_waited_is_taken_by_the_next_actor_as_old_as_it_is_and_not_refused_by_a_full_queue() -> None:
    world = World({"e": (2, 1000)}, 2, QueuePolicy(max_queued=4, max_wait_s=60.0))
    world.settle(4)
    running = [world.arrive("r0", NORMAL, tenant="t") for _ in range(2)]
    world.settle(2)
    old = []
    for number in range(4):
        world.now += 0.1
        old.append(world.arrive(f"r{number % 2}", NORMAL, tenant="t"))
        world.settle(1)
    restated(world)
    young = [world.arrive(name, NORMAL, tenant="t") for name in ("r0", "r1") for _ in range(3)]
    for name in ("r1", "r0", "r1", "r0", "r1", "r0"):
        world.settle_one(name)
    world.settle(4)
    assert [req.state for req in old] == ["waits"] * 4
    requests = world.quota.queue.requests.by_ticket.values()
    router_queue = {one.arrival.request_id: one.arrival for one in requests if not one.engine}
    assert [arrival.accepted for arrival in router_queue.values()].count(True) == 4
    since = {one.arrived_s for one in world.quota.queue.requests.by_ticket.values() if not one.engine}
    assert min(since) == pytest.approx(old[0].arrived_s, abs=0.01)
    assert {req.state for req in young} <= {"waits", "refused"}
    assert all(req.state == "runs" for req in running)
    world.bring_to_rest()
    assert {req.state for req in old} == {"done"}


def test_a_router_alone_goes_by_the_true_arrival_of_who_waits_anew() -> None:
    world = World({"e": (2, 1000)}, 1)
    world.settle(4)
    router_queue = world.routers["r0"].queue
    held = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(2)
    first = world.arrive("r0", NORMAL)
    world.settle(1)
    world.now += 0.1
    second = world.arrive("r0", NORMAL)
    world.settle(1)
    router_queue.set_reachability(MODEL, "e", False, world.now)
    reported = router_queue.pending.by_request_id.get(f"q{first.number}")
    assert reported is not None
    router_queue.on_action(Grant(reported.ticket, "e", 0.0), world.now)  # where it cannot go: it waits anew
    head = router_queue.pending.first(MODEL)
    assert head is not None
    assert head.request_id == f"q{first.number}"
    assert second.state == "waits"
    assert all(req.state == "runs" for req in held)


def test_a_request_that_only_a_sessions_end_makes_room_for_holds_up_nobody() -> None:
    world = connected(slots=4, tokens=1000, routers=1)
    world.settle()
    asked = SessionRequest("acme agent", MODEL, 500, ttl_s=600.0, wait_until=world.now + 60.0)
    world.quota.on_open_session(asked, world.now)
    for _ in range(3):  # the router gives its credit back
        world.settle(2)
        world.quota.on_tick(world.now)
    assert [one.request.session_id for one in world.quota.sessions.by_session_id.values()] == ["acme agent"]
    large = world.arrive("r0", LOW, tokens=700)
    world.settle(3)
    assert large.state == "waits"
    others = [world.arrive("r0", level, tokens=100) for level in (HIGH, LOW)]
    world.settle(3)
    assert [one.state for one in (large, *others)] == ["waits", "runs", "runs"]
    world.quota.queue.close_session("acme agent", world.now)
    world.quota.on_tick(world.now)
    world.finish("r0", f"q{others[0].number}")
    world.finish("r0", f"q{others[1].number}")
    world.settle(4)
    assert large.state == "runs"
