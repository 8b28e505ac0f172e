"""After a restart of the actor a quota counts what was used of it, as a router has heard or as the store tells."""

from __future__ import annotations

import pytest

from serve_app.core.limits import Charged, Kind, LimitReason, Limits
from serve_app.core.limits.decisions import Refusal
from serve_app.core.quota import Quota
from serve_app.core.times import LIMIT_WAIT_S
from tests.core.limits.stream_world import StreamWorld
from tests.core.limits.world import SCOPE, World

HOUR_S = 3600.0
QUOTA = Limits(requests_per_day=3)


def used(amounts: dict[Kind, float]) -> tuple[float, ...]:
    return tuple(amounts.get(kind, 0.0) for kind in Kind)


def restart(world: World) -> None:
    world.start_actor()
    world.actor.asks_store = True
    world.run(0.1)


def tell(world: World, amounts: dict[Kind, float]) -> None:
    """The store tells what was used."""
    assert world.actor.take_unknown() == [SCOPE]
    world.actor.on_used(SCOPE, used(amounts), world.actor.calendar.period, world.now)
    world.run(LIMIT_WAIT_S + 1.0)  # this actor sends with its next tick


@pytest.mark.parametrize("uptime_s", [HOUR_S, 200 * HOUR_S], ids=["up for an hour", "up for days"])
@pytest.mark.parametrize("was_used", [0, 3])
def test_an_allowance_that_no_router_knows_is_asked_of_the_store(uptime_s: float, was_used: int) -> None:
    world = World(now=uptime_s)
    world.run(0.1)
    world.sessions.clear()  # the actor is away
    found: list[Charged | Refusal] = []
    world.ask("r0", QUOTA, done=found.append)
    restart(world)
    assert found == []
    tell(world, {Kind.REQUESTS_OF_DAY: float(was_used)})
    (reported,) = found
    if was_used:
        assert isinstance(reported, Refusal)
        assert (reported.reason, reported.limit) == (LimitReason.ALLOWANCE, "3 requests per day of this key")
    else:
        assert isinstance(reported, Charged)


def test_a_quota_that_the_last_actor_did_not_know_is_asked_of_the_store() -> None:
    world = World(1)
    world.actor.asks_store = True
    limits = Limits(requests_per_day=3, tokens_per_minute=10, requests_per_minute=60, burst_requests=10)
    world.ask("r0", limits, tokens=11)  # refused: it never fits; the state is told with that
    world.run(0.1)
    assert world.actor.take_unknown() == [SCOPE]
    restart(world)
    found: list[Charged | Refusal] = []
    world.ask("r0", limits, done=found.append)
    world.run(0.1)
    assert found == []
    tell(world, {Kind.REQUESTS_OF_DAY: 3.0})
    assert [type(one) for one in found] == [Refusal]


def test_of_two_allowances_the_one_that_a_router_knows_is_not_asked_for() -> None:
    world = World(1)
    world.actor.asks_store = True
    for _ in range(2):
        world.ask("r0", QUOTA)
    world.run(0.1)
    tell(world, {})
    world.sessions.clear()
    both = Limits(requests_per_day=3, tokens_per_day=100)
    found: list[Charged | Refusal] = []
    world.ask("r0", both, tokens=40, done=found.append)
    restart(world)
    tell(world, {Kind.REQUESTS_OF_DAY: 3.0, Kind.TOKENS_OF_DAY: 60.0})  # one request is charged that has not ended
    assert [type(one) for one in found] == [Charged]
    world.ask("r0", both, tokens=0, done=found.append)
    world.run(1.0)
    assert isinstance(found[-1], Refusal)
    assert found[-1].limit == "3 requests per day of this key"


def test_a_router_tells_where_the_store_is_before_it_tells_what_it_holds() -> None:
    world = StreamWorld(1)
    world.run(1.5)
    ((name, router),) = world.routers.items()
    router.core.set_store("sqlite:///here")
    world.ask(name, {SCOPE: Limits(requests_per_day=10_000)})
    world.run(0.5)
    limits = world.actor.queue.limits
    limits.on_used(SCOPE, used({}), limits.calendar.period, world.now)
    world.run(0.5)
    router.core.begin_incarnation(9, world.now)
    message = router.core.next_message(world.now)
    assert message is not None
    another = Quota(9, {}, world.now)  # it has lost its checkpoint: it does not wait for the routers of the last one
    another.on_exchange(message, world.now)
    assert another.queue.limits.take_unknown() == [SCOPE]
