"""An action of the actor that a router cannot apply costs its own request, and no other one."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.core.limits import Charged, Kind, LimitedRequest, LimitGrant, Limits
from serve_app.core.limits.decisions import Refusal
from serve_app.core.shared_queue.router_queue import RouterQueue
from serve_app.types import RequestClass
from tests.core.limits.stream_world import StreamWorld
from tests.core.shared_queue.test_faults import connected, full


class Broken(Exception):
    """What nobody expects."""


def fail_at(router_queue: RouterQueue, ticket: str, *, after: bool) -> None:
    """The actions on this ticket fail, before or after they have done what they do."""
    act = router_queue.on_action

    def instead(action: Any, now: float) -> list[Any]:
        is_it = ticket in (getattr(action, "ticket", ""), getattr(action, "request_id", ""))
        if is_it and not after:
            raise Broken
        done = act(action, now)
        if is_it:
            raise Broken
        return done

    router_queue.on_action = instead  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_grant_that_cannot_be_applied_ends_its_request_and_the_others_run(after: bool) -> None:
    world = connected(slots=4, routers=1)
    running = full(world)
    waits = [world.arrive("r0", RequestClass.NORMAL) for _ in range(4)]
    world.settle(1)
    router_queue = world.routers["r0"].queue
    broken = router_queue.pending.by_request_id[f"q{waits[0].number}"]
    fail_at(router_queue, broken.ticket, after=after)
    for name in running:
        world.finish("r0", name)
    world.settle(4)
    assert [req.state for req in waits] == ["refused", *(["runs"] * 3)]
    assert [(one.request_id, type(one.error)) for one in router_queue.applied.failed] == [(broken.request_id, Broken)]
    assert not router_queue.alone
    for name in list(world.routers["r0"].running):
        world.finish("r0", name)
    world.settle(4)
    assert router_queue.in_flight.held("e") == ("e", 0, 0)
    world.accounted()


def test_a_grant_that_cannot_be_applied_ends_no_request_that_waits_for_its_limit() -> None:
    world = connected(slots=4, routers=1)
    running = full(world)
    waits = world.arrive("r0", RequestClass.NORMAL)
    world.settle(1)
    router_queue = world.routers["r0"].queue
    broken = router_queue.pending.by_request_id[f"q{waits.number}"]
    for number in range(10):  # more than have asked the queue: as many have asked for each number
        scopes = (("key:k", Limits(max_concurrent=1)),)
        router_queue.charge(LimitedRequest(f"c{number}", scopes, 10, 0, b"%d" % number, may_wait=True), world.now)
    world.settle(2)
    charged, router_queue.limits.decided = router_queue.limits.decided, []
    assert [type(one) for one in charged] == [Charged]
    fail_at(router_queue, broken.ticket, after=False)
    for name in running:
        world.finish("r0", name)
    world.settle(4)
    assert waits.state == "refused"
    assert {one.request_id for one in router_queue.applied.failed} == {broken.request_id}
    assert router_queue.limits.decided == []
    assert len(router_queue.limits.pending) == 9


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Charged, Refusal])
def test_a_limit_s_decision_that_cannot_be_applied_costs_at_most_its_request(kind: type, after: bool) -> None:
    world = StreamWorld(1)
    world.run(1.5)
    (router,) = world.routers.values()
    burst = 100 if kind is Charged else 1
    scopes = {"key:k": Limits(requests_per_minute=60, burst_requests=burst)}
    reported: list[Any] = []
    if kind is Refusal:
        world.ask(router.name, scopes)
        world.run(0.5)
    names = [world.ask(router.name, scopes, done=reported.append) for _ in range(6)]
    limits = router.core.limits
    fail_at(router.core, limits.pending[names[0]].ticket, after=after)
    world.run(0.5)
    decided = {one.request_id: one for one in reported}
    broken = decided.pop(names[0])
    if after:  # it was decided before the error
        assert isinstance(broken, kind)
    else:
        assert isinstance(broken, Refusal)
        assert (broken.limit, broken.retry_after_s) == ("", 1.0)
    assert {type(one) for one in decided.values()} == {kind}
    assert decided.keys() == set(names[1:])
    assert [one.request_id for one in router.core.applied.failed] == [names[0]]
    assert (limits.pending, limits.tickets) == ({}, {})
    assert not router.core.alone


def test_slots_of_a_limit_whose_grants_could_not_be_applied_are_free_again() -> None:
    world = StreamWorld(1)
    world.run(1.5)
    (router,) = world.routers.values()
    core = router.core
    act = router.core.on_action
    broken = list[LimitGrant]()

    def instead(action: Any, now: float) -> list[Any]:
        if isinstance(action, LimitGrant) and len(broken) < 2:
            broken.append(action)
            raise Broken
        return act(action, now)

    core.on_action = instead  # type: ignore[method-assign]
    reported: list[Any] = []
    for _ in range(4):
        world.ask(router.name, {"key:k": Limits(max_concurrent=2)}, done=reported.append)
        world.run(1.0)
    assert [type(one) for one in reported] == [Refusal, Refusal, Charged, Charged]
    assert world.actor.queue.limits.scopes["key:k"].pools[Kind.CONCURRENT].level == 0.0
    assert not core.alone


def test_a_row_over_its_tenant_s_limits_of_batches_is_refused_by_name() -> None:
    world = StreamWorld(1)
    world.run(1.5)
    (name,) = world.routers
    scopes = {"batch:t": Limits(requests_per_minute=60, burst_requests=1)}
    reported: list[Any] = []
    for _ in range(2):
        world.ask(name, scopes, done=reported.append)
        world.run(0.5)
    assert isinstance(reported[0], Charged)
    assert reported[1].limit == "60 requests per minute of the batches of this tenant"
