"""What follows from an event at the actor fails step by step: an error ends what its step was for, and no session."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest

from serve_app.core.memory import SessionRequest, session_name
from serve_app.core.shared_queue import published_state
from serve_app.core.shared_queue.early_refusal import class_figures
from serve_app.errors import ServeAppError
from serve_app.types import RequestClass
from tests.core.shared_queue.test_applied_events import Broken, fails, sessions
from tests.core.shared_queue.test_faults import connected
from tests.core.shared_queue.world import MODEL, World

STEPS = {
    "limits": ("limits", "after_event"),
    "limits at a tick": ("limits", "on_tick"),
    "requests to move": ("requests", "move"),
    "openings": ("session_admission", "settle"),
    "openings at a tick": ("session_admission", "on_tick"),
    "KV debt": ("engines", "reclaim"),
    "state": ("published", "update"),
    "figures": ("published", "update_figures"),
}


def fails_once(target: Any, name: str, *, after: bool, is_it: Callable[..., bool] = lambda *_: True) -> list[str]:
    """Break a method's next call; returns a list that then has an entry."""
    called: list[str] = []

    def is_first(*given: Any) -> bool:
        if called or not is_it(*given):
            return False
        called.append(name)
        return True

    setattr(target, name, fails(getattr(target, name), is_first, after=after))
    return called


def goes_on(world: World, begun: dict[str, int], called: list[str]) -> None:
    """One step has failed, was noted, and ended no session."""
    assert called
    assert sessions(world) == begun
    (note,) = world.quota.queue.take_notes()
    assert "Broken" in note


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_ends_no_session(step: str, after: bool) -> None:
    world = connected(slots=1, routers=2)
    runs = world.arrive("r0", RequestClass.NORMAL)
    waits = world.arrive("r1", RequestClass.NORMAL)
    world.settle(2)
    begun = sessions(world)
    path, name = STEPS[step]
    called = fails_once(attrgetter(path)(world.quota.queue), name, after=after)
    world.finish("r0", f"q{runs.number}")
    world.settle(4)
    goes_on(world, begun, called)
    assert waits.state == "runs"
    world.finish("r1", f"q{waits.number}")
    world.settle(4)
    world.accounted()


def test_figures_that_fail_are_those_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    world = connected(slots=1, routers=2)
    for _ in range(3):
        world.arrive("r0", RequestClass.NORMAL)
    world.settle(1)
    begun = sessions(world)
    broken = fails(class_figures, lambda _: True, after=False)
    monkeypatch.setattr(published_state, "class_figures", broken)
    world.settle(2)
    assert sessions(world) == begun
    assert "Broken" in world.quota.queue.take_notes()[0]
    monkeypatch.undo()
    world.settle(4)
    world.accounted()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_request_that_cannot_be_queued_again_is_refused_and_the_others_are_served(after: bool) -> None:
    world = World({"e": (1, 1000)}, 2)
    world.settle(4)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    world.start_engine("f", 2, 1000)  # no router reaches it yet: what waits avoids it
    world.notice("r0")
    world.settle(2)
    reqs = [world.arrive("r1", RequestClass.LOW) for _ in range(3)]
    for _ in range(2):
        world.arrive("r0", RequestClass.NORMAL)  # these run on f
    world.settle(2)
    assert {req.state for req in reqs} == {"waits"}
    begun = sessions(world)
    admission = world.quota.queue.models.by_name[MODEL].admission
    ticket = world.routers["r1"].queue.pending.by_request_id[f"q{reqs[0].number}"].ticket
    called = fails_once(admission, "on_arrive", after=after, is_it=lambda arrival, *_: arrival.request_id == ticket)
    world.notice("r1")
    world.settle(2)
    goes_on(world, begun, called)
    assert [req.state for req in reqs] == ["refused", "waits", "waits"]
    for request_id in list(world.routers["r0"].running):
        world.finish("r0", request_id)
    world.settle(3)
    assert [req.state for req in reqs[1:]] == ["runs", "runs"]
    assert runs.state == "done"
    world.accounted()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_opening_that_fails_is_refused_and_the_others_are_opened(after: bool) -> None:
    world = World({"e": (2, 1000)}, 1)
    world.settle(4)
    names = [session_name("t", one) for one in ("first", "second", "third")]

    def ask(name: str) -> None:
        world.quota.on_open_session(
            SessionRequest(name, MODEL, 400, 60.0, wait_until=world.now + 30.0, per_engine=1), world.now
        )

    for name in names:
        ask(name)
    world.settle(1)
    begun = sessions(world)
    openings = world.quota.queue.session_admission
    assert [one.session_id for one in openings.waiting()] == names[1:]
    called = fails_once(world.quota.sessions, "reserve", after=after)
    world.quota.queue.close_session(names[0], world.now)
    world.settle(4)
    goes_on(world, begun, called)
    outcomes = openings.take_outcomes()
    assert isinstance(outcomes[names[1]], ServeAppError)
    assert not isinstance(outcomes[names[2]], ServeAppError)
    assert list(world.quota.sessions.by_session_id) == [names[2]]
    world.quota.queue.close_session(names[2], world.now)
    world.settle(4)
    world.accounted()


