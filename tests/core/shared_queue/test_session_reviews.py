"""Openings that wait outside the queue: when they are tried again, in which order, and how many in one event."""

from __future__ import annotations

from serve_app.core.memory import session_name
from serve_app.core.queue import QueuePolicy, TenantPolicy
from serve_app.core.shared_queue.session_admission import REVIEWED_AT_ONCE
from serve_app.types import RequestClass
from tests.core.shared_queue.test_session_shares import LIMIT, ask, opened, world
from tests.core.shared_queue.world import MODEL, World

LOW, NORMAL, HIGH, CRITICAL = RequestClass
MANY = 3 * REVIEWED_AT_ONCE


def wait_to_open(there: World, tenant: str, tokens: int, **more: object) -> str:
    asked = ask(tenant, "s", tokens, **{"wait_until": there.now + 300.0, "max_share": 1.0} | more)
    assert there.quota.on_open_session(asked, there.now) is None
    return asked.session_id


def go_on(there: World) -> int:
    """The ticks that the actor asks for at once; returns how many."""
    queue = there.quota.queue
    for count in range(1000):
        due = queue.next_due()
        if due is None or due > there.now:
            return count
        queue.on_tick(there.now)
    raise AssertionError("a busy loop")


def test_the_highest_class_is_tried_first_however_many_wait() -> None:
    there = world()
    opened(there, "agents", "s", LIMIT, max_share=1.0)
    for number in range(MANY):
        wait_to_open(there, f"low{number}", LIMIT, request_class=LOW)
    high = wait_to_open(there, "urgent", LIMIT, request_class=HIGH)
    there.quota.queue.close_session(session_name("agents", "s"), there.now)
    go_on(there)
    assert list(there.quota.sessions.by_session_id) == [high]


def test_of_equal_openings_the_first_to_arrive_is_first() -> None:
    there = world()
    opened(there, "agents", "s", LIMIT, max_share=1.0)
    first, *_ = [wait_to_open(there, f"t{number}", LIMIT) for number in range(MANY)]
    there.quota.queue.close_session(session_name("agents", "s"), there.now)
    go_on(there)
    assert list(there.quota.sessions.by_session_id) == [first]


def test_an_opening_behind_many_that_do_not_fit_opens_without_another_event() -> None:
    there = world()
    opened(there, "agents", "s0", 100, max_share=1.0)
    opened(there, "agents", "s1", LIMIT - 100, max_share=1.0)
    for number in range(MANY):
        wait_to_open(there, f"large{number}", LIMIT, request_class=HIGH)
    small = wait_to_open(there, "small", 100)
    there.quota.queue.close_session(session_name("agents", "s0"), there.now)
    assert go_on(there) >= 2
    assert small in there.quota.sessions.by_session_id


def test_all_that_fit_open_after_one_session_has_ended() -> None:
    there = world()
    opened(there, "agents", "s", LIMIT, max_share=1.0)
    for number in range(MANY):
        wait_to_open(there, f"t{number}", 5)
    there.quota.queue.close_session(session_name("agents", "s"), there.now)
    go_on(there)
    assert len(there.quota.sessions.by_session_id) == MANY
    assert not there.quota.queue.session_admission.waiting()


def test_openings_are_tried_again_when_shares_change_or_an_engine_starts() -> None:
    there = world(desk=TenantPolicy(share=0.6))
    bounded = wait_to_open(there, "other", 400)
    there.settle(4)
    assert bounded not in there.quota.sessions.by_session_id
    there.policy = QueuePolicy(1000, 60.0)
    there.routers["r0"].line.serve(MODEL, there.policy)
    there.settle(4)
    there.wait(1.0)
    assert bounded in there.quota.sessions.by_session_id
    second = wait_to_open(there, "another", LIMIT)
    there.wait(1.0)
    assert second not in there.quota.sessions.by_session_id
    there.start_engine("e1", 4, 1000)
    there.wait(1.0)
    assert there.quota.sessions.by_session_id[second].engine == "e1"
