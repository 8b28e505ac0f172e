"""A map by handle over the whole stack: a few hundred prompts of low priority, a queue that is too small, a limit."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app import connect
from serve_app.client import Client, MapProgress, MapResult
from tests.e2e.joined import joined
from tests.e2e.observe import ABORT_S, Observer
from tests.e2e.stack import MAX_QUEUED, SIMULATED, SIMULATED_SLOTS, Stack
from tests.waiting import slowness, wait_until

pytestmark = pytest.mark.long  # hundreds of prompts by handle; tests/client has their order and bounds

PROMPTS = 300
TOKENS = 4  # 20 ms of the simulated engine
LASTING = 40  # tokens: 0.2 s, so that a quiet machine sends faster than the engine serves, beside other tests, too
TOO_MANY = SIMULATED_SLOTS + MAX_QUEUED + 56  # in flight: more than there are places
LIMIT = {"requests_per_minute": 1200, "burst_requests": 8}
LIMITED = 40  # prompts: 32 of them at twenty a second
LONG = 8000
FOLLOW_S = 5.0  # for the router to know a new key


@pytest.fixture(scope="module")
def llm(stack: Stack) -> Iterator[Client]:
    with joined(stack) as client:
        yield client


def prompts(count: int) -> Iterator[str]:
    return (f"The river {number}" for number in range(count))


async def collect(llm: Client, items: Any, **options: Any) -> list[MapResult]:
    return [result async for result in llm.map(items, model=SIMULATED, max_tokens=TOKENS, **options)]


def test_hundreds_of_prompts_are_answered_in_order_and_as_low(llm: Client, observer: Observer, simulated: str) -> None:
    before = observer.value("serve_app_requests_total", model=simulated, priority="low", outcome="ok")
    seen: list[MapProgress] = []
    results = asyncio.run(collect(llm, prompts(PROMPTS), progress=seen.append))
    assert [result.index for result in results] == list(range(PROMPTS))
    assert [result.item for result in results] == list(prompts(PROMPTS))
    assert {result.error for result in results} == {None}
    assert results[7].text == llm.sync.complete("The river 7", model=simulated, max_tokens=TOKENS).choices[0].text
    assert (seen[-1].done, seen[-1].failed, seen[-1].tokens) == (PROMPTS, 0, PROMPTS * TOKENS)
    after = observer.value("serve_app_requests_total", model=simulated, priority="low", outcome="ok")
    assert after - before == PROMPTS


def test_a_queue_that_is_too_small_refuses_and_all_prompts_are_answered(
    llm: Client, observer: Observer, simulated: str
) -> None:
    before = observer.generated(simulated)
    lasting = int(LASTING * slowness())
    results = list(
        llm.sync.map(prompts(PROMPTS), model=simulated, max_tokens=lasting, concurrency=TOO_MANY, ordered=False)
    )
    assert sorted(result.index for result in results) == list(range(PROMPTS))
    assert {result.error for result in results} == {None}
    attempts = sum(result.attempts for result in results)
    assert PROMPTS < attempts < 3 * PROMPTS, "some were refused, and the map has sent less after that"
    assert observer.generated(simulated) - before == PROMPTS * lasting, "each ran once"


def test_a_limit_s_moments_are_kept_so_that_no_prompt_is_refused_twice(stack: Stack, simulated: str) -> None:
    named = {"name": "map", "tenant": f"t-{secrets.token_hex(4)}", "limits": LIMIT}
    made = stack.post("/admin/keys", named)
    assert made.status_code == 201, made.text
    headers = {"Authorization": f"Bearer {made.json()['key']}"}
    wait_until(lambda: stack.get("/v1/models", headers=headers).status_code, FOLLOW_S, "the key is known", wanted=200)
    with connect(made.json()["key"], model=simulated) as limited:
        results = asyncio.run(collect(limited, ["The same river"] * LIMITED))
    assert {result.error for result in results} == {None}
    attempts = {result.attempts for result in results}
    # a client that is later than the grace of the moment it was told gets another one
    assert min(attempts) == 1 < max(attempts) <= math.ceil(2 * slowness())


def test_leaving_a_map_ends_its_requests(llm: Client, observer: Observer, simulated: str) -> None:
    items = [{"prompt": "short", "max_tokens": 1}, *({"prompt": text, "max_tokens": LONG} for text in prompts(20))]

    async def leave() -> None:
        async for _ in llm.map(items, model=simulated):
            break

    asyncio.run(leave())
    wait_until(lambda: observer.figures(simulated), ABORT_S, "running, waiting, granted", wanted=(0, 0, 0))
