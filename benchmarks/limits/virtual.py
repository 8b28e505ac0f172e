"""Ten minutes of many limited tenants in virtual time: `autoscaling.simulator` with three routers and the quota actor.

One engine has a slot for everybody, so that nobody waits for anything but limits. What a request is charged until its
end is the router's own estimate, which it learns. Invariant: everything that is drawn comes from the seed; a charge
counts at the moment at which its request was granted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoscaling.simulator import EngineProfile, RequestEnd, SimulatedRequest, Simulation
from benchmarks.common.traces import MODEL
from benchmarks.common.worlds import one_model
from benchmarks.limits.windows import Bucket, Charge, most_at_once, over_share, unused_share
from serve_app.core.limits import Limits
from serve_app.types import Outcome, RequestClass

SPAN_S = 600.0
DELAY_S = 0.005  # of a message between router and actor, one way
CLIENT_S = 0.01  # the same between client and router, on average
CROWDED = "crowded"
LIGHT = "light"
LEAVERS = "leavers"
LOOPER = "looper"
KINDS = {CROWDED: 0.25, LIGHT: 0.66, LEAVERS: 0.07, LOOPER: 0.02}  # shares of the tenants
LIGHT_SHARE = 0.3  # of its limit, that a light tenant asks for
LOOP_S = 0.1  # between the requests of one that never waits
OUTPUT_TOKENS = (10, 100)  # of an answer, at most half of the request: 0.2 to 2 s
ENGINE = EngineProfile(
    "unbounded",
    "room for everybody, and a step of 20 ms whatever runs",
    slots=100_000,
    kv_tokens=10**9,
    step_s=0.02,
    sequence_s=0.0,
    kv_token_s=0.0,
    prefill_tokens_per_s=1e12,
    start_s=0.0,
    prefill_chunk_tokens=10**9,
)


@dataclass(slots=True)
class Tenant:
    """Its limits, its clients, and what became of their requests.

    Args:
        size: tokens of a request, on average.
        whole_s: its clients read whole seconds of a Retry-After.
    """

    name: str
    kind: str
    limits: Limits
    size: int
    whole_s: bool
    draw: random.Random
    charges: list[Charge] = field(default_factory=list)
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
        whole_s = draw.random() < 0.5
        found.append(Tenant(f"t{number}", kind, limits, size, whole_s, random.Random(f"{seed} {number}")))
    return found


class Crowd:
    """The clients of all tenants before one simulated cluster."""

    def __init__(self, seed: int, count: int) -> None:
        self.tenants = tenants_of(seed, count)
        limits = {tenant.name: tenant.limits for tenant in self.tenants}
        world = one_model(ENGINE, limits=limits, delay_s=DELAY_S, preempts=False, seed=seed)
        self._simulation = Simulation(world, (), lambda end: None)
        self._numbers = 0

    def run(self) -> None:
        clock = self._simulation.clock
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
        self._simulation.run_for(SPAN_S)

    def _every(self, tenant: Tenant, pause_s: Callable[[], float]) -> None:
        """New requests of clients that ask once."""
        clock = self._simulation.clock

        def again() -> None:
            self._begin(tenant, stays=False)
            clock.after(pause_s(), again)

        clock.after(pause_s(), again)

    def _begin(self, tenant: Tenant, *, stays: bool) -> None:
        tenant.asked += 1
        self._numbers += 1
        size = max(2, round(tenant.size * tenant.draw.uniform(0.5, 1.5)))
        output = min(tenant.draw.randint(*OUTPUT_TOKENS), size // 2)
        now = self._simulation.clock.now
        normal = RequestClass.NORMAL
        body = b"%d" % self._numbers
        request = SimulatedRequest(now, tenant.name, normal, MODEL, size - output, output, fingerprint=body)
        self._simulation.offer(request, partial(self._ended, tenant, request, stays=stays))

    def _ended(self, tenant: Tenant, request: SimulatedRequest, end: RequestEnd, *, stays: bool) -> None:
        """An attempt was answered, or refused; `request.at_s`: of the first one."""
        clock = self._simulation.clock
        draw = tenant.draw
        if end.outcome is Outcome.OK:
            assert end.granted_s is not None
            used = end.prompt_tokens + end.output_tokens
            tenant.charges.append(Charge(end.granted_s, end.ended_s, used, end.estimated_tokens))
            if stays:
                tenant.longest_s = max(tenant.longest_s, end.granted_s - request.at_s)
                clock.after(draw.expovariate(1 / CLIENT_S), partial(self._begin, tenant, stays=True))
            return
        tenant.refused += 1
        tenant.broken += end.retry_after_s is None or bool(request.is_repeat)
        if stays:
            wait_s = end.retry_after_s or 1.0
            wait_s = float(-(-wait_s // 1.0)) if tenant.whole_s else wait_s
            again = replace(request, is_repeat=True)
            then = partial(self._ended, tenant, again, stays=True)
            clock.after(wait_s + 2 * draw.expovariate(1 / CLIENT_S), partial(self._simulation.offer, again, then))

    def figures(self) -> dict[str, Any]:
        """The worst of all tenants; unused: of those whose clients ask all the time."""
        began_s = self._simulation.began_s
        over: list[float] = []
        unused: dict[str, float] = {}
        above = 0
        overdrawn = 0.0
        for tenant in self.tenants:
            requests, tokens = tenant.buckets
            at = [one.at for one in tenant.charges]
            charged = [float(min(one.tokens, one.estimate)) for one in tenant.charges]
            used = [float(one.tokens) for one in tenant.charges]
            over += [over_share(at, [1.0] * len(at), requests), over_share(at, charged, tokens)]
            overdrawn = max(overdrawn, over_share(at, used, tokens))
            slots = tenant.limits.max_concurrent
            assert slots is not None
            above += max(0, most_at_once([(one.at, one.until) for one in tenant.charges]) - slots)
            if tenant.kind != LIGHT:
                span = began_s + 1.0, began_s + SPAN_S
                unused[tenant.name] = unused_share(tenant.charges, requests, tokens, slots, span)
        return {
            "asked": sum(tenant.asked for tenant in self.tenants),
            "charged": sum(len(tenant.charges) for tenant in self.tenants),
            "refused": sum(tenant.refused for tenant in self.tenants),
            "over": round(max(over), 4),
            "over_with_debts": round(overdrawn, 4),
            "most_at_once_over": above,
            "unused": round(max(unused.values()), 4),
            "unused_mean": round(sum(unused.values()) / len(unused), 4),
            "unused_worst": max(unused, key=unused.__getitem__),
            "broken_promises": sum(tenant.broken for tenant in self.tenants),
            "longest_s": round(max(tenant.longest_s for tenant in self.tenants), 1),
            "failed": 0,
        }


def run(seed: int, tenants: int) -> dict[str, Any]:
    """One run."""
    crowd = Crowd(seed, tenants)
    crowd.run()
    return crowd.figures()
