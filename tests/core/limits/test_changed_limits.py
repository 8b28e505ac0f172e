"""Limits that a key gets while its requests run."""

from __future__ import annotations

import pytest

from serve_app.core.limits import Charged, Kind, Limits
from serve_app.core.limits.decisions import Refusal
from serve_app.core.limits.policy import NOTHING
from serve_app.core.times import LIMIT_WAIT_S
from tests.core.limits.world import SCOPE, World

BEFORE = Limits(requests_per_minute=60_000)
AT_ONCE = Limits(requests_per_minute=60_000, max_concurrent=2)
QUOTA = Limits(requests_per_minute=60_000, tokens_per_day=1000)


@pytest.mark.parametrize("routers", [1, 3])
def test_requests_that_ran_before_a_limit_at_once_make_no_room_in_it_with_their_ends(routers: int) -> None:
    world = World(routers)
    ran = [world.ask(f"r{number % routers}", BEFORE) for number in range(6)]
    world.run(0.5)
    first = world.ask("r0", AT_ONCE)
    world.run(0.5)
    for request_id in ran:
        world.end(request_id, 1)
    world.run(3.0)
    world.end(first, 1)
    world.run(2.0)
    for number in range(12):
        world.ask(f"r{number % routers}", AT_ONCE)
        world.run(0.02)
    world.run(0.5)
    assert world.running[SCOPE] == 2
    world.begin_session("r0")
    world.run(1.0)
    assert world.running[SCOPE] == 2
    pool = world.actor.scopes[SCOPE].pools[Kind.CONCURRENT]
    assert (pool.level, sum(pool.credit.values())) == (0.0, 2.0)


def test_a_router_that_begins_another_session_holds_no_slots_for_requests_that_ran_before_the_limit() -> None:
    world = World(1)
    ran = [world.ask("r0", BEFORE) for _ in range(6)]
    world.run(0.5)
    reported: list[object] = []
    world.ask("r0", AT_ONCE, done=reported.append)
    world.run(0.5)
    world.begin_session("r0")
    world.run(0.5)
    world.ask("r0", AT_ONCE, done=reported.append)
    world.run(0.5)
    assert [type(one) for one in reported] == [Charged, Charged]
    for request_id in ran:
        world.end(request_id, 1)
    world.run(2.0)
    pool = world.actor.scopes[SCOPE].pools[Kind.CONCURRENT]
    assert (pool.level, sum(pool.credit.values())) == (0.0, 2.0)


def test_routers_that_learn_of_a_limit_late_make_it_no_larger() -> None:
    world = World(2)
    reported: list[Charged | Refusal] = []
    for number in range(5):  # the actor goes by the limits that came last
        world.ask("r0", AT_ONCE, done=reported.append)
        world.run(0.5)
        world.ask("r1", Limits(requests_per_minute=60_000 + number), done=reported.append)
        world.run(0.5)
    world.ask("r0", AT_ONCE, done=reported.append)
    world.run(0.5)
    for message in reported:
        world.end(message.request_id, 1)
    world.run(15.0)
    for number in range(12):
        world.ask(f"r{number % 2}", AT_ONCE)
        world.run(0.02)
    world.run(0.5)
    assert world.running[SCOPE] == 2


def test_what_ran_before_a_quota_counts_in_it_by_its_use() -> None:
    world = World(1)
    world.actor.asks_store = True
    ran = [world.ask("r0", BEFORE, tokens=100) for _ in range(5)]
    world.run(0.5)
    reported: list[object] = []
    world.ask("r0", QUOTA, tokens=100, done=reported.append)
    world.run(0.1)
    assert world.actor.take_unknown() == [SCOPE]
    world.actor.on_used(SCOPE, NOTHING, world.actor.calendar.period, world.now)
    world.run(LIMIT_WAIT_S + 1.0)  # this actor sends with its next tick
    assert [type(one) for one in reported] == [Charged]
    for number, request_id in enumerate(ran):
        world.end(request_id, 80 if number else None)  # the first one failed
    world.run(3.0)
    scope = world.actor.scopes[SCOPE]
    assert scope.pools[Kind.TOKENS_OF_DAY].balance == pytest.approx(1000 - 100 - 4 * 80)
    assert scope.pools[Kind.REQUESTS].balance == pytest.approx(60_000)
