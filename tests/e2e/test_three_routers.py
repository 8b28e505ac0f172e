"""Three routers, one engine of few slots, one line: one order, and a router that is killed costs nobody else anything.

Moments are those of the receipts, of one monotonic clock, since all routers are on this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.e2e.observe import FILL_S, IDLE_S, Observer
from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import MODEL, ROUTERS, SLOTS, all_routers, process
from tests.waiting import patient, quiet_time, wait_until

TOKENS = 24  # 0.12 s of the engine's time: 33 requests a second
LONGER = 60  # 0.3 s: 13 a second
RANK = {"low": 0, "normal": 1, "high": 2}
EXCHANGE_S = 0.5  # one exchange is a few milliseconds; a process of three may be kept waiting by the others
# far more than the engine serves, and less than the client can send
MIXED = 120
MIXED_PER_S = 60.0
EQUAL = 60  # requests in each of two groups
SIGMAS = 4.0  # a fair order fails once in 16,000 runs
QUEUED = 40  # requests that each router has when one is killed
RETRIES = 8  # of the SDK: half a second, doubled each time, up to 8 s
GAP_S = 10.0  # a dead router's slots are back after 4.5 s; the rest is for the other tests beside this one
BURST_S = 10.0  # for a request that needs every slot at once, and so waits for all credit to come back
ID_HEADER = "x-serve-app-request-id"


@dataclass(frozen=True)
class Served:
    """A request by its receipt."""

    group: str
    level: str
    arrived: float
    granted: float


@asynccontextmanager
async def clients(found: Sequence[Stack]) -> AsyncIterator[list[httpx.AsyncClient]]:
    """A client of each router."""
    limits = httpx.Limits(max_connections=None)
    opened = [
        httpx.AsyncClient(base_url=one.base_url, headers=one.headers(), timeout=REQUEST_TIMEOUT_S, limits=limits)
        for one in found
    ]
    try:
        yield opened
    finally:
        await asyncio.gather(*(one.aclose() for one in opened))


async def ask(client: httpx.AsyncClient, **more: Any) -> str:
    """A completion; returns the request's id."""
    body = {"model": MODEL, "prompt": "The river", "max_tokens": TOKENS} | more
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.headers[ID_HEADER]


async def receipts(client: httpx.AsyncClient, groups: dict[str, str]) -> list[Served]:
    """The receipts of requests, by id and group."""
    answers = await asyncio.gather(*(client.get(f"/admin/requests/{request_id}") for request_id in groups))
    found = []
    for answer, group in zip(answers, groups.values(), strict=True):
        body = answer.json()
        granted = body["arrived"] + body["wait_s"]
        found.append(Served(group, body["request_class"], body["arrived"], granted))
    return found


async def served(three: Stack, plan: Sequence[tuple[str, dict[str, Any]]], per_s: float | None) -> list[Served]:
    """Requests of these groups, through all routers in turn; all at once, or so many a second."""
    async with clients(all_routers(three)) as opened:
        asked: list[Awaitable[str]] = []
        for client, (_, more) in zip(itertools.cycle(opened), plan, strict=False):
            asked.append(asyncio.create_task(ask(client, **more)))
            await asyncio.sleep(0.0 if per_s is None else 1.0 / per_s)  # the rate of the load
        ids = await asyncio.gather(*asked)
        return await receipts(opened[0], dict(zip(ids, (group for group, _ in plan), strict=True)))


def passed(found: Sequence[Served], exchange_s: float) -> list[tuple[Served, Served, float]]:
    """Who was granted while one of a higher class had waited for longer than an exchange: both, and for how long."""
    return [
        (lower, higher, lower.granted - higher.arrived)
        for lower, higher in itertools.product(found, found)
        if RANK[lower.level] < RANK[higher.level] and higher.arrived + exchange_s < lower.granted < higher.granted
    ]


def rank_gap(found: Sequence[Served], first: str, second: str) -> float:
    """By how much the mean ranks of two groups in the order of grants differ, in standard deviations of that difference
    over all permutations, which is what a fair order is one of."""
    order = sorted(found, key=lambda answer: answer.granted)
    ranks = {name: [rank for rank, one in enumerate(order) if one.group == name] for name in (first, second)}
    item, other = ranks.values()
    count = len(order)
    deviation = math.sqrt(count * (count + 1) / 12 * (1 / len(item) + 1 / len(other)))
    return (sum(other) / len(other) - sum(item) / len(item)) / deviation


def test_no_router_grants_a_lower_class_while_a_higher_one_has_waited_for_an_exchange_anywhere(three: Stack) -> None:
    draw = random.Random(1)
    plan = [(level, {"priority": level, "max_tokens": LONGER}) for level in draw.choices(list(RANK), k=MIXED)]
    found = asyncio.run(served(three, plan, MIXED_PER_S))
    waits = {level: [one.granted - one.arrived for one in found if one.level == level] for level in RANK}
    most = {level: max(spans) for level, spans in waits.items()}
    print(f"longest waits {most}")
    exchange_s = patient(EXCHANGE_S)
    assert most["low"] > max(exchange_s, 2 * EXCHANGE_S), (
        "the line was never longer than what is allowed: this shows nothing"
    )
    assert passed(found, exchange_s) == []
    assert rank_gap(found, "high", "low") > SIGMAS


