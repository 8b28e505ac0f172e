"""The line in front of an engine: who waits, who is refused, and what the refusal says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.observe import FILL_S, Observer
from tests.e2e.stack import MAX_QUEUED, REQUEST_TIMEOUT_S, SIMULATED, SIMULATED_SLOTS, STEP_S, Stack
from tests.waiting import patient, quiet_time, wait_until

LONG_TOKENS = 8000  # 40 s on the simulated engine: whoever takes a slot with it keeps it until it is told to go
SHORT_TOKENS = 4
QUICK_S = 5.0  # far below the 40 s of what runs and the 60 s of the longest wait: the refusal waited for neither
RETRIES = 8  # of the SDK; each comes after the wait it was told
WARM_REQUESTS = 200  # so that the line has measured how fast short requests end


@dataclass
class Load:
    """Requests on the simulated model, from one asynchronous client."""

    http: httpx.AsyncClient
    observer: Observer
    tasks: list[asyncio.Task[httpx.Response]] = field(default_factory=list)

    async def ask(
        self, tokens: int = SHORT_TOKENS, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        body = {"model": SIMULATED, "prompt": "The river", "max_tokens": tokens} | more
        return await self.http.post("/v1/completions", json=body, headers=headers)

    def start(self, tokens: int = SHORT_TOKENS, **more: Any) -> asyncio.Task[httpx.Response]:
        self.tasks.append(asyncio.create_task(self.ask(tokens, **more)))
        return self.tasks[-1]

    async def granted(self, count: int) -> None:
        await asyncio.to_thread(
            wait_until, lambda: self.observer.granted(SIMULATED), FILL_S, "slots granted", wanted=count
        )

    async def waiting(self, count: int) -> None:
        await asyncio.to_thread(
            wait_until, lambda: self.observer.waiting(SIMULATED), FILL_S, "requests waiting", wanted=count
        )

    async def fill_slots(self) -> asyncio.Task[httpx.Response]:
        task = self.start(LONG_TOKENS, n=SIMULATED_SLOTS)
        await self.granted(SIMULATED_SLOTS)
        return task

    async def fill_queue(self, **more: Any) -> list[asyncio.Task[httpx.Response]]:
        tasks = [self.start(**more) for _ in range(MAX_QUEUED)]
        await self.waiting(MAX_QUEUED)
        return tasks


@asynccontextmanager
async def load_on(stack: Stack, observer: Observer) -> AsyncIterator[Load]:
    limits = httpx.Limits(max_connections=4 * MAX_QUEUED)
    async with httpx.AsyncClient(
        base_url=stack.base_url, headers=stack.headers(), limits=limits, timeout=REQUEST_TIMEOUT_S
    ) as http:
        load = Load(http, observer)
        try:
            yield load
        finally:
            for task in load.tasks:
                task.cancel()
            await asyncio.gather(*load.tasks, return_exceptions=True)


def check_refusal(response: httpx.Response, code: str) -> float:
    """A 429 in OpenAI's format with both headers of the wait, which is returned, in seconds."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", code)
    wait_ms = int(response.headers["retry-after-ms"])
    assert wait_ms >= 0
    assert int(response.headers["retry-after"]) == -(-wait_ms // 1000)
    return wait_ms / 1000


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(
    stack: Stack, observer: Observer, simulated: str
) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            await load.fill_slots()
            await load.fill_queue()
            began = quiet_time()
            check_refusal(await load.ask(), "queue_full")
            check_refusal(await load.ask(stream=True), "queue_full")
            assert quiet_time() - began < QUICK_S
            assert not any(task.done() for task in load.tasks)

    with observer.ends(simulated, "refused", 2):
        asyncio.run(scenario())


def test_what_waits_in_a_full_queue_is_served_in_the_end(stack: Stack, observer: Observer, simulated: str) -> None:
    async def scenario() -> list[int]:
        async with load_on(stack, observer) as load:
            blocker = await load.fill_slots()
            waiting = await load.fill_queue()
            blocker.cancel()
            return [(await task).status_code for task in waiting]

    assert asyncio.run(scenario()) == [200] * MAX_QUEUED


def test_a_higher_class_takes_the_place_of_the_youngest_of_the_lowest(
    stack: Stack, observer: Observer, simulated: str, batch_key: str
) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            blocker = await load.fill_slots()
            low = await load.fill_queue(headers=stack.headers(batch_key))
            high = load.start(priority="high")
            await asyncio.wait(low, return_when=asyncio.FIRST_COMPLETED)
            (shed,) = [task for task in low if task.done()]
            check_refusal(await shed, "shed")
            check_refusal(await load.ask(headers=stack.headers(batch_key)), "queue_full")
            blocker.cancel()
            assert (await high).status_code == 200
            assert [(await task).status_code for task in low if task is not shed] == [200] * (MAX_QUEUED - 1)

    asyncio.run(scenario())


def test_the_queue_is_ordered_by_class(stack: Stack, observer: Observer, simulated: str, batch_key: str) -> None:
    """Served one after the other, since each takes all slots: high before normal before low, whoever came first."""
    order: list[str] = []

    async def ask(load: Load, name: str, **more: Any) -> None:
        response = await load.ask(n=SIMULATED_SLOTS, **more)
        assert response.status_code == 200, response.text
        order.append(name)

    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            blocker = await load.fill_slots()
            asked: list[asyncio.Task[None]] = []
            for name, more in (
                ("low", {"headers": stack.headers(batch_key)}),
                ("normal", {}),
                ("flex", {"service_tier": "flex"}),
                ("high", {"priority": "high"}),
                ("number", {"priority": 2}),
            ):
                asked.append(asyncio.create_task(ask(load, name, **more)))
                await load.waiting(len(asked))
            blocker.cancel()
            await asyncio.gather(*asked)

    asyncio.run(scenario())
    assert order[:3] == ["high", "number", "normal"]
    assert set(order[3:]) == {"low", "flex"}


def test_a_deadline_that_passes_in_the_queue_is_a_429(stack: Stack, observer: Observer, simulated: str) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            await load.fill_slots()
            began = quiet_time()
            for stream in (False, True):
                refused = await load.ask(headers={"X-Deadline-Ms": "300"}, stream=stream)
                check_refusal(refused, "deadline")
            assert quiet_time() - began < QUICK_S
            assert observer.waiting(simulated) == 0

    asyncio.run(scenario())


def test_a_deadline_does_not_cut_what_runs(stack: Stack, observer: Observer, simulated: str) -> None:
    """It bounds the wait for a start: the tokens take twice as long, and all of them come."""
    deadline_s = patient(0.5)
    tokens = int(2 * deadline_s / STEP_S)

    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            response = await load.ask(tokens, headers={"X-Deadline-Ms": str(int(1000 * deadline_s))})
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["completion_tokens"] == tokens

    asyncio.run(scenario())


def test_a_deadline_raises_the_sdk_s_rate_limit_error(stack: Stack, observer: Observer, simulated: str) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load, stack.async_client() as client:
            await load.fill_slots()
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(
                    model=simulated, prompt="a", max_tokens=1, extra_headers={"X-Deadline-Ms": "200"}
                )
            assert caught.value.code == "deadline"

    asyncio.run(scenario())


def test_the_sdk_obeys_the_wait_that_it_gets(stack: Stack, observer: Observer, simulated: str) -> None:
    """Each of its attempts comes no sooner than the refusal before it said, and one of them is served."""
    refusals: list[tuple[float, float]] = []  # when it arrived, and the wait it told, in seconds
    refused = asyncio.Event()
    attempts: list[float] = []

    async def on_request(request: httpx.Request) -> None:
        attempts.append(time.monotonic())

    async def on_response(response: httpx.Response) -> None:
        if response.status_code == 429:
            refusals.append((time.monotonic(), int(response.headers["retry-after-ms"]) / 1000))
            refused.set()

    async def scenario() -> None:
        hooks: Any = {"request": [on_request], "response": [on_response]}
        async with (
            httpx.AsyncClient(event_hooks=hooks, timeout=REQUEST_TIMEOUT_S) as http,
            load_on(stack, observer) as load,
            stack.async_client(max_retries=RETRIES, http_client=http) as client,
        ):
            await asyncio.gather(*(load.ask() for _ in range(WARM_REQUESTS // 4)))
            for _ in range(3):
                await asyncio.gather(*(load.ask() for _ in range(WARM_REQUESTS // 4)))
            blocker = await load.fill_slots()
            await load.fill_queue()
            answer = asyncio.create_task(client.completions.create(model=simulated, prompt="a", max_tokens=1))
            await asyncio.wait_for(refused.wait(), patient(FILL_S))
            blocker.cancel()
            assert (await answer).choices

    asyncio.run(scenario())
    assert len(attempts) == len(refusals) + 1 >= 2
    for (reported, wait_s), attempt in zip(refusals, attempts[1:], strict=True):
        assert attempt - reported >= wait_s


def test_a_request_for_more_sequences_than_a_replica_has_is_refused_for_good(
    stack: Stack, observer: Observer, simulated: str
) -> None:
    """Nobody is let wait for what never comes."""
    body = {"model": simulated, "prompt": ["a", "b", "c"], "n": SIMULATED_SLOTS + 1, "max_tokens": 1}
    response = stack.post("/v1/completions", body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("n", "prompt")


def test_work_without_a_slot_passes_a_full_queue(stack: Stack, observer: Observer, simulated: str) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load:
            await load.fill_slots()
            await load.fill_queue()
            reported = await load.http.post("/tokenize", json={"model": simulated, "prompt": "The river"})
            assert reported.status_code == 200
            assert reported.json()["count"] == 2
            assert (await load.http.get("/v1/models")).status_code == 200
            assert (await load.http.get("/ready")).status_code == 200

    asyncio.run(scenario())


def test_one_model_s_full_queue_is_not_another_s(stack: Stack, observer: Observer, simulated: str) -> None:
    async def scenario() -> None:
        async with load_on(stack, observer) as load, stack.async_client() as client:
            await load.fill_slots()
            await load.fill_queue()
            answer = await client.completions.create(model="tiny", prompt="a", max_tokens=2)
            assert answer.choices

    asyncio.run(scenario())
