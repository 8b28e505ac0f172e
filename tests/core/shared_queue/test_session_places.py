"""Requests of a session: in its place, or wholly in the common pool of its engine."""

from __future__ import annotations

import pytest

from serve_app.core.memory import DrainRequest, SessionRequest
from serve_app.core.queue import Grant
from serve_app.core.shared_queue.messages import Amount, Booked, SessionDraw
from serve_app.types import RequestClass
from tests.core.shared_queue.test_sessions import lease, make_world, opened
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass


def test_a_sessions_request_runs_while_the_queue_is_full_and_holds_no_slot_of_it() -> None:
    world = make_world(slots=1)
    opened(world, "s", 100)
    world.arrive("r0", CRITICAL, tokens=20)
    waits = world.arrive("r0", CRITICAL, tokens=20)
    world.settle(2)
    step = world.arrive("r0", LOW, tokens=60, session=lease(world, "s"))
    world.settle(1)
    assert (step.state, waits.state) == ("runs", "waits")
    assert step.place == Amount(lease(world, "s"), 1, 60)
    world.bring_to_rest()


def test_twenty_routers_cannot_run_twenty_sequences_of_one_session() -> None:
    world = make_world(routers=20, slots=1)
    opened(world, "s", 100)
    holder = world.arrive("r0", NORMAL, tokens=10)
    world.settle(2)
    steps = [world.arrive(name, NORMAL, tokens=5, session=lease(world, "s")) for name in world.routers]
    world.settle(2)
    assert sum(step.state == "runs" for step in steps) == 1
    assert holder.state == "runs"
    world.bring_to_rest()


@pytest.mark.parametrize("tokens", [60, 100])
def test_the_next_request_of_a_session_begins_as_the_one_before_ends_though_it_came_before_that_was_known(
    tokens: int,
) -> None:
    world = make_world(routers=2, slots=1)
    opened(world, "s", 100)
    holder = world.arrive("r0", NORMAL, tokens=10)
    world.settle(2)
    waits = world.arrive("r0", CRITICAL, tokens=10)
    first = world.arrive("r0", NORMAL, tokens=tokens, session=lease(world, "s"))
    world.settle(1)
    second, third = (world.arrive("r1", LOW, tokens=tokens, session=lease(world, "s")) for _ in range(2))
    world.settle(1)
    assert (first.state, second.state, third.state) == ("runs", "waits", "waits")
    for router, before, after in (("r0", first, second), ("r1", second, third)):
        world.finish(router, f"q{before.number}")
        world.settle(1)
        assert (after.state, after.place) == ("runs", Amount(lease(world, "s"), 1, tokens))
    assert (holder.state, waits.state) == ("runs", "waits")
    world.bring_to_rest()
    assert not world.quota.queue.models.by_name[MODEL].admission.queue.by_session


def test_what_is_too_long_for_a_session_runs_on_its_engine_and_takes_nothing_of_the_session() -> None:
    world = make_world(engines=2)
    session = opened(world, "s", 100)
    more = world.arrive("r0", NORMAL, tokens=160, session=lease(world, "s"))
    world.settle(1)
    assert (more.state, more.engine, more.place) == ("runs", session.engine, None)
    assert world.quota.ledger.free(lease(world, "s")) == 100
    world.finish("r0", f"q{more.number}")
    world.settle(2)
    world.accounted()


def test_what_is_too_long_for_a_session_and_for_its_engine_beside_it_runs_on_another_engine() -> None:
    world = make_world(engines=2)
    session = opened(world, "s", 600)
    more = world.arrive("r0", NORMAL, tokens=700, session=lease(world, "s"))
    world.settle(2)
    assert more.state == "runs"
    assert more.engine != session.engine
    world.bring_to_rest()


def test_a_request_that_waits_for_the_place_runs_anywhere_on_its_engine_first_if_there_is_room() -> None:
    world = make_world(engines=2, slots=1)
    session = opened(world, "s", 100)
    first, second, third = (world.arrive("r0", NORMAL, tokens=50, session=lease(world, "s")) for _ in range(3))
    world.settle(2)
    assert [one.state for one in (first, second, third)] == ["runs", "runs", "waits"], "it waits for its engine"
    assert [one.engine for one in (first, second)] == [session.engine] * 2
    assert (first.place, second.place) == (Amount(lease(world, "s"), 1, 50), None)
    world.finish("r0", f"q{second.number}")
    world.settle(2)
    assert (third.state, third.place) == ("runs", None)
    world.bring_to_rest()


