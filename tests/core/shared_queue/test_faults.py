"""Single faults on the way between a router and the quota actor's line."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from serve_app.core.shared_queue.delivery import ARRIVAL_WINDOW
from serve_app.core.shared_queue.messages import ActorReply, CreditChange, CreditGrant, CreditRequest, Done
from serve_app.core.times import ACTOR_STALL_S, FENCE_S, UNRESPONSIVE_S
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, Message, World

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW


def connected(slots: int = 2, routers: int = 2) -> World:
    world = World({"e": (slots, 1000)}, routers)
    world.settle(4)
    return world


def full(world: World) -> list[str]:
    """Everything runs, for the first router; returns the requests."""
    reqs = [world.arrive("r0", LOW) for _ in range(world.size["e"][0])]
    world.settle(3)
    assert all(req.state == "runs" for req in reqs)
    return [f"q{req.number}" for req in reqs]


def answer(world: World, name: str) -> Message:
    """The actor's answer to what a router has to say, which is yet to arrive."""
    reported = world.routers[name].queue.next_message(world.now, beat=True)
    assert reported is not None
    reply = world.deliver(Message(name, world.now, reported))
    assert reply is not None
    return reply


def begun(world: World) -> Message:
    """The first message of another incarnation of the first router, which the actor has answered."""
    router_queue = world.routers["r0"].queue
    router_queue.begin_incarnation(router_queue.router_session.epoch, world.now)
    first = router_queue.next_message(world.now)
    assert first is not None
    message = Message("r0", world.now, first)
    reply = world.deliver(message)
    assert reply is not None
    world.deliver(reply)
    return message


def test_a_grant_that_comes_too_late_is_not_used() -> None:
    world = connected()
    running = full(world)
    waits = world.arrive("r1", HIGH)
    answer(world, "r1")
    world.finish("r0", running[0])
    world.settle_one("r0")
    late = answer(world, "r1")
    assert late.reply is not None
    assert late.reply.actions
    world.now += FENCE_S
    world.deliver(late)
    assert waits.state == "waits", "the actor may have taken the router for gone, and given its place to another"
    world.settle(4)
    assert waits.state == "runs"
    world.accounted()


def test_a_grant_in_an_answer_that_nobody_waits_for_any_more_is_repeated() -> None:
    world = connected()
    running = full(world)
    waits = world.arrive("r1", HIGH)
    answer(world, "r1")
    given_up = world.routers["r1"].queue.router_session.watch_message()
    world.finish("r0", running[0])
    world.settle_one("r0")
    swallowed = world.quota.on_watch(given_up, world.now, timed_out=True)
    assert swallowed is not None
    assert swallowed.actions
    world.settle(2)  # and no call of the router has failed
    assert waits.state == "runs"
    world.accounted()


def test_an_answer_to_an_older_incarnation_changes_nothing() -> None:
    world = connected()
    running = full(world)
    waits = world.arrive("r1", HIGH)
    answer(world, "r1")
    world.finish("r0", running[0])
    world.settle_one("r0")
    old = answer(world, "r1")
    router_queue = world.routers["r1"].queue
    router_queue.begin_incarnation(router_queue.router_session.epoch, world.now)
    assert old.reply is not None
    forged = old.reply._replace(seq=1, actions=(CreditChange("e", 1, 1),))  # a number that the new one expects
    before = router_queue.accounts.credit("e")
    world.deliver(replace(old, reply=forged))
    assert (waits.state, router_queue.accounts.credit("e")) == ("waits", before)
    world.settle(4)
    assert waits.state == "runs"
    world.accounted()


def test_a_message_of_a_session_that_was_begun_by_an_old_message_is_stale() -> None:
    world = connected(routers=1)
    first = begun(world)
    world.routers["r0"].queue.serve("other", world.policy)
    world.settle(1)
    world.wait(6.0)  # it falls silent, and its session is gone
    world.deliver(first)  # the network had kept this
    later = answer(world, "r0").reply
    assert later is not None
    assert later.is_stale


def test_an_incarnation_that_was_ended_is_not_begun_again_by_a_copy_of_its_first_message() -> None:
    world = connected(routers=1)
    first = begun(world)
    world.settle(2)
    world.arrive("r0", LOW)  # of this the first message says nothing
    world.settle(2)
    world.quota.queue.router_sessions.end("r0")
    reply = world.deliver(first)
    assert reply is not None
    assert reply.reply is not None
    assert reply.reply.is_stale
    world.check_accounts()
    world.settle(3)
    world.accounted()


