"""Requests of a session: in its place, or wholly in the common pool of its engine."""

from __future__ import annotations

import pytest

from serve_app.core.memory import DrainRequest, SessionRequest
from serve_app.core.queue import Grant
from serve_app.core.shared_queue.messages import Amount, Booked, SessionDraw
from serve_app.types import RequestClass
from tests.core.shared_queue.test_sessions import lease, opened, world
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass


def test_a_sessions_request_runs_while_the_line_is_full_and_holds_no_slot_of_it() -> None:
    there = world(slots=1)
    opened(there, "s", 100)
    there.arrive("r0", CRITICAL, tokens=20)
    waits = there.arrive("r0", CRITICAL, tokens=20)
    there.settle(2)
    step = there.arrive("r0", LOW, tokens=60, session=lease(there, "s"))
    there.settle(1)
    assert (step.state, waits.state) == ("runs", "waits")
    assert step.place == Amount(lease(there, "s"), 1, 60)
    there.bring_to_rest()


def test_twenty_routers_cannot_run_twenty_sequences_of_one_session() -> None:
    there = world(routers=20, slots=1)
    opened(there, "s", 100)
    holder = there.arrive("r0", NORMAL, tokens=10)
    there.settle(2)
    steps = [there.arrive(name, NORMAL, tokens=5, session=lease(there, "s")) for name in there.routers]
    there.settle(2)
    assert sum(step.state == "runs" for step in steps) == 1
    assert holder.state == "runs"
    there.bring_to_rest()


@pytest.mark.parametrize("tokens", [60, 100])
def test_the_next_request_of_a_session_begins_as_the_one_before_ends_though_it_came_before_that_was_known(
    tokens: int,
) -> None:
    there = world(routers=2, slots=1)
    opened(there, "s", 100)
    holder = there.arrive("r0", NORMAL, tokens=10)
    there.settle(2)
    waits = there.arrive("r0", CRITICAL, tokens=10)
    first = there.arrive("r0", NORMAL, tokens=tokens, session=lease(there, "s"))
    there.settle(1)
    second, third = (there.arrive("r1", LOW, tokens=tokens, session=lease(there, "s")) for _ in range(2))
    there.settle(1)
    assert (first.state, second.state, third.state) == ("runs", "waits", "waits")
    for router, before, after in (("r0", first, second), ("r1", second, third)):
        there.finish(router, f"q{before.number}")
        there.settle(1)
        assert (after.state, after.place) == ("runs", Amount(lease(there, "s"), 1, tokens))
    assert (holder.state, waits.state) == ("runs", "waits")
    there.bring_to_rest()
    assert not there.quota.queue.models.by_name[MODEL].admission.queue.by_session


def test_what_is_too_long_for_a_session_runs_on_its_engine_and_takes_nothing_of_the_session() -> None:
    there = world(engines=2)
    session = opened(there, "s", 100)
    more = there.arrive("r0", NORMAL, tokens=160, session=lease(there, "s"))
    there.settle(1)
    assert (more.state, more.engine, more.place) == ("runs", session.engine, None)
    assert there.quota.ledger.free(lease(there, "s")) == 100
    there.finish("r0", f"q{more.number}")
    there.settle(2)
    there.accounted()


def test_what_is_too_long_for_a_session_and_for_its_engine_beside_it_runs_on_another_engine() -> None:
    there = world(engines=2)
    session = opened(there, "s", 600)
    more = there.arrive("r0", NORMAL, tokens=700, session=lease(there, "s"))
    there.settle(2)
    assert more.state == "runs"
    assert more.engine != session.engine
    there.bring_to_rest()


def test_a_request_that_waits_for_the_place_runs_anywhere_on_its_engine_first_if_there_is_room() -> None:
    there = world(engines=2, slots=1)
    session = opened(there, "s", 100)
    first, second, third = (there.arrive("r0", NORMAL, tokens=50, session=lease(there, "s")) for _ in range(3))
    there.settle(2)
    assert [one.state for one in (first, second, third)] == ["runs", "runs", "waits"], "it waits for its engine"
    assert [one.engine for one in (first, second)] == [session.engine] * 2
    assert (first.place, second.place) == (Amount(lease(there, "s"), 1, 50), None)
    there.finish("r0", f"q{second.number}")
    there.settle(2)
    assert (third.state, third.place) == ("runs", None)
    there.bring_to_rest()


