"""The loads of `benchmarks.limits` on a real instance, and what each of them shows.

A load is one key with its limits and its clients. Invariant: a request counts as admitted by its receipt alone, which
has the moment at which it was handed to a replica and the one at which it ended there; a request whose answer a client
has and whose receipt is missing ends the run.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.common.arms import BenchmarkError
from benchmarks.common.scaling_stack import MODEL, Stage
from benchmarks.limits.clients import REFUSED, Ask, Crowd, Shape
from benchmarks.limits.windows import Bucket, Charge, most_at_once, over_share, unused_share

LOOKS = 8  # receipts asked for at once
STRESS = {"requests_per_minute": 100, "tokens_per_minute": 200_000, "max_concurrent": 8}  # the field's own test
EXAMPLE = {"requests_per_minute": 60, "tokens_per_minute": 150_000, "max_concurrent": 10}  # docs/how-to/set-limits.md
SLOTS = {"max_concurrent": 8}
# 0.5, 0.8 and 1 s of the simulated engine
SMALL = Shape(40, 50)
LARGE = Shape(3_800, 60)
LONGER = Shape(40, 100)
AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Load:
    """One key.

    Args:
        clients: of the SDK, in a closed loop, or as many requests at once.
        leavers_per_s: requests of clients that never come back.
        looping_every_s: between the requests of one client that never waits; 0.0: there is none.
        same_body: all requests have the same bytes.
    """

    name: str
    limits: dict[str, int]
    shape: Shape = SMALL
    clients: int = AT_ONCE
    leavers_per_s: float = 0.0
    looping_every_s: float = 0.0
    over_limit: str = "refuse"
    same_body: bool = False
    key: str = field(default_factory=lambda: f"sk-{secrets.token_hex(16)}")

    @property
    def tenant(self) -> str:
        return self.name.replace(" ", "-")

    @property
    def buckets(self) -> dict[str, Bucket]:
        """The buckets a minute, by what they count."""
        found = {"requests": self.limits.get("requests_per_minute"), "tokens": self.limits.get("tokens_per_minute")}
        return {name: Bucket(minute, minute) for name, minute in found.items() if minute is not None}


STRESSES = (
    Load("at once", STRESS),
    Load("at once, same bytes", STRESS, same_body=True),
    Load("worked example", EXAMPLE),
)
LOADS = (
    Load("requests", STRESS),
    Load("tokens", STRESS, LARGE),
    Load("leavers", STRESS, clients=10, leavers_per_s=5.0),
    Load("one loops", STRESS, clients=10, looping_every_s=0.1),
    Load("slots, waiting", SLOTS, LONGER, over_limit="wait"),
    Load("slots, refused", SLOTS, LONGER),
)


def key_of(load: Load) -> dict[str, Any]:
    """As `auth.keys` has it."""
    return {"key": load.key, "tenant": load.tenant, "limits": load.limits}


def tenant_of(load: Load) -> dict[str, Any]:
    """As `admission.tenants` has it."""
    return {"over_limit": load.over_limit}


async def at_once(stage: Stage, load: Load, seed: int) -> Crowd:
    """All requests of a load at the same moment, each to its end."""
    crowd = Crowd(stage.cluster.url, load.key, MODEL, random.Random(f"{seed} {load.name}"))
    bodies = [load.shape.body(MODEL, crowd.draw) for _ in range(load.clients)]
    await crowd.at_once([bodies[0]] * load.clients if load.same_body else bodies)
    return crowd


async def run(stage: Stage, load: Load, seed: int, span_s: float) -> Crowd:
    """The clients of a load, for so long."""
    crowd = Crowd(stage.cluster.url, load.key, MODEL, random.Random(f"{seed} {load.name}"))
    until = time.monotonic() + span_s
    async with asyncio.TaskGroup() as group:
        group.create_task(crowd.closed_loop(load.clients, load.shape, until))
        for per_s in (load.leavers_per_s, 1.0 / load.looping_every_s if load.looping_every_s else 0.0):
            if per_s:
                group.create_task(crowd.open_loop(per_s, load.shape, until))
    return crowd


async def charges_of(stage: Stage, asks: Sequence[Ask]) -> list[Charge]:
    """What was admitted, by receipts.

    Raises:
        BenchmarkError: an answered request has no receipt.
    """
    places = asyncio.Semaphore(LOOKS)
    headers = {"authorization": f"Bearer {stage.key}"}
    async with httpx.AsyncClient(base_url=stage.cluster.url, headers=headers, timeout=60.0, trust_env=False) as http:

        async def look(ask: Ask) -> Charge:
            async with places:
                answer = await http.get(f"/admin/requests/{ask.request_id}")
            if answer.status_code != 200:
                raise BenchmarkError(f"no receipt of {ask.request_id}: {answer.status_code} {answer.text[:200]}")
            receipt = answer.json()
            tokens = (receipt["prompt_tokens"] or 0) + (receipt["output_tokens"] or 0)
            estimate = receipt["estimated_prompt"] + receipt["estimated_output"]
            return Charge(
                receipt["arrived"] + receipt["wait_s"], receipt["arrived"] + receipt["total_s"], tokens, estimate
            )

        return await asyncio.gather(*(look(ask) for ask in asks if ask.tokens))


def figures(load: Load, crowd: Crowd, charges: Sequence[Charge], span_s: float | None) -> dict[str, Any]:
    """What a load shows.

    Args:
        span_s: for which its clients asked without a pause; None: there is no such time.
    """
    asks = crowd.asks
    at = [one.at for one in charges]
    spans = [(one.at, one.until) for one in charges]
    charged = [float(min(one.tokens, one.estimate)) for one in charges]
    amounts = {"requests": [1.0] * len(charges), "tokens": charged}
    over = {name: over_share(at, amounts[name], bucket) for name, bucket in load.buckets.items()}
    tokens = load.buckets.get("tokens")
    debts = 0.0 if tokens is None else over_share(at, [float(one.tokens) for one in charges], tokens)
    most = most_at_once(spans)
    slots = load.limits["max_concurrent"]
    over["at once"] = max(0.0, most / slots - 1.0)
    unused = None
    if span_s is not None:
        begin = min(ask.began for ask in asks)
        buckets = load.buckets.get("requests"), load.buckets.get("tokens")
        unused = unused_share(charges, *buckets, slots, (begin, begin + span_s))
    attempts = [attempt for ask in asks for attempt in ask.attempts]
    ended = [ask for ask in asks if ask.ended]
    return {
        "asked": len(asks),
        "admitted": len(charges),
        "refusals": dict(Counter(one.code for one in attempts if one.status == REFUSED)),
        "over": {name: round(share, 4) for name, share in over.items()},
        "over_with_debts": round(debts, 4),
        "most_at_once": most,
        "unused": None if unused is None else round(unused, 4),
        "failed": sum(bool(ask.failure) for ask in asks),
        "failures": dict(Counter(ask.failure for ask in asks if ask.failure).most_common(3)),
        "broken_promises": sum(ask.broken_promises for ask in asks),
        "without_standing": sum(not one.has_standing for one in attempts) if load.buckets else 0,
        "longest_s": round(max((ask.ended - ask.began for ask in ended), default=0.0), 2),
    }