def test_credit_of_a_router_that_was_silent_is_not_claimed_from_the_next_actor() -> None:
    world = connected()
    assert world.routers["r0"].queue.accounts.credit("e")[0] == 1
    for _ in range(12):
        world.settle_one("r1")
        world.wait(0.4)  # r0 is silent
    assert not world.quota.ledger.knows("r0")
    both = world.arrive("r1", HIGH, slots=2)
    for _ in range(3):
        world.settle_one("r1")
    assert both.state == "runs", "the silent router's slot is another's"
    world.crash()
    for _ in range(3):
        world.settle_one("r0")  # first
        world.settle_one("r1")
    assert world.quota.queue.accounts.account("r1", "e")[0] == 2
    assert world.routers["r0"].queue.accounts.credit("e")[0] == 0
    world.settle(4)
    world.finish("r1", f"q{both.number}")
    world.settle(8)
    world.accounted()


def test_what_is_handed_in_after_a_crash_comes_in_by_age_whichever_router_reports_first() -> None:
    world = connected()
    running = full(world)
    old = world.arrive("r1", NORMAL)
    world.now += 0.5
    young = world.arrive("r0", NORMAL)
    world.settle(1)
    world.crash()
    for name in ("r0", "r1", "r0", "r1", "r0", "r1"):
        world.settle_one(name)
    world.settle(2)
    world.finish("r0", running[0])
    world.settle(2)
    assert (old.state, young.state) == ("runs", "waits")


def test_no_credit_is_given_while_somebody_waits() -> None:
    world = connected(slots=4)
    running = full(world)
    world.arrive("r0", LOW)
    world.settle(1)
    router_queue = world.routers["r1"].queue
    world.finish("r0", running[0])
    assert router_queue.accounts.credit("e") == (0, 0)
    router_queue.router_session.put(CreditRequest("e", 0, 0))
    reported = answer(world, "r1")
    assert reported.reply is not None
    assert [(one.slots, one.tokens) for one in reported.reply.actions if isinstance(one, CreditGrant)] == [(0, 0)]
    world.deliver(reported)
    world.settle(4)
    for request_id in list(world.routers["r0"].running):
        world.finish("r0", request_id)
    world.settle(8)
    assert router_queue.accounts.credit("e")[0] > 0
    world.accounted()


def test_an_engine_that_was_taken_for_gone_is_used_once_all_have_reported_what_runs_there() -> None:
    world = connected()
    full(world)
    waits = world.arrive("r1", HIGH)
    world.settle(1)
    for _ in range(6):
        world.settle_one("r0")
        world.settle_one("r1")
        world.wait(1.0, engines_speak=False)
    assert "e/slots" not in world.quota.ledger
    world.engine_speaks("e")
    for _ in range(4):
        world.settle_one("r1")
    assert waits.state == "waits", "two run there, by a router that has not spoken yet"
    world.settle(4)
    assert waits.state == "waits"
    world.accounted()


def test_a_router_that_was_long_without_the_actor_has_little_to_say() -> None:
    world = connected(routers=1)
    router = world.routers["r0"]
    full(world)
    for _ in range(4200):
        world.cancel("r0", f"q{world.arrive('r0', LOW).number}")
    assert len(router.queue.router_session.sending) <= ARRIVAL_WINDOW
    world.settle(4)
    assert len(router.queue.router_session.sending) == 0
    world.accounted()


def test_nothing_is_left_of_what_has_ended() -> None:
    world = connected(slots=4, routers=3)
    for number in range(300):
        name = f"r{number % 3}"
        req = world.arrive(name, LOW)
        if number % 7 == 0:
            world.restart_router(name)
        elif number % 3 == 0:
            world.settle(1)
        if req.state == "runs" and f"q{req.number}" in world.routers[name].running:
            world.finish(name, f"q{req.number}")
    world.settle(4)
    world.bring_to_rest()
    actor_queue = world.quota.queue
    kept = [
        actor_queue.requests.postponed.by_router,
        actor_queue.published.calm_at,
        actor_queue.requests.by_ticket,
        actor_queue.requests.grants_to_retry,
        *(one.requests for one in actor_queue.requests.incarnations.by_router.values()),
        actor_queue.requests.incarnations.ended,
    ]
    assert [len(one) for one in kept] == [0] * len(kept)
    for name in world.routers:
        world.routers[name].alive = False
    world.wait(10.0)
    assert (len(actor_queue.router_sessions.by_router), actor_queue.models.by_name, actor_queue.models.by_engine) == (
        0,
        {},
        {},
    )
    assert [lease.lease_id for lease in world.quota.ledger.leases()] == ["e"]


def test_a_stale_reply_says_nothing_else() -> None:
    world = connected(routers=1)
    reported = world.routers["r0"].queue.next_message(world.now, beat=True)
    assert reported is not None
    reply = world.quota.on_exchange(reported._replace(epoch=0), world.now)
    assert reply == ActorReply(1, reported.incarnation, 0, 1, (), None, is_stale=True, takes_begun=True)
    assert MODEL in {one.model for one in world.routers["r0"].queue.accounts.by_engine.values()}


