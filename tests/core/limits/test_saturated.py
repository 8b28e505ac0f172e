"""Under steady demand above the limits, what they allow is used, whatever the clients do; measured in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from serve_app.core.limits import Charged, Kind, LimitDecision, Limits
from tests.core.limits.stream_world import StreamWorld
from tests.effort import effort

SPAN_S = 120.0  # two minutes of what is allowed in a minute, after a first one that the buckets hold
SCOPE = "key:a"
BOTH = Limits(requests_per_minute=300, tokens_per_minute=30_000, max_concurrent=40)
TOKENS = Limits(tokens_per_minute=30_000)

Come = Callable[[int, bytes, bool], None]


def unused_share(manner: str, limits: Limits, *, refunded: float = 0.0, per_s: float = 15.0, seed: int = 1) -> float:
    """The part of what the tightest limit allows that is not used, at three routers.

    Args:
        manner: of clients after a refusal: they `leave`, `obey`, or come `again` every 0.1 s with other bodies, ten
            times on average; or their requests `wait` aside.
        refunded: part of the requests that use half of their estimate, or nothing.
    """
    world = StreamWorld(3, seed)
    draw = random.Random(seed)
    world.run(1.5)
    start = world.now

    def come(tokens: int, body: bytes, is_repeat: bool) -> None:
        if world.now >= start + SPAN_S:
            return

        def decided(decision: LimitDecision) -> None:
            if isinstance(decision, Charged):
                used = tokens if draw.random() >= refunded else draw.choice([None, tokens // 2])
                world.after(draw.expovariate(5.0), lambda: world.end(decision.request_id, used))
            elif manner == "obey" and decision.retry_after_s is not None:
                world.after(decision.retry_after_s, lambda: come(tokens, body, True))
            elif manner == "again" and draw.random() < 0.9:
                world.after(0.1, lambda: come(tokens, b"%d" % draw.randrange(10**12), False))

        router = draw.choice(sorted(world.routers))
        waits = manner == "wait"
        world.ask(router, {SCOPE: limits}, tokens, decided, fingerprint=body, may_wait=waits, is_repeat=is_repeat)

    def arrive() -> None:
        come(draw.randint(50, 150), b"%d" % draw.randrange(10**12), False)
        if world.now < start + SPAN_S:
            world.after(draw.expovariate(per_s), arrive)

    arrive()
    world.run(SPAN_S)
    assert world.most[SCOPE] <= (limits.max_concurrent or 1000)
    unused = []
    for kind in limits.capacities():
        if kind is not Kind.CONCURRENT:
            log = world.logs[SCOPE, kind]
            assert log.excess() <= 0.01 * log.burst
            used = sum(amount for at, amount in log.entries if at <= start + SPAN_S)
            unused.append(1.0 - used / (log.burst + log.rate * SPAN_S))
    return min(unused)


# of requests; where half are refunded, as many are not
REFUNDED = [pytest.param(0.0, marks=pytest.mark.long), 0.5]
MANNERS = ["leave", "obey", pytest.param("again", marks=pytest.mark.long), "wait"]  # who comes again at once asks most


@pytest.mark.parametrize("refunded", REFUNDED)
@pytest.mark.parametrize("manner", MANNERS)
def test_at_most_a_fiftieth_of_what_is_allowed_is_left_unused(manner: str, refunded: float) -> None:
    assert unused_share(manner, TOKENS, refunded=refunded) <= 0.02


@pytest.mark.parametrize("refunded", REFUNDED)
@pytest.mark.parametrize("manner", MANNERS)
def test_the_same_with_several_limits_that_are_tight_at_once(manner: str, refunded: float) -> None:
    assert unused_share(manner, BOTH, refunded=refunded) <= 0.02


def test_free_slots_are_used_while_clients_are_turned_away() -> None:
    world = StreamWorld(3)
    draw = random.Random(1)
    limits = Limits(max_concurrent=8)
    world.run(1.5)
    busy_s = [0.0]

    def come(client: int, is_repeat: bool) -> None:
        def decided(decision: LimitDecision) -> None:
            if isinstance(decision, Charged):
                span_s = draw.uniform(0.5, 1.5)
                busy_s[0] += span_s
                world.after(span_s, lambda: world.end(decision.request_id, 1))
                world.after(span_s, lambda: come(client, False))
            else:
                world.after(decision.retry_after_s or 0.0, lambda: come(client, True))

        router = f"r{client % 3}"
        world.ask(router, {SCOPE: limits}, 1, decided, fingerprint=b"%d" % client, is_repeat=is_repeat)

    for client in range(50):
        come(client, False)
    span_s = effort(20.0, 60.0)
    world.run(span_s)
    assert world.most[SCOPE] == 8
    assert busy_s[0] >= 0.98 * 8 * span_s
