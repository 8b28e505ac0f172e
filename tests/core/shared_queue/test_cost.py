"""What an event costs does not grow with what runs and waits beside it: counted in steps of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.exchange import SLOTS, Router, add_engine, connected
from serve_app.core.memory import Device, SessionRequest, session_name
from serve_app.core.quota import Quota
from serve_app.core.shared_queue.messages import AccountReport, Amount, EngineReachability, RouterMessage
from tests.core.interpreter_steps import steps
from tests.core.shared_queue.world import MODEL, World


def review_steps(sessions: int) -> int:
    """Of a look at the sessions that wait, beside so many open ones on two engines, which take no more."""
    world = World({"e0": (4, 10_000), "e1": (4, 10_000)}, 1)
    world.settle(6)
    for number in range(sessions + 4):
        wait_until = world.now + 60.0 if number >= sessions else None
        name = session_name("t", f"s{number}")
        ask = SessionRequest(name, MODEL, 10, 60.0, per_engine=sessions // 2, wait_until=wait_until)
        world.quota.on_open_session(ask, world.now)
    admission = world.quota.queue.session_admission
    assert len(admission.waiting()) == 4
    return steps(lambda: admission.on_tick(world.now))


def test_a_look_at_the_sessions_that_wait_does_not_look_at_the_open_ones() -> None:
    assert review_steps(400) <= review_steps(20)


def with_openings(engines: int, pending: int) -> Quota:
    """A session fills each engine; requests wait, and so many openings for half of an engine."""
    quota, (router,) = connected(engines, 4, 100_000, 1)
    limit = quota.ledger.limit("e0")
    for number in range(engines):
        quota.on_open_session(SessionRequest(session_name(f"t{number}", "s"), MODEL, limit, 600.0), 1.0)
    for number in range(pending):
        name = session_name(f"w{number}", "s")
        quota.on_open_session(SessionRequest(name, MODEL, limit // 2 + number, 600.0, wait_until=500.0), 1.0)
    router.say(quota, tuple(router.arrive() for _ in range(50)), 1.0)
    most_steps(quota, lambda: quota.queue.on_tick(1.1), 1.1)
    assert len(quota.queue.session_admission.waiting()) == pending
    return quota


def test_a_tick_does_not_look_at_each_engine_for_each_session_that_waits() -> None:
    def tick_steps(pending: int) -> int:
        quota = with_openings(100, pending)
        return steps(lambda: quota.queue.on_tick(1.2))

    assert tick_steps(200) < 2 * tick_steps(20)


def test_the_sessions_that_wait_are_reviewed_a_part_at_a_time_when_one_ends() -> None:
    def close_steps(pending: int) -> int:
        quota = with_openings(50, pending)
        most = most_steps(quota, lambda: quota.queue.close_session("t0 s", 1.2), 1.2)
        assert quota.queue.models.by_name[MODEL].admission.waiting > pending, "all can have that engine, and are queued"
        return most

    assert close_steps(400) < 2 * close_steps(100)


def most_steps(quota: Quota, act: Callable[[], Any], now: float) -> int:
    """Of the event and of each tick that the actor asks for at once."""
    most = steps(act)
    for _ in range(1_000):
        due = quota.queue.next_due()
        if due is None or due > now:
            return most
        most = max(most, steps(lambda: quota.queue.on_tick(now)))
    raise AssertionError("a busy loop")


def new_engine_steps(waiting: int) -> int:
    """Of the longest event as an engine starts: at first only a router reaches it that has no request."""
    quota, (first, second) = connected(2, 4, 100_000, 2, running=1)
    for _ in range(waiting // 100):
        second.say(quota, tuple(second.arrive() for _ in range(100)), 0.0)
    add_engine(quota, "e1", 0.1)
    reaches = (EngineReachability(MODEL, "e1", True),)
    most = most_steps(quota, lambda: first.say(quota, reaches, 0.2), 0.2)
    admission = quota.queue.models.by_name[MODEL].admission
    assert admission.waiting == waiting - 4, "its router does not reach the new engine"
    most = max(most, most_steps(quota, lambda: second.say(quota, reaches, 0.3), 0.3))
    assert admission.waiting == waiting - 4 - SLOTS
    return most


@pytest.mark.long
def test_a_new_engine_moves_the_requests_that_wait_a_part_at_a_time() -> None:
    assert new_engine_steps(1_600) < 2 * new_engine_steps(400)


def recovery_steps(waiting: int) -> int:
    """Of the longest event after a recovery with so many requests."""
    before, (router,) = connected(1, 4, 100_000, 1)
    router.say(before, (router.arrive(),), 0.0)
    stored = {key: value for key, (_, value) in before.changes().items()}
    quota = Quota(2, stored, 0.0)
    quota.on_devices([Device("n", 0, 1000, 0)], 0.0)
    names = ["e0"]
    first = Router("r1", names)
    late = Router("r0", names)
    first.say(quota, first.first, 0.0)
    for _ in range(waiting // 100):
        first.say(quota, tuple(first.arrive() for _ in range(100)), 0.0)
    late.say(quota, late.first, 0.1)
    most = most_steps(quota, lambda: quota.queue.on_tick(1.0), 1.0)
    assert quota.queue.models.by_name[MODEL].admission.waiting == waiting - 4
    assert not quota.queue.requests.postponed.by_router
    return most


def test_what_waited_during_a_recovery_is_admitted_a_part_at_a_time() -> None:
    assert recovery_steps(1_600) < 2 * recovery_steps(400)


def test_a_tick_during_a_recovery_does_not_look_at_what_waits_for_each_engine() -> None:
    def tick_steps(waiting: int) -> int:
        before, routers = connected(8, 4, 100_000, 2)
        routers[0].say(before, (routers[0].arrive(),), 0.0)
        quota = Quota(2, {key: value for key, (_, value) in before.changes().items()}, 0.0)
        quota.on_devices([Device("n", number, 1000, 0) for number in range(8)], 0.0)
        other = Router("r1", [f"e{number}" for number in range(8)])
        other.say(quota, other.first, 0.0)
        for _ in range(waiting // 100):
            other.say(quota, tuple(other.arrive() for _ in range(100)), 0.0)
        return steps(lambda: quota.on_tick(0.5))

    assert tick_steps(1_000) < 1.1 * tick_steps(100)


def test_the_figures_of_the_models_do_not_look_at_each_router() -> None:
    def figures_steps(count: int) -> int:
        quota, routers = connected(4, 4, 100_000, count)
        for number, router in enumerate(routers):
            router.say(quota, (AccountReport((Amount("e0", 1, 10),), (), 0),), 0.1)
            assert quota.queue.in_use("e0") == (number + 1, 10 * (number + 1))
        return steps(quota.model_figures)

    assert figures_steps(16) < 1.1 * figures_steps(2)


def router_end_steps(running: int, *, begins_again: bool) -> int:
    """Of the longest event as a router ends of which so many requests run, and as many wait."""
    quota, (ends, other) = connected(2, running // 2, 10_000 * running, 2)
    for _ in range(2 * running // 100):
        ends.say(quota, tuple(ends.arrive() for _ in range(100)), 0.0)
    requests = quota.queue.requests
    names = ["e0", "e1"]
    assert sum(bool(one.engine) for one in requests.by_ticket.values()) == running
    if begins_again:
        again = Router(ends.name, names)  # it counts its tickets from the beginning
        message = RouterMessage(again.name, 2, quota.epoch, 1, (*again.first, again.arrive()), 0, 0)
        most = most_steps(quota, lambda: quota.on_exchange(message, 0.1), 0.1)
    else:
        quota.queue.applied.unsure.add(ends.name)
        most = most_steps(quota, lambda: other.say(quota, (), 0.1), 0.1)
    assert len(requests.by_ticket) == begins_again
    assert not requests.incarnations.ended
    return most


@pytest.mark.parametrize("begins_again", [False, True])
def test_the_requests_of_a_router_that_ends_are_forgotten_a_part_at_a_time(begins_again: bool) -> None:
    less, more = (router_end_steps(running, begins_again=begins_again) for running in (200, 1_000))
    assert more < 1.5 * less


def test_the_requests_of_a_router_that_is_gone_are_forgotten_a_part_at_a_time() -> None:
    def gone_steps(running: int) -> int:
        quota, (ends, other) = connected(2, running // 2, 10_000 * running, 2)
        for _ in range(2 * running // 100):
            ends.say(quota, tuple(ends.arrive() for _ in range(100)), 0.0)
        for now in (2.0, 3.0):
            other.say(quota, (), now)
        quota.ledger.leave(ends.name)
        most = most_steps(quota, lambda: quota.on_tick(3.5), 3.5)
        assert not quota.queue.requests.by_ticket
        assert [one.lease_id for one in quota.ledger.leases() if one.owner == ends.name] == []
        return most

    assert gone_steps(1_000) < 1.5 * gone_steps(200)
