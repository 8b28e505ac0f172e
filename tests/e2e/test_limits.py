"""The example of docs/how-to/set-limits.md by the official SDK, over three routers: 60 requests and 150,000 tokens
a minute, 10 at once."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import requests

from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack
from tests.e2e.three import MODEL, all_routers
from tests.waiting import patient, slowness, wait_until

EXAMPLE = {"requests_per_minute": 60, "tokens_per_minute": 150_000, "max_concurrent": 10}
BURST = 60
PER_S = 1.0
ASKED = 68  # at the same moment: the last is due after 8 s
TOKENS = 20  # 0.1 s of the simulated engine
FOLLOW_S = 5.0  # for all routers to know a new key; a second is promised, where no other tests run
CLOCK_S = 0.1  # between the charge at the actor and the grant that a receipt has


@pytest.fixture
def limited(three: Stack) -> Iterator[Stack]:
    """The stack of three routers, with a new key that has the limits of the example."""
    made = three.post("/admin/keys", {"name": "limited", "tenant": f"t-{secrets.token_hex(4)}", "limits": EXAMPLE})
    assert made.status_code == 201, made.text
    key = made.json()["key"]
    routers = all_routers(three)
    wait_until(
        lambda: {one.get("/v1/models", headers=one.headers(key)).status_code for one in routers},
        FOLLOW_S,
        "key",
        wanted={200},
    )
    yield replace(three, api_key=key)
    url = f"{three.base_url}/admin/keys/{made.json()['id']}"
    assert requests.delete(url, headers=three.headers(), timeout=REQUEST_TIMEOUT_S).status_code == 200


def asked(number: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"The river {number}", "max_tokens": TOKENS}


def refused(client: openai.OpenAI, number: int) -> openai.RateLimitError | None:
    """How a call without retries is refused, if it is."""
    try:
        client.completions.create(**asked(number))
    except openai.RateLimitError as refusal:
        return refusal
    return None


def granted(three: Stack, answers: list[Any]) -> list[tuple[float, float]]:
    """When the requests began on their replica and ended, by their receipts, in order."""
    found = []
    for answer in answers:
        body = three.get(f"/admin/requests/{answer.id}").json()
        found.append((body["arrived"] + body["wait_s"], body["arrived"] + body["total_s"]))
    return sorted(found)


def test_the_sdk_s_own_retries_bring_every_call_to_its_answer_within_the_limits(three: Stack, limited: Stack) -> None:
    # Its two, on a quiet machine. A client that is later than the grace of the moment it was told gets another moment.
    retries = math.ceil(openai.DEFAULT_MAX_RETRIES * slowness())

    async def all_at_once() -> list[Any]:
        async with limited.async_client(max_retries=retries) as client:
            return await asyncio.gather(*(client.completions.create(**asked(number)) for number in range(ASKED)))

    spans = granted(three, asyncio.run(all_at_once()))
    assert len(spans) == ASKED
    clock_s = patient(CLOCK_S)
    for first, (begin, _) in enumerate(spans):
        for last in range(first, ASKED):
            window_s = spans[last][0] - begin + clock_s
            assert last - first + 1 <= 1.01 * (BURST + PER_S * window_s), (first, last, window_s)
    for begin, _ in spans:
        assert sum(start <= begin < end for start, end in spans) <= EXAMPLE["max_concurrent"]

    with limited.client() as client:
        refusal = next(filter(None, (refused(client, ASKED + number) for number in range(20))))
    assert refusal.code == "rate_limit"
    headers = refusal.response.headers
    assert int(headers["retry-after"]) >= int(headers["retry-after-ms"]) / 1000 > 0
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-limit-tokens"] == "150000"
    assert headers["x-ratelimit-remaining-requests"] == "0"
