"""Ten minutes of many limited tenants in virtual time: three routers and the quota actor, on the pure cores.

The network between them is that of `benchmarks.line_attack.network`, with seeded delays. Invariant: everything that is
drawn comes from the seed; a charge counts at the moment at which its router decided it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.limits.windows import Bucket, Charge, over_share, unused_share
from benchmarks.line_attack.network import Network
from serve_app.core.limits import Charged, LimitDecision, LimitedRequest, Limits
from serve_app.core.queue import QueuePolicy

ROUTERS = 3
SPAN_S = 600.0
DELAY_S = 0.005  # of a message between router and actor, one way, on average
CLIENT_S = 0.01  # the same between client and router
CROWDED = "crowded"
LIGHT = "light"
LEAVERS = "leavers"
LOOPER = "looper"
KINDS = {CROWDED: 0.25, LIGHT: 0.66, LEAVERS: 0.07, LOOPER: 0.02}  # shares of the tenants
LIGHT_SHARE = 0.3  # of its limit, that a light tenant asks for
USED = ((0.5, 1.0), (1.0, 1.0), (0.9, 1.1))  # parts of an estimate that are used, at least and at most, of a tenant
LOOP_S = 0.1  # between the requests of one that never waits
POLICY = QueuePolicy(max_queued=1_000, max_wait_s=60.0)


@dataclass(slots=True)
class Tenant:
    """One key: its limits, its clients, and what became of their requests.

    Args:
        size: tokens of a request by estimate, on average; `used`: the parts of an estimate that are used.
        whole_s: its clients read whole seconds of a Retry-After.
    """

    number: int
    kind: str
    limits: Limits
    size: int
    used: tuple[float, float]
    whole_s: bool
    draw: random.Random
    charges: list[Charge] = field(default_factory=list)
    running: int = 0
    most: int = 0
    asked: int = 0
    refused: int = 0
    broken: int = 0
    longest_s: float = 0.0  # until a client that stays was charged

    @property
    def buckets(self) -> tuple[Bucket, Bucket]:
        limits = self.limits
        assert limits.requests_per_minute is not None
        assert limits.tokens_per_minute is not None
        requests = Bucket(limits.burst_requests or limits.requests_per_minute, limits.requests_per_minute)
        return requests, Bucket(limits.burst_tokens or limits.tokens_per_minute, limits.tokens_per_minute)


def tenants_of(seed: int, count: int) -> list[Tenant]:
    """Limits of all sizes: where requests bind, and where tokens do."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        per_minute = draw.choice((20, 30, 60))
        size = draw.randrange(50, 2_000)
        tokens = round(per_minute * size * draw.choice((0.6, 0.8, 1.5, 3.0)))
        burst = draw.choice((None, per_minute // 3))
        limits = Limits(float(per_minute), float(tokens), burst, None, draw.choice((8, 10, 20)))
        share = draw.choice(USED)
        whole_s = draw.random() < 0.5
        found.append(Tenant(number, kind, limits, size, share, whole_s, random.Random(f"{seed} {number}")))
    return found


class World:
    """All tenants on one network."""

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(f"{seed} network")
        delay_s = partial(draw.expovariate, 1 / DELAY_S)
        self.network = Network({"e": (64, 1_000_000)}, POLICY, ROUTERS, delay_s)
        self.tenants = tenants_of(seed, count)
        self._numbers = 0
        self.began = self.network.clock.now

    def run(self) -> None:
        clock = self.network.clock
        for tenant in self.tenants:
            rate = tenant.buckets[0].per_minute / 60.0
            draw = tenant.draw
            if tenant.kind == LIGHT:
                self._every(tenant, partial(draw.expovariate, LIGHT_SHARE * rate))
                continue
            for _ in range(20 if tenant.kind == CROWDED else 5):
                clock.after(draw.random(), partial(self._begin, tenant, stays=True))
            if tenant.kind == LEAVERS:
                self._every(tenant, partial(draw.expovariate, 3 * rate))
            elif tenant.kind == LOOPER:
                self._every(tenant, lambda: LOOP_S)
        clock.run(SPAN_S)

    def _every(self, tenant: Tenant, pause_s: Callable[[], float]) -> None:
        """New requests of clients that ask once."""

        def again() -> None:
            self._begin(tenant, stays=False)
            self.network.clock.after(pause_s(), again)

        self.network.clock.after(pause_s(), again)

    def _begin(self, tenant: Tenant, *, stays: bool) -> None:
        self._numbers += 1
        tenant.asked += 1
        size = max(1, round(tenant.size * tenant.draw.uniform(0.5, 1.5)))
        self._ask(tenant, size, b"%d" % self._numbers, self.network.clock.now, stays=stays, is_repeat=None)

    def _ask(
        self, tenant: Tenant, size: int, body: bytes, began: float, *, stays: bool, is_repeat: bool | None
    ) -> None:
        """One attempt, at any router."""
        clock = self.network.clock
        router = tenant.draw.choice(self.network.routers)
        self._numbers += 1
        request = LimitedRequest(
            f"q{self._numbers}", ((f"key:{tenant.number}", tenant.limits),), size, 0, body, is_repeat=is_repeat
        )

        def then(decision: LimitDecision) -> None:
            if isinstance(decision, Charged):
                if stays:
                    tenant.longest_s = max(tenant.longest_s, clock.now - began)
                self._charged(tenant, router, request, stays=stays)
                return
            tenant.refused += 1
            if decision.retry_after_s is None or is_repeat:
                tenant.broken += 1
            if not stays:
                return
            wait_s = decision.retry_after_s or 1.0
            wait_s = float(-(-wait_s // 1.0)) if tenant.whole_s else wait_s
            again = partial(self._ask, tenant, size, body, began, stays=True, is_repeat=True)
            clock.after(wait_s + 2 * tenant.draw.expovariate(1 / CLIENT_S), again)

        router.charge(request, then)

    def _charged(self, tenant: Tenant, router: Any, request: LimitedRequest, *, stays: bool) -> None:
        clock = self.network.clock
        used = max(1, round(request.tokens * tenant.draw.uniform(*tenant.used)))
        until = clock.now + tenant.draw.uniform(0.2, 2.0)
        tenant.charges.append(Charge(clock.now, until, used, request.tokens))
        tenant.running += 1
        tenant.most = max(tenant.most, tenant.running)

        def end() -> None:
            tenant.running -= 1
            router.end_charge(request.request_id, used)
            if stays:
                clock.after(tenant.draw.expovariate(1 / CLIENT_S), lambda: self._begin(tenant, stays=True))

        clock.after(until - clock.now, end)

    def figures(self) -> dict[str, Any]:
        """The worst of all tenants; unused: of those whose clients ask all the time."""
        over: dict[int, float] = {}
        unused: dict[int, float] = {}
        above = 0
        overdrawn = 0.0
        for tenant in self.tenants:
            requests, tokens = tenant.buckets
            at = [one.at for one in tenant.charges]
            ones = [1.0] * len(tenant.charges)
            charged = [float(min(one.tokens, one.estimate)) for one in tenant.charges]
            used = [float(one.tokens) for one in tenant.charges]
            over[tenant.number] = max(over_share(at, ones, requests), over_share(at, charged, tokens))
            overdrawn = max(overdrawn, over_share(at, used, tokens))
            slots = tenant.limits.max_concurrent
            above += max(0, tenant.most - (slots or tenant.most))
            if tenant.kind != LIGHT:
                span = self.began + 1.0, self.began + SPAN_S
                unused[tenant.number] = unused_share(tenant.charges, requests, tokens, slots, span)
        worst = max(unused, key=unused.__getitem__)
        return {
            "asked": sum(tenant.asked for tenant in self.tenants),
            "charged": sum(len(tenant.charges) for tenant in self.tenants),
            "refused": sum(tenant.refused for tenant in self.tenants),
            "over": round(max(over.values()), 4),
            "over_with_debts": round(overdrawn, 4),
            "most_at_once_over": above,
            "unused": round(unused[worst], 4),
            "unused_mean": round(sum(unused.values()) / len(unused), 4),
            "unused_worst": repr(self.tenants[worst].limits),
            "broken_promises": sum(tenant.broken for tenant in self.tenants),
            "longest_s": round(max(tenant.longest_s for tenant in self.tenants), 1),
            "failed": 0,
        }


def run(seed: int, tenants: int) -> dict[str, Any]:
    """One run."""
    world = World(seed, tenants)
    world.run()
    return world.figures()
