"""Many clients at once: everybody is answered as if alone, and nothing is left over."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx
import openai
import pytest

from tests.e2e import prompts
from tests.e2e.observe import Observer
from tests.e2e.reference import Reference
from tests.e2e.stack import REQUEST_TIMEOUT_S, SIMULATED, TINY, TINY_SLOTS, Stack

CLIENTS = 64  # as many as tiny has slots
ANSWER_TOKENS = 32
MIXED_AT_ONCE = 48  # below slots and line of either model together, so that nobody is refused
MANY_AT_ONCE = 48


@pytest.mark.long
def test_64_clients_get_the_answers_they_would_get_alone(
    stack: Stack, client: openai.OpenAI, reference: Reference, record_property: Any
) -> None:
    """Every fourth streams. Where a token differs from the answer alone it has to be a tie in the library's logits."""
    asked: dict[str, Any] = {"model": TINY, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    extra: dict[str, Any] = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    alone = [_tokens(client.completions.create(prompt=prompts.text(n), **asked, **extra)) for n in range(CLIENTS)]

    async def ask(shared: openai.AsyncOpenAI, number: int) -> list[int]:
        if number % 4:
            return _tokens(await shared.completions.create(prompt=prompts.text(number), **asked, **extra))
        tokens: list[int] = []
        stream = await shared.completions.create(prompt=prompts.text(number), stream=True, **asked, **extra)
        async for chunk in stream:
            for choice in chunk.choices:
                assert choice.model_extra is not None
                tokens += choice.model_extra["token_ids"] or []
        return tokens

    async def all_at_once() -> list[list[int]]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with (
            httpx.AsyncClient(limits=limits, timeout=REQUEST_TIMEOUT_S) as http,
            stack.async_client(http_client=http) as shared,
        ):
            return await asyncio.gather(*(ask(shared, number) for number in range(CLIENTS)))

    together = asyncio.run(all_at_once())
    ties = 0
    for number in range(CLIENTS):
        assert len(alone[number]) == len(together[number]) == ANSWER_TOKENS
        if alone[number] == together[number]:
            continue
        for tokens in (alone[number], together[number]):
            compared = reference.compare(reference.encode(prompts.text(number)), tokens)
            assert compared.mismatch is None, f"prompt {number}: {compared.mismatch}"
            ties += compared.ties
    record_property("ties", ties)
    assert TINY_SLOTS >= CLIENTS


def _tokens(answer: Any) -> list[int]:
    (choice,) = answer.choices
    tokens: list[int] = choice.model_extra["token_ids"]
    return tokens


@pytest.mark.parametrize("requests", [160, pytest.param(3000, marks=pytest.mark.long)])
def test_a_mixed_load_with_clients_that_leave_ends_with_nothing_left(
    stack: Stack, observer: Observer, simulated: str, requests: int
) -> None:
    """Chats, completions, streams and mistakes on both models; a third of the clients leave at some moment."""
    rng = random.Random(20)
    gate = asyncio.Semaphore(MIXED_AT_ONCE)
    plans = [_plan(rng, number) for number in range(requests)]

    async def ask(http: httpx.AsyncClient, plan: dict[str, Any]) -> int | None:
        async with gate:
            try:
                async with asyncio.timeout(plan["leaves_after_s"]):
                    response = await http.post(plan["path"], json=plan["body"])
                    return response.status_code
            except TimeoutError:
                return None

    async def scenario() -> list[int | None]:
        limits = httpx.Limits(max_connections=MIXED_AT_ONCE, max_keepalive_connections=MIXED_AT_ONCE // 2)
        async with httpx.AsyncClient(
            base_url=stack.base_url, headers=stack.headers(), limits=limits, timeout=REQUEST_TIMEOUT_S
        ) as http:
            return await asyncio.gather(*(ask(http, plan) for plan in plans))

    seen = asyncio.run(scenario())
    for plan, status in zip(plans, seen, strict=True):
        assert status in ({plan["status"]} if plan["leaves_after_s"] is None else {plan["status"], None}), plan
    assert seen.count(200) >= requests // 3
    assert None in seen
    observer.wait_idle(TINY)
    observer.wait_idle(SIMULATED)


def _plan(rng: random.Random, number: int) -> dict[str, Any]:
    model = rng.choice([TINY, SIMULATED])
    tokens = rng.choice([1, 10, 60, 200])
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "stream": rng.random() < 0.5}
    if rng.random() < 0.5:
        path = "/v1/chat/completions"
        body = body | {"messages": prompts.chat(number)}
    else:
        path = "/v1/completions"
        body = body | {"prompt": prompts.text(number), "n": rng.choice([1, 1, 2])}
    status = 200
    if rng.random() < 0.1:
        body["max_tokens"] = -1
        status = 400
    leaves = rng.uniform(0.0, 0.4) if rng.random() < 0.35 else None
    return {"path": path, "body": body, "status": status, "leaves_after_s": leaves}


@pytest.mark.long
@pytest.mark.parametrize("requests", [600, pytest.param(5000, marks=pytest.mark.long)])
def test_many_requests_are_answered_and_counted_one_by_one(
    stack: Stack, observer: Observer, simulated: str, requests: int
) -> None:
    """Answers differ by prompt, so one that went to the wrong client would be seen."""
    gate = asyncio.Semaphore(MANY_AT_ONCE)
    expected: dict[int, str] = {}

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        body = {"model": simulated, "prompt": prompts.text(number % 40), "max_tokens": 3, "stream": number % 2 == 0}
        async with gate:
            response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        reported = "".join(re.findall(r'"text": ?"([^"]*)"', response.text))
        assert reported
        assert expected.setdefault(number % 40, reported) == reported

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=MANY_AT_ONCE)
        async with httpx.AsyncClient(
            base_url=stack.base_url, headers=stack.headers(), limits=limits, timeout=REQUEST_TIMEOUT_S
        ) as http:
            await asyncio.gather(*(ask(http, number) for number in range(requests)))

    with observer.ends(simulated, "ok", requests):
        asyncio.run(scenario())
    assert len(set(expected.values())) == 40