@pytest.mark.parametrize("how", ["closed", "expired", "engine gone", "engine dropped by the router"])
def test_a_request_that_waits_when_its_session_has_ended_is_an_ordinary_one(how: str) -> None:
    there = world(engines=2, slots=1)
    session = opened(there, "s", 100, ttl_s=2.0)
    first, second, third = (there.arrive("r0", NORMAL, tokens=50, session=lease(there, "s")) for _ in range(3))
    there.settle(1)
    assert third.state == "waits"
    if how == "closed":
        there.quota.queue.close_session("t0 s", there.now)
    elif how == "expired":
        for one in (first, second):
            there.finish("r0", f"q{one.number}")
        assert there.arrive("r0", NORMAL, tokens=50).state == "waits"
        there.settle(1)
    elif how == "engine gone":
        there.end_engine(session.engine)
    else:
        for one in (first, second):
            there.routers["r0"].running.pop(f"q{one.number}").state = "done"
        there.routers["r0"].line.in_flight.drop_engine(session.engine)
    there.settle(3)
    assert third.state == "runs"
    there.bring_to_rest()


def test_a_request_in_the_place_of_its_session_is_not_stopped_for_others_and_costs_its_class_no_minimum_share() -> None:
    there = world(slots=1)
    there.preemptible = True
    opened(there, "s", 100)
    step = there.arrive("r0", LOW, tokens=60, session=lease(there, "s"))
    holder = there.arrive("r0", LOW, tokens=60)
    there.settle(1)
    assert (step.state, step.place is not None, holder.state) == ("runs", True, "runs")
    waits = there.arrive("r0", CRITICAL, tokens=60)
    there.settle(4)
    assert (step.stops, waits.state) == (0, "waits")
    there.bring_to_rest()


def test_a_running_request_that_outgrows_its_estimate_takes_from_its_session_first() -> None:
    there = world()
    opened(there, "s", 100)
    step = there.arrive("r0", NORMAL, tokens=60, session=lease(there, "s"))
    there.settle(1)
    there.routers["r0"].line.in_flight.grow(f"q{step.number}", 70, there.now)
    there.settle(2)
    run = there.routers["r0"].line.in_flight.running[f"q{step.number}"]
    assert run.place is not None
    assert (run.place.tokens, run.tokens, run.owed_tokens) == (100, 30, 0)
    there.finish("r0", f"q{step.number}")
    there.settle(2)
    there.accounted()


def test_the_use_of_a_session_is_charged_to_its_tenant() -> None:
    there = world(slots=1)
    opened(there, "s", 400)
    holder = there.arrive("r0", NORMAL, tokens=10, tenant="another")
    there.settle(2)
    before = there.arrive("r0", NORMAL, tokens=10, tenant="t1")
    step = there.arrive("r0", NORMAL, tokens=300, session=lease(there, "s"), tenant="t0")
    there.settle(1)
    there.routers["r0"].line.in_flight.progress(f"q{step.number}", 250)
    there.settle(1)
    first = there.arrive("r0", NORMAL, tokens=10, tenant="t0")
    second = there.arrive("r0", NORMAL, tokens=10, tenant="t1")
    there.settle(1)
    for one in (holder, before):
        there.finish("r0", f"q{one.number}")
        there.settle(2)
    assert (first.state, second.state) == ("waits", "runs"), "t0 has had more"
    there.bring_to_rest()


def test_an_id_that_is_no_session_is_known_as_none_without_a_message() -> None:
    there = world(routers=2)
    opened(there, "s", 10)
    for router in there.routers.values():
        assert list(router.line.sessions) == ["t0 s"]
    there.quota.queue.close_session("t0 s", there.now)
    there.settle(2)
    assert not any(router.line.sessions for router in there.routers.values())


def test_what_an_actor_could_not_book_of_a_session_is_on_no_request_any_more() -> None:
    there = world()
    opened(there, "s", 100)
    first = there.arrive("r0", NORMAL, tokens=40, session=lease(there, "s"))
    there.settle(1)
    held = there.routers["r0"].line.in_flight
    assert first.place is not None
    assert held.places() == (first.place,)
    held.on_action(Booked((Amount("another", 1, 40),), ()), there.now)
    assert held.places() == (first.place,)
    held.on_action(Booked((first.place,), ()), there.now)
    assert held.places() == ()


# Nothing of a place is lost or granted twice, and who waits for it waits no longer than need be


@pytest.mark.parametrize("is_back", [False, True])
def test_a_router_that_drops_the_engine_of_a_session_is_granted_its_place_no_more(is_back: bool) -> None:
    """The place was granted to another request of the router that had just dropped it, and its charge given back."""
    there = world(slots=2)
    opened(there, "s", 600)
    first = there.arrive("r0", NORMAL, tokens=400, session=lease(there, "s"))
    others = [there.arrive("r0", NORMAL, tokens=400, session=lease(there, "s")) for _ in range(2)]
    there.settle(2)
    assert [one.state for one in others] == ["waits"] * 2
    router = there.routers["r0"]
    incarnation = router.line.router_session.incarnation
    router.running.pop(f"q{first.number}").state = "done"
    router.line.in_flight.drop_engine("e0")
    if is_back:
        router.line.set_reachability(MODEL, "e0", True, there.now)
    there.settle(6)
    assert router.line.router_session.incarnation == incarnation
    assert sum(one.state == "runs" for one in others) == is_back
    there.bring_to_rest()


