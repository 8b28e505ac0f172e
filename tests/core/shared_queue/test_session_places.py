"""Requests of a session: in its place, or wholly in the common pool of its engine."""

from __future__ import annotations

import pytest

from serve_app.core.shared_queue.messages import Amount, Booked
from serve_app.types import RequestClass
from tests.core.shared_queue.test_sessions import lease, opened, world
from tests.core.shared_queue.world import MODEL

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
    assert not there.quota.queue.granting.models[MODEL].admission.queue.by_session


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