@pytest.mark.long
def test_groups_of_equal_class_are_served_alike(three: Stack) -> None:
    """The control: the same class by other words, in a drawn order; the measure is the one that tells high from low."""
    plan: list[tuple[str, dict[str, Any]]] = [("word", {"priority": "normal"}), ("tier", {"service_tier": "default"})]
    plan = plan * EQUAL
    random.Random(2).shuffle(plan)
    found = asyncio.run(served(three, plan, None))
    assert {one.level for one in found} == {"normal"}
    gap = rank_gap(found, "word", "tier")
    print(f"mean ranks differ by {gap:+.2f} standard deviations")
    assert abs(gap) < SIGMAS


class Ends:
    """When requests ended, in seconds of a quiet machine."""

    def __init__(self) -> None:
        self.at: list[float] = []

    async def note(self, request: Awaitable[Any]) -> None:
        await request
        self.at.append(quiet_time())

    @property
    def longest_gap_s(self) -> float:
        return max((after - before for before, after in itertools.pairwise(sorted(self.at))), default=0.0)


@pytest.mark.long
def test_a_router_killed_with_requests_in_queue_costs_the_others_nothing_and_leaves_nothing(three: Stack) -> None:
    first, second, victim = all_routers(three)
    pid = process(three, victim)
    observer = Observer(first)

    def least_waiting() -> float:
        """At the router where the fewest wait, the victim or another."""
        waiting = observer.by_router("serve_app_waiting", model=MODEL)
        return min(waiting.values()) if len(waiting) == ROUTERS else 0

    attempts = 0

    async def attempted(request: httpx.Request) -> None:
        nonlocal attempts
        attempts += 1

    async def scenario() -> Ends:
        ends = Ends()
        hooks: Any = {"request": [attempted]}
        async with (
            clients([first, second]) as others,
            httpx.AsyncClient(event_hooks=hooks, timeout=REQUEST_TIMEOUT_S) as http,
            three.async_client(max_retries=RETRIES, http_client=http) as sdk,
        ):
            by_sdk = [sdk.completions.create(model=MODEL, prompt="a", max_tokens=TOKENS) for _ in range(2 * QUEUED)]
            asked = [asyncio.create_task(ends.note(one)) for one in by_sdk]
            await asyncio.to_thread(wait_until, lambda: least_waiting() > 2, FILL_S, "some wait at each router")
            asked += [asyncio.create_task(ends.note(ask(one))) for _ in range(QUEUED) for one in others]
            await asyncio.sleep(0.2)  # so that they are in line
            assert await asyncio.to_thread(least_waiting) > 0, "nobody is at the router: this shows nothing"
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*asked)
        return ends

    ends = asyncio.run(scenario())
    print(
        f"{len(ends.at)} requests in {attempts} attempts of the SDK (the edge repeats what had no answer) and "
        f"{2 * QUEUED} more; "
        f"the longest time in which none ended was {ends.longest_gap_s:.1f} s"
    )
    assert len(ends.at) == 4 * QUEUED
    assert ends.longest_gap_s < GAP_S

    now = all_routers(three)
    for router in now:
        Observer(router).wait_idle(MODEL)
    wait_until(lambda: held_beyond_credit(three), IDLE_S, "tokens that no router needs", wanted=[])
    for router in now:
        began = quiet_time()
        answer = router.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2, "n": SLOTS})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == SLOTS
        assert quiet_time() - began < BURST_S


def test_one_scrape_has_the_metrics_of_every_router(three: Stack) -> None:
    routers = all_routers(three)
    observers = [Observer(router) for router in all_routers(three)]
    ended = "serve_app_requests_total"
    before = observers[0].by_router(ended, model=MODEL)
    for router in routers:
        assert router.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}).status_code == 200
    after = observers[0].by_router(ended, model=MODEL)
    assert [after[name] - before.get(name, 0) for name in after] == [1] * ROUTERS
    assert [one.by_router(ended, model=MODEL) for one in observers] == [after] * ROUTERS
    assert observers[0].value("serve_app_engine_running_sequences", model=MODEL) == 0
    openmetrics = three.get("/metrics", headers={"Accept": "application/openmetrics-text"}).text
    families = {family.name: family for family in text_string_to_metric_families(openmetrics)}
    ended_at = {one.labels["router"]: 0.0 for one in families["serve_app_requests"].samples}
    for sample in families["serve_app_requests"].samples:
        ended_at[sample.labels["router"]] += sample.value if sample.labels["model"] == MODEL else 0.0
    assert ended_at == after


def held_beyond_credit(three: Stack) -> list[str]:
    """What is held of the engine by others than the routers that are there, or by them beyond what is credit."""
    answer = three.get("/admin/quota")
    if answer.status_code != 200:
        return [answer.text]
    wrong = []
    for engine in answer.json()["engines"]:
        shares = engine["kv_tokens_by_router"]
        most = 2 * (engine["kv_tokens"] // (2 * ROUTERS))  # given back above twice the spare credit
        wrong += [f"{name} has {tokens}" for name, tokens in shares.items() if tokens > most]
        if len(shares) > ROUTERS:
            wrong.append(f"{sorted(shares)} are more than {ROUTERS}")
    return wrong