def test_service_while_nobody_waits_puts_a_tenant_behind_nobody_though_an_agents_request_runs() -> None:
    """An agent's request kept the counters of its class: what a tenant had in a quiet hour counted against it later."""
    there = world(slots=1)
    opened(there, "s", 100)
    there.arrive("r0", NORMAL, tokens=100, session=lease(there, "s"), tenant="t0")
    there.settle(10)
    router = there.routers["r0"]
    for _ in range(20):
        alone = there.arrive("r0", NORMAL, tokens=20, tenant="a")
        router.running.pop(f"q{alone.number}").state = "done"
        there.perform(router, router.line.on_done(f"q{alone.number}", there.now, 1000, 500))
        there.settle(1)
    there.settle(5)
    holder = there.arrive("r0", NORMAL, tokens=20, tenant="x")
    there.settle(1)
    many = [there.arrive("r0", NORMAL, tokens=20, tenant="b") for _ in range(10)]
    there.settle(1)
    late = there.arrive("r0", NORMAL, tokens=20, tenant="a")
    there.settle(1)
    ended = 0
    while late.state == "waits":
        for one in (holder, *many):
            if one.state == "runs":
                there.finish("r0", f"q{one.number}")
                ended += 1
        there.settle(1)
    assert ended <= 2
    there.bring_to_rest()


@pytest.mark.parametrize("slots", [1, 4])
def test_a_session_does_not_end_while_a_request_of_it_runs_or_waits_elsewhere(slots: int) -> None:
    there = world(slots=slots)
    opened(there, "s", 100, ttl_s=3.0)
    there.arrive("r0", NORMAL, tokens=50)
    there.settle(1)
    step = there.arrive("r0", NORMAL, tokens=160, session=lease(there, "s"))
    there.settle(40)
    assert (step.state, step.place) == ("waits" if slots == 1 else "runs", None)
    assert "t0 s" in there.quota.sessions.by_session_id
    there.bring_to_rest()


@pytest.mark.parametrize("how", ["the engine drains", "the router does not reach it", "another session takes its room"])
def test_a_request_that_waits_for_its_sessions_engine_runs_elsewhere_once_that_cannot_take_it(how: str) -> None:
    there = World({"e0": (1, 2000), "e1": (1, 1000)}, 2)
    there.settle(6)
    session = opened(there, "s", 100)
    assert session.engine == "e0"
    first = there.arrive("r1", NORMAL, tokens=100, session=lease(there, "s"))
    there.settle(1)
    second = there.arrive("r1", NORMAL, tokens=50, session=lease(there, "s"))
    third = there.arrive("r1", NORMAL, tokens=50)
    there.settle(1)
    waits = there.arrive("r0", NORMAL, tokens=600, session=lease(there, "s"))
    there.settle(1)
    assert [(one.state, one.engine) for one in (first, second, third)] == [("runs", "e0")] * 2 + [("runs", "e1")]
    if how == "the engine drains":
        there.quota.drain(DrainRequest("e0"), there.now)
    elif how == "the router does not reach it":
        router = there.routers["r0"]
        there.perform(router, router.line.set_reachability(MODEL, "e0", False, there.now))
    else:
        asked = SessionRequest("t9 u", MODEL, 1300, 60.0, there.now + 50.0, request_class=CRITICAL)
        there.quota.on_open_session(asked, there.now)
        there.settle(1)
        there.finish("r1", f"q{second.number}")
        there.settle(1)
    there.settle(1)
    there.finish("r1", f"q{third.number}")
    there.settle(4)
    assert (waits.state, waits.engine) == ("runs", "e1")


def granted_in_its_place(there: World) -> tuple[str, list[object]]:
    """A request that was granted the place of its session: the session's lease, and what its router was sent."""
    opened(there, "s", 100)
    sent = list[object]()
    perform = there.routers["r0"].line.on_action
    there.routers["r0"].line.on_action = lambda action, now: sent.append(action) or perform(action, now)  # type: ignore[method-assign, func-returns-value]
    step = there.arrive("r0", NORMAL, tokens=60, session=lease(there, "s"))
    there.settle(1)
    assert step.place is not None
    return lease(there, "s"), sent


def test_a_router_of_the_release_before_is_told_of_the_place_as_it_knows_it() -> None:
    there = world()
    there.quota.queue.actor_sessions.sessions["r0"].takes_lease = False
    place, sent = granted_in_its_place(there)
    drawn, granted = sent[-2:]
    assert isinstance(granted, Grant)
    assert drawn == SessionDraw(granted.request_id, place, 1, 60)
    there.bring_to_rest()


def test_a_router_of_this_release_knows_the_place_by_the_grant_alone() -> None:
    there = world()
    place, sent = granted_in_its_place(there)
    (granted,) = [one for one in sent if isinstance(one, Grant | SessionDraw)]
    assert isinstance(granted, Grant)
    assert granted.lease == place
    there.bring_to_rest()
