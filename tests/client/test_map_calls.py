"""A map by the client itself, on the real edge and fake engines: types, a real queue that refuses."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from serve_app.client import MapProgress
from serve_app.client.client import Client
from serve_app.client.repeats import KEY as KEY_HEADER
from serve_app.client.repeats import RETRY_COUNT
from serve_app.errors import BadRequest, NotFound, RateLimited
from serve_app.http import AnswerPiece, HttpRequest
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.types import Outcome
from tests.fakes import asgi_client
from tests.fakes.asgi_client import KEY
from tests.fakes.engines import FakeCluster, model, until
from tests.fakes.handle_calls import client_on, run
from tests.fakes.router import LONG, SOON_S, expected_text

HELLO = [{"role": "user", "content": "Hi"}]
SLOTS = 2
QUEUED = 2
OFTEN = 20  # attempts of all prompts for one that is answered: far more than any run has needed


class Calls:
    """Stands in for `serve_app.ray_adapter.IngressHandle`, and keeps the requests that answer a prompt."""

    def __init__(self, router: AsgiBridge) -> None:
        self.loop = asyncio.get_running_loop()
        self._router = router
        self.asked: list[HttpRequest] = []

    async def stream(self, *request: Any, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        asked = HttpRequest(*request)
        if asked.method == "POST":
            self.asked.append(asked)
        pieces = self._router.exchange(asked)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    async def close(self) -> None:
        """There is nothing to close."""


async def started(cluster: FakeCluster, **more: Any) -> tuple[Client, Calls, asgi_client.Client]:
    await cluster.add("r1")
    router = await asgi_client.Client(cluster, **more).start()
    calls = Calls(AsgiBridge(router.edge))
    return client_on(calls, KEY), calls, router


def prompts(count: int) -> list[str]:
    return [f"prompt {number}" for number in range(count)]


def test_answers_are_those_of_the_single_calls() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, router = await started(cluster)
        wrong = {"prompt": "p", "max_token": 1}
        items = ["p", HELLO, {"messages": HELLO, "max_tokens": 2}, {"prompt": [1, 2, 3]}, wrong]
        results = [result async for result in llm.map(items, max_tokens=5)]
        assert [type(result.answer) for result in results] == [
            Completion,
            ChatCompletion,
            ChatCompletion,
            Completion,
            type(None),
        ]
        assert results[0].text == expected_text("p", 5)
        assert results[1].text == (await llm.chat(HELLO, max_tokens=5)).choices[0].message.content
        short = results[2].unwrap().usage
        assert isinstance(results[4].error, BadRequest)
        assert str(results[4].error) == "complete() has no argument `max_token`; did you mean `max_tokens`?"
        assert short is not None
        assert short.total_tokens - short.prompt_tokens == 2
        priorities = [asked.body.count(b'"priority":"low"') for asked in calls.asked[:4]]
        assert priorities == [1, 1, 1, 1]
        assert router.outcomes == {Outcome.OK: 5}

    run(scenario)


def test_embeddings_are_items_like_others() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _, _ = await started(cluster)
        seen: list[MapProgress] = []
        (result,) = [result async for result in llm.map([{"input": ["a", "b"]}], progress=seen.append)]
        assert type(result.answer) is CreateEmbeddingResponse
        assert seen[0].tokens == result.answer.usage.total_tokens > 0
        with pytest.raises(TypeError, match="no text"):
            _ = result.text

    run(scenario, model(task="embed"))


def test_a_full_queue_refuses_and_every_prompt_is_answered_once_under_one_key() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, calls, router = await started(cluster, admission={"max_queued": QUEUED})
        async for _ in llm.map(prompts(20), concurrency=SLOTS, max_tokens=5):
            continue  # so that the queue has measured how fast such requests end, and names short waits
        calls.asked.clear()
        before = len(cluster.submits)
        results = [result async for result in llm.map(prompts(60), concurrency=16, max_tokens=5)]
        assert [result.text for result in results] == [expected_text(prompt, 5) for prompt in prompts(60)]
        assert len(cluster.submits) - before == 60
        attempts = Counter(result.attempts for result in results)
        assert attempts[1] < 60, "the queue has refused some"
        assert sum(count * number for number, count in attempts.items()) < OFTEN * 60
        by_key: defaultdict[bytes, list[tuple[bytes, bytes]]] = defaultdict(list)
        for asked in calls.asked:
            headers = dict(asked.headers)
            by_key[headers[KEY_HEADER]].append((headers[RETRY_COUNT], asked.body))
        assert sorted(len(sent) for sent in by_key.values()) == sorted(attempts.elements())
        for sent in by_key.values():
            assert [number for number, _ in sent] == [b"%d" % number for number in range(len(sent))]
            assert len({body for _, body in sent}) == 1
        assert router.outcomes[Outcome.REFUSED] == len(calls.asked) - 60

    run(scenario, model(slots=SLOTS))


def test_a_limit_recognises_the_repeat_of_a_refused_prompt_also_among_equal_ones() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _, router = await started(cluster, limits={"requests_per_minute": 60})
        router.limits.refusal = RateLimited("one a second", retry_after_s=0.05)

        def open_again(progress: MapProgress) -> None:
            if progress.waiting == 2:
                router.limits.refusal = None

        results = [result async for result in llm.map(["same", "same"], max_tokens=1, progress=open_again)]
        assert [(result.text, result.attempts) for result in results] == [(expected_text("same", 1), 2)] * 2
        assert [request.is_repeat for request in router.limits.asked] == [False, False, True, True]
        assert len({request.fingerprint for request in router.limits.asked}) == 1

    run(scenario)


def test_a_model_that_is_not_there_is_each_item_s_own_error() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _, _ = await started(cluster)
        items = [{"prompt": "p", "model": "nobody"}, "p"]
        results = [result async for result in llm.map(items, max_tokens=5)]
        assert [type(result.error) for result in results] == [NotFound, type(None)]

    run(scenario)


def test_leaving_a_map_ends_its_requests_in_the_engine() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _, router = await started(cluster)
        async with llm.map([{"prompt": "p", "max_tokens": 2}, *prompts(5)], concurrency=4, max_tokens=LONG) as results:
            await anext(results)
            await until(lambda: len(cluster.submits) >= 4, SOON_S, "three long ones run")
        await until(router.at_rest, SOON_S, "nothing waits, nothing is granted")
        assert router.outcomes[Outcome.CANCELLED_RUNNING] >= 3

    run(scenario)


def test_a_sync_map_from_a_thread_while_the_loop_runs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _, _ = await started(cluster)

        def script() -> list[str]:
            return [result.text for result in llm.sync.map((prompt for prompt in prompts(50)), max_tokens=5)]

        assert await asyncio.to_thread(script) == [expected_text(prompt, 5) for prompt in prompts(50)]
        with pytest.raises(BadRequest, match="did you mean `max_tokens`"):
            llm.sync.map(["p"], max_token=5)

    run(scenario)