@pytest.mark.parametrize("how", ["closed", "expired", "engine gone", "engine dropped by the router"])
def test_a_request_that_waits_when_its_session_has_ended_is_an_ordinary_one(how: str) -> None:
    world = make_world(engines=2, slots=1)
    session = opened(world, "s", 100, ttl_s=2.0)
    first, second, third = (world.arrive("r0", NORMAL, tokens=50, session=lease(world, "s")) for _ in range(3))
    world.settle(1)
    assert third.state == "waits"
    if how == "closed":
        world.quota.queue.close_session("t0 s", world.now)
    elif how == "expired":
        for name in (first, second):
            world.finish("r0", f"q{name.number}")
        assert world.arrive("r0", NORMAL, tokens=50).state == "waits"
        world.settle(1)
    elif how == "engine gone":
        world.end_engine(session.engine)
    else:
        for name in (first, second):
            world.routers["r0"].running.pop(f"q{name.number}").state = "done"
        world.routers["r0"].queue.in_flight.drop_engine(session.engine)
    world.settle(3)
    assert third.state == "runs"
    world.bring_to_rest()


def test_a_request_in_the_place_of_its_session_is_not_stopped_for_others_and_costs_its_class_no_minimum_share() -> None:
    world = make_world(slots=1)
    world.preemptible = True
    opened(world, "s", 100)
    step = world.arrive("r0", LOW, tokens=60, session=lease(world, "s"))
    holder = world.arrive("r0", LOW, tokens=60)
    world.settle(1)
    assert (step.state, step.place is not None, holder.state) == ("runs", True, "runs")
    waits = world.arrive("r0", CRITICAL, tokens=60)
    world.settle(4)
    assert (step.stops, waits.state) == (0, "waits")
    world.bring_to_rest()


def test_a_running_request_that_outgrows_its_estimate_takes_from_its_session_first() -> None:
    world = make_world()
    opened(world, "s", 100)
    step = world.arrive("r0", NORMAL, tokens=60, session=lease(world, "s"))
    world.settle(1)
    world.routers["r0"].queue.in_flight.grow(f"q{step.number}", 70, world.now)
    world.settle(2)
    run = world.routers["r0"].queue.in_flight.running[f"q{step.number}"]
    assert run.place is not None
    assert (run.place.tokens, run.tokens, run.owed_tokens) == (100, 30, 0)
    world.finish("r0", f"q{step.number}")
    world.settle(2)
    world.accounted()


def test_the_use_of_a_session_is_charged_to_its_tenant() -> None:
    world = make_world(slots=1)
    opened(world, "s", 400)
    holder = world.arrive("r0", NORMAL, tokens=10, tenant="another")
    world.settle(2)
    before = world.arrive("r0", NORMAL, tokens=10, tenant="t1")
    step = world.arrive("r0", NORMAL, tokens=300, session=lease(world, "s"), tenant="t0")
    world.settle(1)
    world.routers["r0"].queue.in_flight.progress(f"q{step.number}", 250)
    world.settle(1)
    first = world.arrive("r0", NORMAL, tokens=10, tenant="t0")
    second = world.arrive("r0", NORMAL, tokens=10, tenant="t1")
    world.settle(1)
    for name in (holder, before):
        world.finish("r0", f"q{name.number}")
        world.settle(2)
    assert (first.state, second.state) == ("waits", "runs"), "t0 has had more"
    world.bring_to_rest()


def test_an_id_that_is_no_session_is_known_as_none_without_a_message() -> None:
    world = make_world(routers=2)
    opened(world, "s", 10)
    for router in world.routers.values():
        assert list(router.queue.sessions) == ["t0 s"]
    world.quota.queue.close_session("t0 s", world.now)
    world.settle(2)
    assert not any(router.queue.sessions for router in world.routers.values())


def test_what_an_actor_could_not_book_of_a_session_is_on_no_request_any_more() -> None:
    world = make_world()
    opened(world, "s", 100)
    first = world.arrive("r0", NORMAL, tokens=40, session=lease(world, "s"))
    world.settle(1)
    held = world.routers["r0"].queue.in_flight
    assert first.place is not None
    assert held.places() == (first.place,)
    held.on_action(Booked((Amount("another", 1, 40),), ()), world.now)
    assert held.places() == (first.place,)
    held.on_action(Booked((first.place,), ()), world.now)
    assert held.places() == ()


# Nothing of a place is lost or granted twice, and who waits for it waits no longer than need be


@pytest.mark.parametrize("is_back", [False, True])
def test_a_router_that_drops_the_engine_of_a_session_is_granted_its_place_no_more(is_back: bool) -> None:
    """The place was granted to another request of the router that had just dropped it, and its charge given back."""
    world = make_world(slots=2)
    opened(world, "s", 600)
    first = world.arrive("r0", NORMAL, tokens=400, session=lease(world, "s"))
    others = [world.arrive("r0", NORMAL, tokens=400, session=lease(world, "s")) for _ in range(2)]
    world.settle(2)
    assert [one.state for one in others] == ["waits"] * 2
    router = world.routers["r0"]
    incarnation = router.queue.router_session.incarnation
    router.running.pop(f"q{first.number}").state = "done"
    router.queue.in_flight.drop_engine("e0")
    if is_back:
        router.queue.set_reachability(MODEL, "e0", True, world.now)
    world.settle(6)
    assert router.queue.router_session.incarnation == incarnation
    assert sum(one.state == "runs" for one in others) == is_back
    world.bring_to_rest()


