"""Whatever fails between a grant and an end, slots and tokens come back, by the actor's own books."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from serve_app.core.pools import RequestPool
from serve_app.core.queue import Admission
from serve_app.core.shared_queue import (
    actor_credit,
    actor_queue,
    delivery,
    engines,
    kv_debt,
    requests,
    router_credit,
    router_pending,
    router_queue,
    router_running,
)
from serve_app.types import RequestClass
from tests.core.shared_queue.test_faults import connected
from tests.core.shared_queue.world import World
from tests.effort import effort

ROUTER_STEPS: list[tuple[type, str]] = [
    (router_credit.RouterCredit, "grant"),
    (router_credit.RouterCredit, "add"),
    (router_credit.RouterCredit, "balance"),
    (router_running.InFlight, "begin_on_credit"),
    (router_running.InFlight, "begin_granted"),
    (router_running.InFlight, "end"),
    (router_running.InFlight, "_on_kv_token_grant"),
    (delivery.RouterSession, "put"),
    (delivery.RouterSession, "end_request"),
    (router_running.RunningRequest, "announcement"),
    (delivery.RouterSession, "on_reply"),
    (router_pending.PendingRequests, "add"),
    (router_pending.PendingRequests, "hand_in"),
    (router_pending.PendingRequests, "take_ticket"),
    (router_queue.RouterQueue, "_balance_credit"),
    (router_queue.RouterQueue, "_serve_alone"),
]
ACTOR_STEPS: list[tuple[type, str]] = [
    (actor_credit.ActorCredit, "charge"),
    (actor_credit.ActorCredit, "give_back"),
    (actor_credit.ActorCredit, "grant_credit"),
    (RequestPool, "charge"),
    (RequestPool, "give_back"),
    (kv_debt.KvDebt, "end"),
    (kv_debt.KvDebt, "add"),
    (delivery.ActorRouterSessions, "reply"),
    (requests.ActorRequests, "arrive"),
    (requests.ActorRequests, "begun"),
    (requests.ActorRequests, "done"),
    (requests.ActorRequests, "cancel"),
    (engines.ActorEngines, "_follow"),
    (requests.ActorRequests, "_begin"),
    (requests.ActorRequests, "_leave_queue"),
    (requests.ActorRequests, "apply_actions"),
    (requests.ActorRequests, "move"),
    (actor_queue.ActorQueue, "_after_event"),
    (actor_queue.ActorQueue, "_compare"),
    (Admission, "on_arrive"),
    (Admission, "on_done"),
    (Admission, "on_cancel"),
    (Admission, "on_pool"),
    (Admission, "on_returned"),
]


HISTORIES = effort(1, 3)  # in which a step fails; what it does wrong it does wrong in each


class Broken(Exception):
    """What nobody expects."""


class Faults:
    """A world with a step that fails, before or after it has done what it does, at one of its calls."""

    def __init__(self, seed: int, step: tuple[type, str], after: bool) -> None:
        self.draw = random.Random(seed)
        self.world = connected(slots=4, routers=2)
        self.world.faulty = True
        self.step = step
        self.after = after
        self.fail_at = self.draw.randint(1, 2 if step[1] == "add_usage" else 12)  # that one is seldom
        self.calls = 0

    def failing(self) -> Any:
        kind, name = self.step
        method = getattr(kind, name)

        def instead(*given: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls != self.fail_at:
                return method(*given, **more)
            if self.after:
                method(*given, **more)
            raise Broken

        return mock.patch.object(kind, name, instead)

    def tried(self, act: Any, *given: Any, **more: Any) -> None:
        """Do something, as a shell does: it goes on after an error, and says that a message may be lost."""
        try:
            act(*given, **more)
        except Broken:
            self.world.in_transit.clear()
            for router in self.world.routers.values():
                self.tried(self.world.perform, router, router.queue.on_lost(self.world.now))

    def run(self) -> World:
        world = self.world
        draw = self.draw
        with self.failing():
            for _ in range(30):
                name = draw.choice(list(world.routers))
                router = world.routers[name]
                self.tried(world.arrive, name, draw.choice(list(RequestClass)), 1, draw.randint(1, 400))
                if router.running and draw.random() < 0.5:
                    self.tried(router.queue.in_flight.progress, draw.choice(list(router.running)), 3)
                    self.tried(router.queue.in_flight.grow, draw.choice(list(router.running)), 40, world.now)
                if router.running and draw.random() < 0.6:
                    self.tried(world.finish, name, draw.choice(list(router.running)))
                waiting = [one for one, req in router.requests.items() if req.state == "waits"]
                if waiting and draw.random() < 0.2:
                    self.tried(world.cancel, name, draw.choice(waiting))
                self.tried(world.settle_one, name)
        return world


def end_all(world: World) -> None:
    """The network is well, every client leaves, and some beats pass; what only one side knows is ended by these."""
    for router in world.routers.values():
        router.queue.on_lost(world.now)
        router.requests.clear()  # all have left; some were told to the line, and some were not
        router.running.clear()
    world.perform = lambda router, actions: None  # type: ignore[method-assign]
    for _ in range(40):
        for name in world.routers:
            world.speak(name, beat=True)
            world.watch(name)
            while world.in_transit:
                answer = world.deliver(world.in_transit.pop(0))
                if answer is not None:
                    world.deliver(answer)
                    world.speak(name)
        world.wait(0.25)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", [*ROUTER_STEPS, *ACTOR_STEPS], ids=lambda step: f"{step[0].__module__}.{step[1]}")
def test_an_error_at_any_step_loses_no_slot_and_no_token(step: tuple[type, str], after: bool) -> None:
    failed = 0
    for seed in range(3):
        if failed == HISTORIES:
            break
        faults = Faults(seed, step, after)
        world = faults.run()
        failed += faults.calls >= faults.fail_at
        end_all(world)
        assert world.quota.queue.requests.by_ticket == {}
        for name, router in world.routers.items():
            assert len(router.queue.in_flight.running) == router.queue.pending.count("m") == 0
            assert router.queue.in_flight.held("e") == ("e", 0, 0)
            assert router.queue.accounts.credit("e") == world.quota.queue.accounts.account(name, "e")
        free = world.quota.queue.accounts.free("e")
        lent = [world.quota.queue.accounts.account(name, "e") for name in world.routers]
        assert tuple(free[one] + sum(had[one] for had in lent) for one in range(2)) == (4, 900)
        del world.perform
        late = [world.arrive(name, RequestClass.NORMAL, 1, 100) for name in world.routers]
        world.settle(4)
        assert [req.state for req in late] == ["runs"] * 2
    assert failed, "the step was never taken often enough"
