"""What the store tells of quotas: asked for until it comes, and read as nothing never."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.limits import ActorLimits, LimitAction, LimitGrant, LimitReason, LimitRefuse, Limits
from serve_app.core.limits.messages import LimitRequest
from serve_app.core.limits.policy import need_of
from serve_app.core.shared_queue.messages import StoreAddress
from serve_app.errors import StoreAway
from serve_app.quota.limit_use import LimitUse
from serve_app.store.records import Used
from tests.fakes.until import until

SOON_S = 5.0  # for what takes a fraction of a second
HERE = StoreAddress("sqlite:///here")
THERE = StoreAddress("sqlite:///there")


class FlakyStore:
    """A store that is away for so many questions."""

    def __init__(self, used: Used, failures: int) -> None:
        self.used_up = used
        self.failures = failures
        self.asked = 0

    async def used(self, scope: str, start_day: str) -> Used:
        self.asked += 1
        if self.asked <= self.failures:
            raise StoreAway("away")
        return self.used_up


class LimitsAtActor:
    """The limits of an actor, and what it sends."""

    def __init__(self, stores: dict[str | None, FlakyStore]) -> None:
        self.sent: list[LimitAction] = []
        self.limits = ActorLimits(1, lambda router, action: self.sent.append(action), lambda: 1, time.monotonic())
        self.limits.asks_store = True
        self.limits.set_clock(time.time(), time.monotonic())
        self.use = LimitUse(self.limits, lambda: None, lambda url: stores[url])  # type: ignore[arg-type,return-value]

    def ask(self) -> None:
        scopes = (("key:k", Limits(requests_per_day=3)),)
        self.limits.on_event("r", LimitRequest("1", scopes, need_of(1, 0), b"", False, None, 0.1), time.monotonic())
        self.limits.after_event(time.monotonic())

    @property
    def decided(self) -> list[Any]:
        return [one for one in self.sent if isinstance(one, LimitGrant | LimitRefuse)]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 4 * SOON_S))  # type: ignore[arg-type]


def test_a_store_that_is_away_for_a_moment_grants_no_quota_that_is_used_up() -> None:
    async def scenario() -> None:
        store = FlakyStore(Used(requests=3), failures=2)
        actor = LimitsAtActor({HERE.url: store})
        actor.ask()
        actor.use.ask(HERE)
        await until(lambda: store.asked > 2, SOON_S, "asked again")
        await until(lambda: bool(actor.decided), SOON_S, "decided")
        (refused,) = actor.decided
        assert isinstance(refused, LimitRefuse)
        assert (refused.reason, refused.scope) == (LimitReason.ALLOWANCE, "key:k")
        await until(lambda: not actor.use.tasks, SOON_S, "nobody asks any more")

    run(scenario)


def test_another_store_is_asked_in_place_of_one_that_does_not_come_back() -> None:
    async def scenario() -> None:
        lost = FlakyStore(Used(), failures=10**6)
        other = FlakyStore(Used(requests=2), failures=0)
        actor = LimitsAtActor({HERE.url: lost, THERE.url: other})
        actor.ask()
        actor.use.ask(HERE)
        await until(lambda: lost.asked > 0, SOON_S, "asked")
        actor.use.ask(THERE)
        await until(lambda: bool(actor.decided), SOON_S, "decided")
        assert isinstance(actor.decided[0], LimitGrant)
        await until(lambda: not actor.use.tasks, SOON_S, "nobody asks any more")

    run(scenario)
