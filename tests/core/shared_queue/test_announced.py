"""What begins on a router's credit is announced with the next message, and ends as what the actor has granted."""

from __future__ import annotations

from typing import Any

from serve_app.core.shared_queue.delivery import BATCH
from serve_app.core.shared_queue.messages import Began, CreditUsage, Done, KvTokenRequest, RouterMessage
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import connected
from tests.core.shared_queue.world import Message, World

LOW = RequestClass.LOW


def sent(world: World, name: str, *, beat: bool = False) -> RouterMessage | None:
    """The next message of a router, which arrives, and its answer."""
    reported = world.routers[name].queue.next_message(world.now, beat=beat)
    if reported is not None:
        answered = world.deliver(Message(name, world.now, reported))
        assert answered is not None
        world.deliver(answered)
    return reported


def of_kind(reported: RouterMessage | None, kind: type[Any]) -> list[Any]:
    assert reported is not None
    return [event for event in reported.events if isinstance(event, kind)]


def known(world: World) -> set[str]:
    return set(world.quota.queue.requests.by_ticket)


def test_a_request_on_credit_makes_no_message_and_goes_with_the_next_one() -> None:
    world = connected(slots=40, routers=1)
    router_queue = world.routers["r0"].queue
    req = world.arrive("r0", LOW)
    assert sent(world, "r0") is None
    assert router_queue.has_reports
    world.now += 0.5
    reported = sent(world, "r0", beat=True)
    (began,) = of_kind(reported, Began)
    ticket = router_queue.in_flight.running[f"q{req.number}"].ticket
    assert (began.run.arrival.request_id, began.run.running_s) == (ticket, 0.5)
    assert known(world) == {ticket}
    world.bring_to_rest()


def test_one_that_ends_before_any_message_is_a_part_of_a_sum() -> None:
    world = connected(slots=4, routers=1)
    for _ in range(3):
        req = world.arrive("r0", LOW, tenant="t")
        world.finish("r0", f"q{req.number}")
    reported = sent(world, "r0", beat=True)
    assert of_kind(reported, CreditUsage) == [CreditUsage("m", LOW, "t", 15, 15)]
    assert not of_kind(reported, Began)
    assert not of_kind(reported, Done)
    world.accounted()


def test_while_nobody_waits_an_end_returns_nothing_and_makes_no_message() -> None:
    world = connected(slots=4, routers=1)
    req = world.arrive("r0", LOW)
    sent(world, "r0", beat=True)
    router_queue = world.routers["r0"].queue
    ticket = router_queue.in_flight.running[f"q{req.number}"].ticket
    before = world.quota.queue.accounts.account("r0", "e")
    world.finish("r0", f"q{req.number}")
    assert sent(world, "r0") is None
    reported = sent(world, "r0", beat=True)
    assert of_kind(reported, Done) == [Done(ticket, 5, 5, "e", 0, 0)]
    assert (known(world), world.quota.queue.accounts.account("r0", "e")) == (set(), before)
    world.accounted()


def test_while_somebody_waits_an_end_returns_everything_at_once_what_has_grown_on_credit_too() -> None:
    world = connected(slots=4, routers=1)
    req = world.arrive("r0", LOW, tokens=10)
    sent(world, "r0", beat=True)
    router_queue = world.routers["r0"].queue
    assert router_queue.in_flight.grow(f"q{req.number}", 7, world.now)
    ticket = router_queue.in_flight.running[f"q{req.number}"].ticket
    router_queue.router_session.state = router_queue.router_session.state._replace(contended=frozenset({"m"}))
    world.finish("r0", f"q{req.number}")
    assert Done(ticket, 5, 5, "e", 1, 17) in of_kind(sent(world, "r0"), Done)
    world.settle(4)
    world.accounted()


def test_growth_beyond_the_credit_is_asked_for_after_the_request_was_announced() -> None:
    world = connected(slots=40, routers=1)
    req = world.arrive("r0", LOW, tokens=10)
    router_queue = world.routers["r0"].queue
    assert not router_queue.in_flight.grow(f"q{req.number}", router_queue.accounts.credit("e")[1] + 1, world.now)
    reported = sent(world, "r0")
    assert reported is not None
    assert [type(event) for event in reported.events] == [Began, KvTokenRequest]
    world.settle(2)
    assert not router_queue.in_flight.running[f"q{req.number}"].owed_tokens
    world.bring_to_rest()


def test_a_message_announces_as_many_as_it_has_room_for_the_oldest_first_and_ends_before_that() -> None:
    world = World({"e": (8 * BATCH, 10**6)}, 1)
    world.settle(4)
    router_queue = world.routers["r0"].queue
    reqs = [world.arrive("r0", LOW) for _ in range(BATCH + 10)]
    reported = sent(world, "r0", beat=True)
    assert [one.run.arrival.request_id for one in of_kind(reported, Began)] == [
        router_queue.in_flight.running[f"q{req.number}"].ticket for req in reqs[:BATCH]
    ]
    for req in reqs[:BATCH]:
        world.finish("r0", f"q{req.number}")
    assert len(of_kind(sent(world, "r0", beat=True), Done)) == BATCH
    assert len(of_kind(sent(world, "r0", beat=True), Began)) == 10
    world.bring_to_rest()


def test_an_actor_of_a_release_that_does_not_know_announcements_gets_none() -> None:
    world = connected(slots=4, routers=1)
    router_queue = world.routers["r0"].queue
    router_queue.router_session.takes_begun = False
    req = world.arrive("r0", LOW)
    reported = router_queue.next_message(world.now, beat=True)
    assert not of_kind(reported, Began)
    world.finish("r0", f"q{req.number}")
    reported = router_queue.next_message(world.now, beat=True)
    assert (of_kind(reported, Done), len(of_kind(reported, CreditUsage))) == ([], 1)


def test_what_runs_is_known_while_the_engine_is_closed_and_its_end_leaves_both_sides_equal() -> None:
    world = connected(slots=4, routers=2)
    runs = [world.arrive("r0", LOW) for _ in range(2)]
    world.settle(2)
    world.crash()
    world.settle_one("r0")  # the other may hold a part of the engine: nothing is granted there
    world.settle_one("r0")
    assert world.quota.queue.models.recovering() == {"m"}
    assert len(known(world)) == 2
    world.finish("r0", f"q{runs[0].number}")
    world.settle_one("r0")
    assert len(known(world)) == 1
    world.settle(4)
    world.check_known()
    world.accounted()
    world.bring_to_rest()


def test_an_end_of_a_request_that_the_actor_does_not_know_returns_what_it_held() -> None:
    world = connected(slots=4, routers=1)
    req = world.arrive("r0", LOW, slots=2, tokens=30)
    sent(world, "r0", beat=True)
    router_queue = world.routers["r0"].queue
    run = router_queue.in_flight.running[f"q{req.number}"]
    world.quota.queue.requests.cancel(run.ticket, world.now)  # the actor has lost it, and not its account
    world.quota.queue.accounts.charge("r0", "e", 2, 30)
    router_queue.router_session.state = router_queue.router_session.state._replace(contended=frozenset({"m"}))
    world.finish("r0", f"q{req.number}")
    world.settle(4)
    world.accounted()
    assert not world.quota.queue.take_notes()
