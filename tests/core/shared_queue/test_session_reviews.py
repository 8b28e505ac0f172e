"""Openings that wait outside the queue: when they are tried again, in which order, and how many in one event."""

from __future__ import annotations

from serve_app.core.memory import session_name
from serve_app.core.queue import QueuePolicy, TenantPolicy
from serve_app.core.shared_queue.session_admission import REVIEWED_AT_ONCE
from serve_app.types import RequestClass
from tests.core.shared_queue.test_session_shares import LIMIT, ask, make_world, opened
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass
MANY = 3 * REVIEWED_AT_ONCE


def wait_to_open(world: World, tenant: str, tokens: int, **more: object) -> str:
    asked = ask(tenant, "s", tokens, **{"wait_until": world.now + 300.0, "max_share": 1.0} | more)
    assert world.quota.on_open_session(asked, world.now) is None
    return asked.session_id


def go_on(world: World) -> int:
    """The ticks that the actor asks for at once; returns how many."""
    queue = world.quota.queue
    for count in range(1000):
        due = queue.next_due()
        if due is None or due > world.now:
            return count
        queue.on_tick(world.now)
    raise AssertionError("a busy loop")


def test_the_highest_class_is_tried_first_however_many_wait() -> None:
    world = make_world()
    opened(world, "agents", "s", LIMIT, max_share=1.0)
    for number in range(MANY):
        wait_to_open(world, f"low{number}", LIMIT, request_class=LOW)
    high = wait_to_open(world, "urgent", LIMIT, request_class=HIGH)
    world.quota.queue.close_session(session_name("agents", "s"), world.now)
    go_on(world)
    assert list(world.quota.sessions.by_session_id) == [high]


def test_of_equal_openings_the_first_to_arrive_is_first() -> None:
    world = make_world()
    opened(world, "agents", "s", LIMIT, max_share=1.0)
    first, *_ = [wait_to_open(world, f"t{number}", LIMIT) for number in range(MANY)]
    world.quota.queue.close_session(session_name("agents", "s"), world.now)
    go_on(world)
    assert list(world.quota.sessions.by_session_id) == [first]


def test_an_opening_behind_many_that_do_not_fit_opens_without_another_event() -> None:
    world = make_world()
    opened(world, "agents", "s0", 100, max_share=1.0)
    opened(world, "agents", "s1", LIMIT - 100, max_share=1.0)
    for number in range(MANY):
        wait_to_open(world, f"large{number}", LIMIT, request_class=HIGH)
    small = wait_to_open(world, "small", 100)
    world.quota.queue.close_session(session_name("agents", "s0"), world.now)
    assert go_on(world) >= 2
    assert small in world.quota.sessions.by_session_id


def test_all_that_fit_open_after_one_session_has_ended() -> None:
    world = make_world()
    opened(world, "agents", "s", LIMIT, max_share=1.0)
    for number in range(MANY):
        wait_to_open(world, f"t{number}", 5)
    world.quota.queue.close_session(session_name("agents", "s"), world.now)
    go_on(world)
    assert len(world.quota.sessions.by_session_id) == MANY
    assert not world.quota.queue.session_admission.waiting()


def test_openings_are_tried_again_when_shares_change_or_an_engine_starts() -> None:
    world = make_world(office=TenantPolicy(share=0.6))
    bounded = wait_to_open(world, "other", 400)
    world.settle(4)
    assert bounded not in world.quota.sessions.by_session_id
    world.policy = QueuePolicy(1000, 60.0)
    world.routers["r0"].queue.serve(MODEL, world.policy)
    world.settle(4)
    world.wait(1.0)
    assert bounded in world.quota.sessions.by_session_id
    second = wait_to_open(world, "another", LIMIT)
    world.wait(1.0)
    assert second not in world.quota.sessions.by_session_id
    world.start_engine("e1", 4, 1000)
    world.wait(1.0)
    assert world.quota.sessions.by_session_id[second].engine == "e1"
