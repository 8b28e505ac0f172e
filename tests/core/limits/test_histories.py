"""Random histories of routers, clients and failures: no window has too much charged, and nothing is left over."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from serve_app.core.limits import Charged, Limits
from serve_app.core.limits.policy import Kind
from serve_app.core.limits.router_limits import Refusal
from tests.core.limits.world import World
from tests.effort import effort

SCOPES = {
    "key:a": Limits(requests_per_minute=120, tokens_per_minute=6000, max_concurrent=6),
    "key:b": Limits(requests_per_minute=600),
    "tenant:t": Limits(requests_per_minute=300, tokens_per_minute=9000, max_concurrent=9, tokens_per_day=10**6),
    "model:t/m": Limits(tokens_per_minute=9000, requests_per_day=10**5),
}
CLIENTS = (("key:a", "tenant:t", "model:t/m"), ("key:b", "tenant:t", "model:t/m"), ("key:a",), ("key:b", "tenant:t"))
MAX_ESTIMATE = 120
HISTORY_S = 20.0
REST_S = 1500.0  # after it: the longest line has been given up
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # a history of a minute shrinks for hours


class Load:
    """Clients of every manner: who comes back when told, who leaves, who repeats at once, who waits aside."""

    def __init__(self, world: World, draw: random.Random, per_s: float, *, overdraws: bool) -> None:
        self._world = world
        self._draw = draw
        self._per_s = per_s
        self._overdraws = overdraws
        self._until = world.now + HISTORY_S
        self._loops = 200  # repeats that do not wait, in all
        self.broken = 0  # moments that were not kept
        self.disturbed_at = -1e9  # the last failure: a moment told before may be lost with a router
        self._arrive()

    def _arrive(self) -> None:
        if self._world.now < self._until:
            self._come(self._draw.choice(CLIENTS), self._draw.randint(1, MAX_ESTIMATE), self._draw.random(), None)
            self._world.after(self._draw.expovariate(self._per_s), self._arrive)

    def _come(self, names: tuple[str, ...], tokens: int, manner: float, reported_at: float | None) -> None:
        world = self._world
        draw = self._draw
        if not world.cores:
            return
        print_ = b"%d" % int(manner * 1e9)

        def decided(reported: Charged | Refusal) -> None:
            if isinstance(reported, Charged):
                used = draw.randint(0, tokens * (2 if self._overdraws else 1))
                end = None if draw.random() < 0.1 else used
                world.after(draw.expovariate(2.0), lambda: world.end(reported.request_id, end))
                return
            if reported_at is not None and self.disturbed_at < reported_at:
                self.broken += 1
            if manner < 0.5 and reported.retry_after_s is not None and world.now + reported.retry_after_s < self._until:
                reported_now = world.now
                world.after(reported.retry_after_s, lambda: self._come(names, tokens, manner, reported_now))
            elif manner < 0.53 and self._loops:
                self._loops -= 1
                world.after(0.1, lambda: self._come(names, tokens, manner + 1e-9, None))

        limits = {name: SCOPES[name] for name in names}
        repeat = None if manner > 0.4 else reported_at is not None
        router = draw.choice(sorted(world.cores))
        more = {"fingerprint": print_, "may_wait": manner > 0.8, "is_repeat": repeat}
        request_id = world.ask(router, limits, tokens, decided, **more)
        if manner > 0.95:
            world.after(draw.random(), lambda: request_id in world.cores_pending() and world.leave(request_id))


def disturb(world: World, load: Load, draw: random.Random) -> None:
    """One failure."""
    load.disturbed_at = world.now
    event = draw.randrange(3)
    if event == 0:
        world.start_actor()
    elif event == 1 and len(world.cores) > 1:
        world.kill_router(draw.choice(sorted(world.cores)))
    elif world.cores:
        world.begin_session(draw.choice(sorted(world.cores)))


@pytest.mark.parametrize("routers", [1, 3, 20])
@settings(max_examples=effort(3, 8), deadline=None, phases=PHASES)
@given(seed=st.integers(0, 2**32), per_s=st.sampled_from([1.0, 10.0, 30.0]), failures=st.integers(0, 4))
def test_no_window_has_more_charged_than_its_bucket_allows(
    routers: int, seed: int, per_s: float, failures: int
) -> None:
    draw = random.Random(seed)
    world = World(routers, seed)
    load = Load(world, draw, per_s, overdraws=False)
    for _ in range(failures):
        world.after(draw.uniform(0, HISTORY_S), lambda: disturb(world, load, draw))
    world.run(HISTORY_S + 30)
    for name, limits in SCOPES.items():
        for kind in (Kind.REQUESTS, Kind.TOKENS):
            if kind in limits.capacities():
                assert world.excess(name, limits, kind) <= 0.01 * limits.capacities()[kind], (name, kind)
    if not failures:
        for name, limits in SCOPES.items():
            if limits.max_concurrent is not None:
                assert world.most[name] <= limits.max_concurrent
        assert not load.broken
    world.run(REST_S)
    assert world.is_at_rest()
    assert not world.actor.reservations.tickets
    assert not world.actor.reservations.away
    assert not any(scope.entries or scope.undecided for scope in world.actor.scopes.values())
    for scope in world.actor.scopes.values():
        for kind, pool in scope.pools.items():
            if kind is Kind.CONCURRENT:
                assert pool.balance == pytest.approx(pool.capacity), (scope.name, pool.credit)


@pytest.mark.parametrize("seed", range(effort(1, 3)))
def test_overdrafts_are_paid_so_use_keeps_to_the_rate(seed: int) -> None:
    world = World(3, seed)
    load = Load(world, random.Random(seed), 60.0, overdraws=True)
    start = world.now
    world.run(HISTORY_S)
    assert load.broken == 0
    limits = SCOPES["tenant:t"]
    charged = sum(request.tokens for _, request in world.charged if "tenant:t" in dict(request.scopes))
    charged -= sum(back[Kind.TOKENS] for _, request, back in world.refunded if "tenant:t" in dict(request.scopes))
    beyond = sum(more for _, request, more in world.used if "tenant:t" in dict(request.scopes))
    allowed = limits.capacities()[Kind.TOKENS] + limits.rate(Kind.TOKENS) * (world.now - start)
    in_flight = 9 * MAX_ESTIMATE  # what runs may still overdraw
    assert beyond > 0
    assert charged + beyond <= allowed + in_flight
