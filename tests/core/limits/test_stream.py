"""Limits over the routers' real stream: a network that loses, repeats and reorders; routers and the actor die."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.core.limits import Charged, Kind, LimitDecision, Limits
from serve_app.core.times import FENCE_S
from tests.core.limits.charge_log import ChargeLog
from tests.core.limits.stream_world import StreamWorld
from tests.effort import effort

SCOPES = {
    "key:a": Limits(requests_per_minute=120, tokens_per_minute=12_000, max_concurrent=6, burst_requests=20),
    "key:b": Limits(requests_per_minute=600),
    "tenant:t": Limits(requests_per_minute=300, tokens_per_minute=18_000, max_concurrent=9, burst_tokens=6_000),
    "model:t/m": Limits(tokens_per_minute=24_000, requests_per_day=10**5),
}
CLIENTS = (("key:a", "tenant:t", "model:t/m"), ("key:b", "tenant:t", "model:t/m"), ("key:a",), ("key:b", "tenant:t"))
HISTORY_S = 15.0
STEP_S = 5.0  # between two looks at what is left: an idle second of twenty routers costs more than their load


class Load:
    """Clients of every manner: who comes back when told, who stays away, who repeats at once, who waits aside."""

    def __init__(self, world: StreamWorld, draw: random.Random, per_s: float) -> None:
        self.world = world
        self.draw = draw
        self._per_s = per_s
        self.until = world.now + HISTORY_S
        self.broken = 0  # clients that came at their moment and were refused
        self._arrive()

    def _arrive(self) -> None:
        if self.world.now < self.until:
            body = b"%d" % self.draw.randrange(10**12)
            self._come(self.draw.choice(CLIENTS), self.draw.randint(1, 300), self.draw.random(), body, came_back=False)
            self.world.after(self.draw.expovariate(self._per_s), self._arrive)

    def _come(self, names: tuple[str, ...], tokens: int, manner: float, body: bytes, *, came_back: bool) -> None:
        world = self.world
        draw = self.draw
        if not world.routers or world.now > self.until:
            return

        def decided(decision: LimitDecision) -> None:
            if isinstance(decision, Charged):
                used = None if draw.random() < 0.2 else draw.randint(0, tokens)
                world.after(draw.expovariate(2.0), lambda: world.end(decision.request_id, used))
                return
            self.broken += came_back
            if manner < 0.4 and decision.retry_after_s is not None:
                world.after(decision.retry_after_s, lambda: self._come(names, tokens, manner, body, came_back=True))
            elif manner < 0.6 and draw.random() < 0.9:
                other = b"%d" % draw.randrange(10**12)
                world.after(0.1, lambda: self._come(names, tokens, manner, other, came_back=False))

        limits = {name: SCOPES[name] for name in names}
        router = draw.choice(sorted(world.routers))
        request_id = world.ask(
            router, limits, tokens, decided, fingerprint=body, may_wait=manner > 0.8, is_repeat=came_back
        )
        if manner > 0.95:
            world.after(draw.random(), lambda: world.leave(request_id))

    def disturb(self) -> None:
        """One failure."""
        world = self.world
        draw = self.draw
        event = draw.randrange(5)
        if event == 0:
            world.start_actor()
        elif event == 1 and len(world.routers) > 1:
            world.kill_router(draw.choice(sorted(world.routers)))
        elif event == 2:
            world.add_router()
        elif event == 3:
            world.wall_step_s = draw.choice([-86_400.0, -3600.0, -1.0, 0.0, 1.0, 3600.0, 86_400.0])
        else:
            core = world.routers[draw.choice(sorted(world.routers))].core
            core.begin_incarnation(core.router_session.epoch, world.now)


def excesses(world: StreamWorld, refunds_late_s: float = 0.0) -> dict[tuple[str, Kind], float]:
    """By how much any window had more charged than allowed, as parts of the burst; without those that had not.
    `refunds_late_s`: the actor learns of a refund up to so much later."""
    found = {pool: log.excess() / log.burst for pool, log in world.logs.items()}
    over = {pool for pool, share in found.items() if share > 0.01}
    if refunds_late_s:
        found = {
            pool: world.logs[pool].excess_with_late_refunds(refunds_late_s) / world.logs[pool].burst for pool in over
        }
    return {pool: share for pool, share in found.items() if share > 0.01}


def left(world: StreamWorld) -> dict[str, Any]:
    """What is still known of clients, at the actor and at each router."""
    limits = world.actor.queue.limits
    quotas = {"model:t/m"}  # a quota stays known until it begins anew
    found: dict[str, Any] = {
        "calls": list(world.calls),
        "running": {scope: count for scope, count in world.running.items() if count},
        "reservations": {**limits.reservations.tickets, **limits.reservations.away},
        "scopes": set(limits.scopes) - quotas,
    }
    for name, router in world.routers.items():
        known = router.core.limits
        found[name] = [*known.pending, *known.running, *known.tickets, *(set(known.scopes) - quotas)]
    return {what: known for what, known in found.items() if known}


def assert_nothing_is_left(world: StreamWorld) -> None:
    """All clients have left: both ends forget all that they knew."""
    world.lost = world.repeated = world.slow = 0.0
    limits = world.actor.queue.limits
    for _ in range(240):  # reservations end with their moments; those may be far
        for request_id, call in list(world.calls.items()):
            if call.state == "running":
                world.end(request_id, None)
        world.run(STEP_S)
        if not world.calls and not any(scope.entries for scope in limits.scopes.values()):
            break
    for _ in range(28):  # a scope is forgotten after `FORGET_S`
        if not left(world):
            break
        world.run(STEP_S)
    assert left(world) == {}


@pytest.mark.parametrize("routers", [1, 3, pytest.param(20, marks=pytest.mark.long)])
@settings(max_examples=effort(3, 5))  # histories of 15 s with some hundred requests each
@given(seed=st.integers(0, 2**32), per_s=st.sampled_from([1.0, 10.0, 40.0]))
def test_without_failures_every_window_and_every_announced_moment_hold(routers: int, seed: int, per_s: float) -> None:
    world = StreamWorld(routers, seed)
    world.run(1.5)
    load = Load(world, random.Random(seed), per_s)
    world.run(HISTORY_S, world.check_pools if per_s < 10 else None)
    assert excesses(world) == {}
    assert load.broken == 0
    for name, limits in SCOPES.items():
        assert limits.max_concurrent is None or world.most[name] <= limits.max_concurrent
    assert_nothing_is_left(world)


@pytest.mark.parametrize("routers", [1, 3, pytest.param(20, marks=pytest.mark.long)])
@settings(max_examples=effort(3, 5))  # histories of 15 s with some hundred requests each
@given(
    seed=st.integers(0, 2**32),
    per_s=st.sampled_from([1.0, 10.0, 40.0]),
    failures=st.integers(1, 4),
    is_bad=st.booleans(),
)
@example(seed=200_000, per_s=10.0, failures=1, is_bad=True)
def test_with_failures_every_window_holds_and_nothing_is_left(
    routers: int, seed: int, per_s: float, failures: int, is_bad: bool
) -> None:
    draw = random.Random(seed)
    world = StreamWorld(routers, seed)
    world.run(1.5)
    if is_bad:
        world.lost = world.repeated = world.slow = 0.02
    load = Load(world, draw, per_s)
    for _ in range(failures):
        world.after(draw.uniform(0, HISTORY_S), load.disturb)
    world.run(HISTORY_S, world.check_pools if per_s < 10 else None)
    # a report with a refund that is lost is sent again, and may be lost again
    assert excesses(world, 2 * FENCE_S if is_bad else 0.0) == {}
    if not is_bad:  # a router that is silent for long keeps running what counts as ended
        for name, limits in SCOPES.items():
            assert limits.max_concurrent is None or world.most[name] <= limits.max_concurrent
    assert_nothing_is_left(world)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(-20, 20)), max_size=40))
def test_the_largest_excess_in_one_pass_is_that_of_every_window_by_itself(entries: list[tuple[float, int]]) -> None:
    log = ChargeLog(10.0, 0.5, [(at, float(amount)) for at, amount in entries])
    assert log.excess() == pytest.approx(log.excess_by_brute_force())
