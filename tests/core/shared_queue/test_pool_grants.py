"""Grants from the pools of engines at the actor, where something fails or changes between."""

from __future__ import annotations

from serve_app.core.memory import SessionRequest, session_name
from serve_app.types import RequestClass
from tests.core.shared_queue.test_scope import fails_once
from tests.core.shared_queue.world import MODEL, World

NORMAL = RequestClass.NORMAL


def test_what_was_returned_is_granted_at_the_next_tick_though_serving_the_queue_has_failed() -> None:
    world = World({"e": (1, 1000)}, 2)
    world.settle(4)
    admission = world.quota.queue.models.by_name[MODEL].admission
    runs = world.arrive("r0", NORMAL)
    world.settle(2)
    waits = world.arrive("r1", NORMAL)
    world.settle(2)
    assert (runs.state, waits.state) == ("runs", "waits")
    fails_once(admission, "on_returned", after=False)
    world.quota.queue.accounts.returned["e"] = None
    world.quota.queue.on_tick(world.now)
    pool = world.quota.ledger.pool("e")
    assert pool is not None
    holder = world.quota.queue.accounts.holder("r0")
    pool.give_back(holder, *world.quota.queue.accounts.account("r0", "e"))
    world.quota.queue.on_tick(world.now)
    assert admission.waiting == 0


def test_a_queue_knows_at_once_what_a_session_that_it_has_granted_holds() -> None:
    world = World({"e": (1, 1000)}, 1)
    world.settle(4)
    admission = world.quota.queue.models.by_name[MODEL].admission
    runs = world.arrive("r0", NORMAL)
    waits = world.arrive("r0", NORMAL)
    world.settle(2)
    ask = SessionRequest(session_name("t0", "s"), MODEL, 300, 60.0, world.now + 30.0)
    assert world.quota.on_open_session(ask, world.now) is None
    for request in (runs, waits):
        world.finish("r0", f"q{request.number}")
        world.speak("r0")
        while world.in_transit:
            answer = world.deliver(world.in_transit.pop(0))
            if answer is not None:
                world.hear(answer)
    assert ask.session_id in world.quota.sessions.by_session_id
    assert admission.capacity.replicas["e"].session_kv == 300
