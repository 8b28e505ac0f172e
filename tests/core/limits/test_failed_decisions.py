"""A decision of the limits that fails while its request waits costs that request, and nothing of others."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.limits import Charged, Limits, actor_limits
from serve_app.core.limits.decisions import Refusal
from serve_app.core.limits.policy import NOTHING
from serve_app.core.limits.pools import Pool
from serve_app.core.limits.reservations import key_of
from tests.core.limits.stream_world import StreamWorld
from tests.core.shared_queue.test_applied_events import Broken, fails

ONE_A_SECOND = Limits(requests_per_minute=60, burst_requests=1)


def incarnations(world: StreamWorld) -> list[int]:
    return [router.core.router_session.incarnation for router in world.routers.values()]


def kinds(world: StreamWorld, reported: list[Any], names: list[str]) -> list[type | None]:
    """Of the decisions on these requests; None: there is none."""
    decided = {one.request_id: type(one) for one in reported}
    assert not world.actor.queue.limits.reservations.tickets
    return [decided.get(name) for name in names]


def test_a_request_that_fails_when_the_store_has_answered_is_refused_and_the_others_are_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = StreamWorld(2)
    world.run(1.5)
    first, second = world.routers.values()
    limits = world.actor.queue.limits
    reported = list[Any]()
    limits.asks_store = True
    quota = {"key:k": Limits(requests_per_day=1000)}
    names = [
        world.ask(router.name, quota, done=reported.append, fingerprint=print_)
        for router, print_ in ((first, b"poison"), (second, b"1"), (second, b"2"))
    ]
    world.run(1.0)
    assert reported == []
    begun = incarnations(world)
    monkeypatch.setattr(actor_limits, "key_of", fails(key_of, lambda _, print_: print_ == b"poison", after=False))
    limits.on_used("key:k", NOTHING, limits.calendar.period, world.now)
    world.run(2.0)
    assert kinds(world, reported, names) == [Refusal, Charged, Charged]
    assert incarnations(world) == [begun[0] + 1, begun[1]]
    assert "Broken" in "".join(world.actor.queue.take_notes())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_grant_to_a_waiting_request_that_fails_is_a_refusal_and_those_behind_it_are_charged(
    monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    world = StreamWorld(2)
    world.run(1.5)
    first, second = world.routers.values()
    reported: list[Any] = []
    world.ask(first.name, {"key:k": ONE_A_SECOND})
    world.run(0.1)
    names = []
    for router in (first, second, second):
        names.append(world.ask(router.name, {"key:k": ONE_A_SECOND}, done=reported.append, may_wait=True))
        world.run(0.1)
    assert reported == []
    begun = incarnations(world)
    called = list[object]()

    def is_first(*given: object) -> bool:
        called.append(given)
        return len(called) == 1

    monkeypatch.setattr(Pool, "release", fails(Pool.release, is_first, after=after))
    world.run(4.0, world.check_pools)
    assert called
    assert kinds(world, reported, names) == [Refusal, Charged, Charged]
    assert incarnations(world) == [begun[0] + 1, begun[1]]
    assert Broken.__name__ in "".join(world.actor.queue.take_notes())
    world.run(60.0)
    assert not any(scope.entries for scope in world.actor.queue.limits.scopes.values())