def test_a_request_that_ends_while_it_is_given_more_leaves_both_sides_with_the_same_count() -> None:
    world = connected(slots=2)
    running = full(world)
    router_queue = world.routers["r0"].queue
    for request_id in running:  # one of credit, one of the line
        router_queue.in_flight.grow(request_id, 500, world.now)
        reported = router_queue.next_message(world.now)
        if reported is not None:
            late = world.deliver(Message("r0", world.now, reported))
            world.finish("r0", request_id)
            assert late is not None
            world.deliver(late)
    world.settle(4)
    world.accounted()


def test_who_leaves_is_charged_what_was_made_and_not_what_was_expected() -> None:
    world = connected(slots=1, routers=1)
    router_queue = world.routers["r0"].queue
    (first,) = full(world)
    waits = world.arrive("r0", LOW)
    world.settle(2)
    router_queue.in_flight.progress(first, 3)
    world.cancel("r0", first)
    router_queue.in_flight.progress(first, 1)  # too late
    reported = router_queue.next_message(world.now, beat=True)
    assert reported is not None
    used = [one for one in reported.events if isinstance(one, Done)]
    assert [one.output_tokens for one in used] == [3]
    world.deliver(answer(world, "r0"))
    router_queue.on_lost(world.now)
    world.settle(2)
    assert waits.state == "runs"
    last = f"q{waits.number}"
    router_queue.in_flight.progress(last, 2)
    world.cancel("r0", last)
    reported = router_queue.next_message(world.now)
    assert reported is not None
    assert [one.output_tokens for one in reported.events if isinstance(one, Done)] == [2]


def test_an_error_in_the_middle_of_a_message_loses_nothing_of_the_rest() -> None:
    world = connected(slots=2, routers=2)
    running = full(world)
    waits = world.arrive("r0", HIGH)
    leaves = world.arrive("r0", LOW)
    world.settle(2)
    router_queue = world.routers["r0"].queue
    world.cancel("r0", f"q{leaves.number}")  # a word at which the actor fails
    world.finish("r0", running[1])
    reported = router_queue.next_message(world.now)
    assert reported is not None
    with mock.patch.object(world.quota.queue.requests, "cancel", side_effect=RuntimeError("no luck")):
        world.deliver(Message("r0", world.now, reported))
    assert "no luck" in "".join(world.quota.queue.take_notes())
    world.perform(world.routers["r0"], router_queue.on_lost(world.now))
    world.settle(4)
    assert waits.state == "runs"
    world.accounted()


def waiting_of(world: World, name: str) -> int:
    """How many of a router's requests the actor's line has."""
    return sum(
        ticket.startswith(f"{name}:") for ticket, one in world.quota.queue.requests.by_ticket.items() if not one.engine
    )


def test_a_router_that_hears_nothing_is_granted_nothing_more_and_its_requests_go_on_if_it_lives() -> None:
    world = connected(slots=1)
    (running,) = full(world)
    deaf = [world.arrive("r1", HIGH) for _ in range(3)]
    other = world.arrive("r0", LOW)
    world.settle(2)
    assert waiting_of(world, "r1") == 3
    world.finish("r0", running)
    world.settle_one("r0")  # the place goes to r1, which does not hear of it
    assert waiting_of(world, "r1") == 2
    for _ in range(3):
        world.quota.on_tick(world.now)
        world.now += UNRESPONSIVE_S / 2
        world.settle_one("r0")
    world.quota.on_tick(world.now)
    assert waiting_of(world, "r1") == 0, "nobody is granted what nobody hears of"
    world.settle(8)
    for _ in range(4):  # it lives: the place it did not hear of comes back, and its requests are handed in again
        (runs,) = [req for req in [other, *deaf] if req.state == "runs"]
        world.finish("r0" if runs is other else "r1", f"q{runs.number}")
        world.settle(6)
    assert [req.state for req in [other, *deaf]] == ["done"] * 4
    world.accounted()


@pytest.mark.parametrize("stood_s", [ACTOR_STALL_S, 3 * UNRESPONSIVE_S], ids=["not-noticed", "noticed"])
def test_an_actor_that_stood_still_takes_no_router_for_deaf(stood_s: float) -> None:
    world = connected(slots=1)
    full(world)
    world.arrive("r1", HIGH)
    world.settle(2)
    world.quota.on_tick(world.now)
    world.quota.queue.router_sessions.send("r1", CreditChange("e", 0, 0))  # something to hear
    world.quota.on_tick(world.now)
    world.now += stood_s
    world.quota.on_tick(world.now)
    assert waiting_of(world, "r1") == 1
