"""Routers that charge limits through the quota actor: waits, refusals, cancellation, and the actor away.

The actor is `tests.fakes.quota.FakeQuota`, with its real core. Time is real, with short silences.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator

import pytest

from serve_app.core.limits import LimitedRequest, Limits, RouterLimits
from serve_app.errors import RateLimited, Unavailable
from serve_app.router import LimitClient
from tests.fakes.quota import FakeQuota, fleet, run
from tests.fakes.until import SOON_S, until

IDLE_S = (sys.modules[RouterLimits.__module__], "IDLE_S")  # then a router gives its credit back

NUMBERS = itertools.count()
SCOPE = "key:k"


def request(limits: Limits, tokens: int = 1, *, may_wait: bool = False, body: bytes = b"") -> LimitedRequest:
    return LimitedRequest(f"q{next(NUMBERS)}", ((SCOPE, limits),), tokens, 0, body, may_wait)


@contextlib.asynccontextmanager
async def routers(count: int) -> AsyncIterator[tuple[FakeQuota, list[LimitClient]]]:
    actor = FakeQuota()
    async with fleet(actor, count) as callers:
        yield actor, [LimitClient(one.shared) for one in callers]


def balance(actor: FakeQuota) -> dict[str, float]:
    """What is at the actor, by kind."""
    return {pool.kind.name: pool.level + pool.spare for pool in actor.limits.scopes[SCOPE].pools.values()}


def test_routers_share_one_limit_and_an_end_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        limits = Limits(max_concurrent=2)
        async with routers(2) as (_, (first, second)):
            charge = await first.acquire(request(limits))
            await second.acquire(request(limits))
            with pytest.raises(RateLimited) as refused:
                await second.acquire(request(limits))
            assert (refused.value.status, refused.value.code) == (429, "concurrency")
            waiting = asyncio.create_task(second.acquire(request(limits, may_wait=True)))
            done, _ = await asyncio.wait({waiting}, timeout=0.1)
            assert not done
            charge.settle(1, 0)
            assert (await asyncio.wait_for(waiting, SOON_S)).waited_s > 0.0

    run(scenario)


def test_a_refusal_names_the_limit_and_the_moment() -> None:
    async def scenario() -> None:
        limits = Limits(requests_per_minute=60, burst_requests=1)
        async with routers(1) as (_, (client,)):
            await client.acquire(request(limits))
            with pytest.raises(RateLimited) as refused:
                await client.acquire(request(limits))
            assert "60 requests per minute of this key" in refused.value.message
            assert refused.value.code == "rate_limit"
            assert 0.5 < (refused.value.retry_after_s or 0.0) <= 1.0
            with pytest.raises(RateLimited) as refused:
                await client.acquire(request(Limits(tokens_per_minute=10), 11))
            assert refused.value.retry_after_s is None

    run(scenario)


def test_a_caller_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        limits = Limits(max_concurrent=1)
        async with routers(2) as (actor, (first, second)):
            charge = await first.acquire(request(limits))
            waiting = asyncio.create_task(second.acquire(request(limits, may_wait=True)))
            await until(lambda: bool(actor.limits.reservations.tickets), SOON_S, "it waits")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            charge.refund()
            await until(lambda: balance(actor) == {"CONCURRENT": 1.0}, SOON_S, "the slot is back")
            assert not actor.limits.reservations.tickets

    run(scenario)


@pytest.mark.parametrize("turns", range(8))
def test_a_caller_that_leaves_at_any_moment_is_not_charged(turns: int) -> None:
    async def scenario() -> None:
        limits = Limits(requests_per_minute=1, burst_requests=3, max_concurrent=1)
        async with routers(1) as (actor, (client,)):
            asked = asyncio.create_task(client.acquire(request(limits)))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await asked).refund()
            again = await asyncio.wait_for(client.acquire(request(limits, may_wait=True)), SOON_S)
            again.refund()
            await until(lambda: balance(actor)["CONCURRENT"] == 1.0, SOON_S, "the slot is back")
            await until(lambda: balance(actor)["REQUESTS"] >= 3.0, SOON_S, "nothing is charged")

    run(scenario, {IDLE_S: 0.1})


def test_the_end_of_a_charge_counts_once() -> None:
    async def scenario() -> None:
        limits = Limits(tokens_per_minute=60, burst_tokens=1000)
        async with routers(1) as (actor, (client,)):
            charge = await client.acquire(request(limits, 400))
            charge.settle(100, 0)
            charge.refund()
            charge.settle(100, 0)
            await until(lambda: balance(actor)["TOKENS"] >= 900, SOON_S, "300 are back")
            assert balance(actor)["TOKENS"] < 1000
            await until(lambda: client.standing(((SCOPE, limits),)).tokens is not None, SOON_S, "it is told")
            found = client.standing(((SCOPE, limits),)).tokens
            assert found is not None
            assert (found.limit, found.remaining < 1000) == (1000, True)

    run(scenario, {IDLE_S: 0.1})


def test_while_the_actor_is_away_credit_serves_and_other_requests_wait_for_it_or_are_refused() -> None:
    async def scenario() -> None:
        limits = Limits(requests_per_minute=6000)
        async with routers(1) as (actor, (client,)):
            await client.acquire(request(limits))
            actor.die()
            (await client.acquire(request(limits))).refund()  # on credit
            other = LimitedRequest("other", (("key:other", limits),), 1, 0)
            with pytest.raises(Unavailable) as refused:
                await asyncio.wait_for(client.acquire(other), SOON_S)
            assert (refused.value.status, refused.value.code) == (503, "limits_unavailable")
            assert refused.value.retry_after_s is not None
            waiting = asyncio.create_task(client.acquire(other._replace(request_id="third")))
            await asyncio.sleep(0.05)  # the request waits meanwhile
            actor.start()
            await asyncio.wait_for(waiting, SOON_S)

    run(scenario, {(sys.modules[RouterLimits.__module__], "LIMIT_WAIT_S"): 0.6})


def test_a_router_alone_hands_a_slot_to_its_own_request_that_waits() -> None:
    async def scenario() -> None:
        limits = Limits(max_concurrent=1)
        async with routers(1) as (_, (client,)):
            charge = await client.acquire(request(limits))
            waiting = asyncio.create_task(client.acquire(request(limits, may_wait=True)))
            await asyncio.sleep(0.05)  # the request waits meanwhile
            charge.settle(1, 0)
            await asyncio.wait_for(waiting, 2.0)

    run(scenario)