def test_a_request_of_a_router_that_has_ended_is_out_of_its_queue_though_that_fails_first() -> None:
    world = connected(slots=1, routers=2)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    left, waits = (world.arrive(name, RequestClass.NORMAL) for name in ("r1", "r0"))
    world.settle(2)
    ticket = world.routers["r1"].queue.pending.by_request_id[f"q{left.number}"].ticket
    begun = sessions(world)
    admission = world.quota.queue.models.by_name[MODEL].admission
    called = fails_once(admission, "on_cancel", after=False, is_it=lambda cancelled, _: cancelled == ticket)
    world.quota.queue.remove_routers(["r1"], world.now)
    assert called
    assert ticket not in admission.queue.by_id
    world.finish("r0", f"q{runs.number}")
    world.settle(3)
    assert waits.state == "runs"
    assert sessions(world)["r0"] == begun["r0"]


def test_an_engine_whose_capacity_cannot_be_updated_is_updated_by_the_next_event() -> None:
    world = World({"e": (1, 1000), "f": (1, 1000)}, 1)
    world.settle(4)
    begun = sessions(world)
    queue = world.quota.queue
    admission = queue.models.by_name[MODEL].admission
    called = fails_once(admission, "on_pool", after=False, is_it=lambda name, *_: name == "e")
    queue.draining_engines = frozenset({"e", "f"})
    queue.on_tick(world.now)
    assert not admission.capacity.replicas["f"].has_free(1, 1)
    queue.sync_engines(["e"], world.now)
    assert not admission.capacity.replicas["e"].has_free(1, 1)
    goes_on(world, begun, called)


def test_an_error_that_every_event_repeats_ends_nobody() -> None:
    world = connected(slots=1, routers=2)
    begun = sessions(world)
    engines: Any = world.quota.queue.engines
    engines.reclaim = fails(engines.reclaim, lambda _: True, after=False)
    runs = world.arrive("r0", RequestClass.NORMAL)
    world.settle(3)
    assert runs.state == "runs"
    assert sessions(world) == begun


def test_a_broken_step_raises_what_it_raised_if_the_books_do_not_agree() -> None:
    world = connected(slots=1, routers=2)
    world.arrive("r0", RequestClass.NORMAL)
    world.settle(2)
    queue = world.quota.queue

    def break_books(_: float) -> None:
        queue.requests.by_ticket["r9:1"] = next(iter(queue.requests.by_ticket.values()))
        raise Broken

    world.arrive("r1", RequestClass.NORMAL)
    world.settle(1)
    queue.engines.reclaim = break_books  # type: ignore[assignment, method-assign]
    with pytest.raises(Broken):
        queue.on_tick(world.now)
    assert not queue.router_sessions.by_router


@pytest.mark.parametrize("is_close", [False, True])
def test_an_error_while_a_session_is_opened_or_closed_leaves_books_that_agree(is_close: bool) -> None:
    world = World({"e": (2, 100)}, 1)
    world.settle(4)
    queue = world.quota.queue
    wanted = SessionRequest("t0 s", MODEL, 80, 60.0, world.now + 5.0)
    if is_close:
        assert world.quota.on_open_session(wanted, world.now) is None, "it waits: routers have the credit"
        with mock.patch.object(queue.requests, "cancel", side_effect=RuntimeError), pytest.raises(RuntimeError):
            queue.close_session("t0 s", world.now)
    else:
        with mock.patch.object(queue.requests, "_enter_queue", side_effect=RuntimeError), pytest.raises(RuntimeError):
            world.quota.on_open_session(wanted, world.now)
    world.check_books()
