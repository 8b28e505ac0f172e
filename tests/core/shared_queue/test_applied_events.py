"""An event of a router that fails at the actor costs its own request or its router's session, and nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.core.limits import Charged, Kind, LimitRequest, Limits, lending
from serve_app.core.limits.decisions import Refusal
from serve_app.core.quota import Quota
from serve_app.core.shared_queue import messages
from serve_app.types import RequestClass
from tests.core.limits.stream_world import StreamWorld
from tests.core.shared_queue.test_faults import connected, full
from tests.core.shared_queue.world import MODEL, World


class Broken(Exception):
    """What nobody expects."""


def fails(act: Callable[..., Any], is_it: Callable[..., bool], *, after: bool) -> Callable[..., Any]:
    """`act`, which fails at what `is_it`, before or after it has done it."""

    def instead(*given: Any, **more: Any) -> Any:
        broken = is_it(*given)
        if broken and not after:
            raise Broken
        done = act(*given, **more)
        if broken:
            raise Broken
        return done

    return instead


def sessions(world: World) -> dict[str, int]:
    return {name: router.queue.router_session.incarnation for name, router in world.routers.items()}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_arrival_that_fails_is_refused_and_all_sessions_go_on(after: bool) -> None:
    world = connected(slots=1, routers=2)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    begun = sessions(world)
    requests = world.quota.queue.requests
    broken = world.arrive("r1", RequestClass.HIGH)
    ticket = world.routers["r1"].queue.pending.by_request_id[f"q{broken.number}"].ticket
    requests.arrive = fails(requests.arrive, lambda _, __, arrival, *___: arrival.request_id == ticket, after=after)  # type: ignore[method-assign]
    waits = [world.arrive(name, RequestClass.NORMAL) for name in ("r0", "r1")]
    world.settle(2)
    assert [runs.state, broken.state, *(req.state for req in waits)] == ["runs", "refused", "waits", "waits"]
    assert sessions(world) == begun
    (note,) = world.quota.queue.take_notes()
    assert ticket in note
    assert "Broken" in note
    world.finish("r0", f"q{runs.number}")
    world.settle(2)
    assert sorted(req.state for req in waits) == ["runs", "waits"]
    world.accounted()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("event", ["done", "cancel"])
def test_another_event_that_fails_ends_its_router_s_session_and_no_other(event: str, after: bool) -> None:
    world = connected(slots=1, routers=2)
    first = world.arrive("r0", RequestClass.LOW)
    world.settle(2)
    ours = world.arrive("r1", RequestClass.LOW)
    world.settle(2)
    world.finish("r0", f"q{first.number}")
    world.settle(2)  # the actor has granted ours: its end is an event
    theirs = world.arrive("r0", RequestClass.NORMAL)
    leaves = world.arrive("r1", RequestClass.NORMAL)
    world.settle(2)
    begun = sessions(world)
    requests = world.quota.queue.requests
    called = list[str]()

    def is_first(*given: Any) -> bool:
        called.append(given[1].ticket if event == "done" else given[0])
        return len(called) == 1

    setattr(requests, event, fails(getattr(requests, event), is_first, after=after))
    if event == "done":
        world.finish("r1", f"q{ours.number}")
    else:
        world.cancel("r1", f"q{leaves.number}")
    world.settle(4)
    now = sessions(world)
    assert now["r0"] == begun["r0"]
    assert now["r1"] > begun["r1"]
    assert called[0].startswith("r1:")
    assert theirs.state == ("runs" if event == "done" else "waits")
    world.accounted()


def one_granted_by_the_actor(world: World) -> tuple[str, str]:
    """The id and the ticket of a request of the first router that runs, while others of all routers wait."""
    request_ids = full(world)
    for name in [*world.routers] * 2:
        world.arrive(name, RequestClass.NORMAL)
    world.settle(2)
    world.finish("r0", request_ids[0])
    world.settle(2)
    running = world.routers["r0"].queue.in_flight.running
    return next((request_id, run.ticket) for request_id, run in running.items() if run.is_known)


def begun_anew(world: World, begun: dict[str, int]) -> set[str]:
    """The routers whose sessions have begun since."""
    return {name for name, incarnation in sessions(world).items() if incarnation > begun[name]}


@pytest.mark.parametrize("tokens", [(-1, 0), (0, -1)], ids=["prompt", "output"])
def test_an_end_with_impossible_tokens_ends_its_router_s_session_and_no_other(tokens: tuple[int, int]) -> None:
    world = connected(slots=2, routers=3)
    request_id, _ = one_granted_by_the_actor(world)
    begun = sessions(world)
    session = world.routers["r0"].queue.router_session

    def end_request(event: messages.Done) -> None:
        session.put(event._replace(prompt_tokens=tokens[0], output_tokens=tokens[1]))

    session.end_request = end_request  # type: ignore[method-assign]
    world.finish("r0", request_id)
    world.settle(4)
    assert begun_anew(world, begun) == {"r0"}
    world.accounted()


@pytest.mark.parametrize("method", ["on_done", "on_cancel"])
def test_an_end_that_fails_in_its_queue_ends_its_router_s_session_and_no_other(method: str) -> None:
    world = connected(slots=2, routers=3)
    runs, _ = one_granted_by_the_actor(world)
    begun = sessions(world)
    called = list[str]()
    waits = next(iter(world.routers["r0"].queue.pending.by_request_id))

    def is_first(ticket: str, *_: Any) -> bool:
        called.append(ticket)
        return len(called) == 1

    admission = world.quota.queue.models.by_name[MODEL].admission
    setattr(admission, method, fails(getattr(admission, method), is_first, after=False))
    if method == "on_done":
        world.finish("r0", runs)
    else:
        world.cancel("r0", waits)
    world.settle(4)
    assert called
    assert begun_anew(world, begun) == {"r0"}
    world.accounted()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_charge_that_fails_is_refused_and_the_others_are_decided(after: bool) -> None:
    world = StreamWorld(2)
    world.run(1.5)
    limits: Any = world.actor.queue.limits
    first, second = world.routers.values()
    scopes = {"key:k": Limits(requests_per_minute=600)}
    begun = [router.core.router_session.incarnation for router in (first, second)]
    reported: list[Any] = []
    names = [world.ask(router.name, scopes, done=reported.append) for router in (first, second) for _ in range(3)]
    ticket = first.core.limits.pending[names[0]].ticket
    limits.on_event = fails(
        limits.on_event, lambda _, event, *__: isinstance(event, LimitRequest) and event.ticket == ticket, after=after
    )
    world.run(1.0)
    decided = {one.request_id: type(one) for one in reported}
    assert decided.pop(names[0]) is (Charged if after else Refusal)
    assert set(decided.values()) == {Charged}
    assert decided.keys() == set(names[1:])
    now = [router.core.router_session.incarnation for router in (first, second)]
    assert now[0] == begun[0] + 1  # the actor does not know what it has charged
    assert now[1] == begun[1]


def test_slots_of_charges_that_fail_half_way_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = StreamWorld(1)
    world.run(1.5)
    (name,) = world.routers
    left = [2]

    def is_first(*_: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0

    monkeypatch.setattr(lending, "credit", fails(lending.credit, is_first, after=False))
    reported: list[Any] = []
    for _ in range(4):
        world.ask(name, {"key:k": Limits(max_concurrent=2)}, done=reported.append)
        world.run(1.0)
    assert [type(one) for one in reported] == [Refusal, Refusal, Charged, Charged]
    assert world.actor.queue.limits.scopes["key:k"].pools[Kind.CONCURRENT].level == 0.0


def test_an_error_after_which_the_books_do_not_agree_ends_all_sessions() -> None:
    world = connected(slots=1, routers=2)
    runs = world.arrive("r0", RequestClass.NORMAL)
    waits = world.arrive("r1", RequestClass.NORMAL)
    world.settle(2)
    begun = sessions(world)
    quota: Quota = world.quota
    requests = quota.queue.requests
    requests.apply_actions = fails(requests.apply_actions, lambda _, actions: bool(actions), after=False)  # type: ignore[method-assign]
    world.finish("r0", f"q{runs.number}")
    with pytest.raises(Broken):
        world.settle(1)
    world.in_transit.clear()
    for router in world.routers.values():
        world.perform(router, router.queue.on_lost(world.now))
    world.settle(6)
    assert all(now > begun[name] for name, now in sessions(world).items())
    assert waits.state == "runs"
    world.accounted()