def test_service_while_nobody_waits_puts_a_tenant_behind_nobody_though_an_agents_request_runs() -> None:
    """An agent's request kept the counters of its class: what a tenant had in a quiet hour counted against it later."""
    world = make_world(slots=1)
    opened(world, "s", 100)
    world.arrive("r0", NORMAL, tokens=100, session=lease(world, "s"), tenant="t0")
    world.settle(10)
    router = world.routers["r0"]
    for _ in range(20):
        alone = world.arrive("r0", NORMAL, tokens=20, tenant="a")
        router.running.pop(f"q{alone.number}").state = "done"
        world.perform(router, router.queue.on_done(f"q{alone.number}", world.now, 1000, 500))
        world.settle(1)
    world.settle(5)
    holder = world.arrive("r0", NORMAL, tokens=20, tenant="x")
    world.settle(1)
    many = [world.arrive("r0", NORMAL, tokens=20, tenant="b") for _ in range(10)]
    world.settle(1)
    late = world.arrive("r0", NORMAL, tokens=20, tenant="a")
    world.settle(1)
    ended = 0
    while late.state == "waits":
        for name in (holder, *many):
            if name.state == "runs":
                world.finish("r0", f"q{name.number}")
                ended += 1
        world.settle(1)
    assert ended <= 2
    world.bring_to_rest()


@pytest.mark.parametrize("slots", [1, 4])
def test_a_session_does_not_end_while_a_request_of_it_runs_or_waits_elsewhere(slots: int) -> None:
    world = make_world(slots=slots)
    opened(world, "s", 100, ttl_s=3.0)
    world.arrive("r0", NORMAL, tokens=50)
    world.settle(1)
    step = world.arrive("r0", NORMAL, tokens=160, session=lease(world, "s"))
    world.settle(40)
    assert (step.state, step.place) == ("waits" if slots == 1 else "runs", None)
    assert "t0 s" in world.quota.sessions.by_session_id
    world.bring_to_rest()


@pytest.mark.parametrize("how", ["the engine drains", "the router does not reach it", "another session takes its room"])
def test_a_request_that_waits_for_its_sessions_engine_runs_elsewhere_once_that_cannot_take_it(how: str) -> None:
    world = World({"e0": (1, 2000), "e1": (1, 1000)}, 2)
    world.settle(6)
    session = opened(world, "s", 100)
    assert session.engine == "e0"
    first = world.arrive("r1", NORMAL, tokens=100, session=lease(world, "s"))
    world.settle(1)
    second = world.arrive("r1", NORMAL, tokens=50, session=lease(world, "s"))
    third = world.arrive("r1", NORMAL, tokens=50)
    world.settle(1)
    waits = world.arrive("r0", NORMAL, tokens=600, session=lease(world, "s"))
    world.settle(1)
    assert [(one.state, one.engine) for one in (first, second, third)] == [("runs", "e0")] * 2 + [("runs", "e1")]
    if how == "the engine drains":
        world.quota.drain(DrainRequest("e0"), world.now)
    elif how == "the router does not reach it":
        router = world.routers["r0"]
        world.perform(router, router.queue.set_reachability(MODEL, "e0", False, world.now))
    else:
        asked = SessionRequest("t9 u", MODEL, 1300, 60.0, world.now + 50.0, request_class=CRITICAL)
        world.quota.on_open_session(asked, world.now)
        world.settle(1)
        world.finish("r1", f"q{second.number}")
        world.settle(1)
    world.settle(1)
    world.finish("r1", f"q{third.number}")
    world.settle(4)
    assert (waits.state, waits.engine) == ("runs", "e1")


def granted_in_its_place(world: World) -> tuple[str, list[object]]:
    """A request that was granted the place of its session: the session's lease, and what its router was sent."""
    opened(world, "s", 100)
    sent = list[object]()
    perform = world.routers["r0"].queue.on_action
    world.routers["r0"].queue.on_action = lambda action, now: sent.append(action) or perform(action, now)  # type: ignore[method-assign, func-returns-value]
    step = world.arrive("r0", NORMAL, tokens=60, session=lease(world, "s"))
    world.settle(1)
    assert step.place is not None
    return lease(world, "s"), sent


def test_a_router_of_the_release_before_is_informed_of_the_place_as_it_knows_it() -> None:
    world = make_world()
    world.quota.queue.router_sessions.by_router["r0"].takes_lease = False
    place, sent = granted_in_its_place(world)
    drawn, granted = sent[-2:]
    assert isinstance(granted, Grant)
    assert drawn == SessionDraw(granted.request_id, place, 1, 60)
    world.bring_to_rest()


def test_a_router_of_this_release_knows_the_place_by_the_grant_alone() -> None:
    world = make_world()
    place, sent = granted_in_its_place(world)
    (granted,) = [one for one in sent if isinstance(one, Grant | SessionDraw)]
    assert isinstance(granted, Grant)
    assert granted.lease == place
    world.bring_to_rest()
