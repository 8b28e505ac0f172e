"""The official OpenAI SDK and httpx over the handle, on the real edge and fake engines: HTTP without a connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletion

from serve_app.client.client import Client
from serve_app.errors import DROPPED, NO_ROUTER, BodyTooLarge, ServeAppError, Unavailable
from serve_app.http import AnswerPiece
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.types import Outcome
from tests.client.test_client import gone, started
from tests.fakes.asgi_client import KEY
from tests.fakes.engines import MODEL, FakeCluster, model, turns, until
from tests.fakes.handle_calls import client_of, client_on, home, run
from tests.fakes.router import LONG, SOON_S, expected_text
from tests.waiting import patient

HELLO: Any = [{"role": "user", "content": "Hi"}]
IMPATIENT_S = 0.05  # a read timeout; the fake engine's first token takes a millisecond
JOIN_S = 10.0  # of threads that have nothing left to do


def test_the_sdk_s_answers_are_those_of_our_own_methods() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        ours = await llm.chat(HELLO, max_tokens=5)
        chat = await llm.openai.chat.completions.create(messages=HELLO, model=MODEL, max_tokens=5)
        assert type(chat) is ChatCompletion
        assert (chat.choices, chat.usage) == (ours.choices, ours.usage)
        async with await llm.openai.chat.completions.create(
            messages=HELLO, model=MODEL, max_tokens=5, stream=True
        ) as stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == ours.choices[0].message.content
        completion = await llm.openai.completions.create(prompt="p", model=MODEL, max_tokens=5)
        assert completion.choices[0].text == expected_text("p", 5)
        assert [one.id async for one in llm.openai.models.list()] == [MODEL]
        assert (await llm.openai.models.retrieve(MODEL)).id == MODEL
        assert router.outcomes == {Outcome.OK: 4}, "a stream that was read to its end was not cancelled"

    run(scenario)


def test_scores_by_the_sdk_s_post() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        body = {"model": MODEL, "query": "a", "documents": ["b", "a"], "top_n": 1}
        answer: Any = await llm.openai.post("/rerank", body=body, cast_to=object)
        assert [(row["index"], row["document"]["text"]) for row in answer["results"]] == [(1, "a")]
        with pytest.raises(openai.BadRequestError) as refused:
            await llm.openai.post("/score", body={"model": MODEL, "queries": "a", "documents": []}, cast_to=object)
        assert refused.value.param == "documents"
        assert router.outcomes == {Outcome.OK: 1, Outcome.BAD_REQUEST: 1}

    run(scenario, model(task="embed"))


def test_embeddings_by_the_sdk() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        answer = await llm.openai.embeddings.create(input=["a", "b"], model=MODEL)
        ours = await llm.embed(["a", "b"])
        assert [one.index for one in answer.data] == [0, 1]
        assert answer.data[0].embedding == pytest.approx(ours.data[0].embedding)

    run(scenario, model(task="embed"))


def test_status_and_headers_are_those_over_http() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        raw = await llm.openai.chat.completions.with_raw_response.create(
            messages=HELLO, model=MODEL, max_tokens=1, extra_headers={"x-request-id": "mine"}
        )
        assert raw.http_response.headers["x-request-id"] == "mine"
        assert raw.http_response.headers["x-serve-app-request-id"] in raw.parse().id
        answer = await llm.openai.chat.completions.create(messages=HELLO, model=MODEL, max_tokens=1)
        assert answer._request_id is not None
        assert answer._request_id in answer.id, "what its receipt is found by"
        async with llm.http_client.stream(
            "POST", "chat/completions", json={"messages": HELLO, "model": MODEL, "max_tokens": 2, "stream": True}
        ) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert (await llm.http_client.get("/no/such")).json()["error"]["code"] == "unknown_url"
        assert (await llm.http_client.put("models")).headers["allow"] == "GET, HEAD"

    run(scenario)


def test_errors_are_the_sdk_s_and_nothing_is_repeated() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        chat = llm.openai.chat.completions
        with pytest.raises(openai.NotFoundError) as unknown:
            await chat.create(messages=HELLO, model="nobody")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await chat.create(messages=HELLO, model=MODEL, max_tokens="many", stream=True)  # type: ignore[call-overload]
        assert wrong.value.param == "max_tokens"
        async with llm.stream_complete("fills it", n=4, max_tokens=LONG) as filling:
            await anext(filling)
            with pytest.raises(openai.RateLimitError) as late:
                await chat.create(messages=HELLO, model=MODEL, extra_headers={"x-deadline-ms": "50"})
        assert late.value.code == "deadline"
        assert int(late.value.response.headers["retry-after"]) >= 1
        await gone(router, Outcome.REFUSED)
        with pytest.raises(openai.AuthenticationError):
            await llm.openai.with_options(api_key="sk-of-nobody-0123456789").models.list()

    run(scenario)


def test_an_engine_lost_in_mid_stream_is_the_sdk_s_error_event() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        reported: list[str] = []

        async def read() -> None:
            async with await llm.openai.completions.create(
                prompt="long", model=MODEL, max_tokens=LONG, stream=True
            ) as stream:
                async for piece in stream:
                    reported.append(piece.choices[0].text)
                    if len(reported) == 3:
                        router.model.replica_set.info = None  # no engine is known that could go on
                        cluster.kill("r1")

        with pytest.raises(openai.APIError, match="replica"):
            await read()
        assert "".join(reported) == expected_text("long", len(reported))
        await gone(router, Outcome.ENGINE_FAILED)

    run(scenario, model(step_s=0.005))


async def _stream(llm: Client) -> Any:
    return await llm.openai.completions.create(prompt="long", model=MODEL, max_tokens=LONG, stream=True)


async def _leave_the_block(llm: Client) -> None:
    async with await _stream(llm) as stream:
        async for _ in stream:
            break


async def _close(llm: Client) -> None:
    stream = await _stream(llm)
    await anext(stream)
    await stream.close()


async def _close_unread(llm: Client) -> None:
    await (await _stream(llm)).close()


async def _cancel(llm: Client) -> None:
    asked = llm.openai.completions.create(prompt="long", model=MODEL, max_tokens=LONG)
    call = asyncio.create_task(asked)  # type: ignore[arg-type]
    await asyncio.sleep(patient(0.05))  # it runs by then; if not, it is cancelled in the line, and the test says so
    call.cancel()
    await asyncio.wait({call})
    assert call.cancelled()


async def _time_out(llm: Client) -> None:
    with pytest.raises(openai.APITimeoutError):
        await llm.openai.completions.create(prompt="long", model=MODEL, max_tokens=LONG, timeout=patient(IMPATIENT_S))


LEAVING = [_leave_the_block, _close, _close_unread, _cancel, _time_out]


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving_ends_the_request(leave: Callable[[Client], Awaitable[None]]) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        await leave(llm)
        await gone(router, Outcome.CANCELLED_RUNNING)

    run(scenario)


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving_in_another_loop_than_the_home_loop_ends_the_request(
    leave: Callable[[Client], Awaitable[None]],
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        await asyncio.to_thread(lambda: asyncio.run(leave(llm)))  # type: ignore[arg-type]
        await gone(router, Outcome.CANCELLED_RUNNING)

    run(scenario)


def test_a_request_whose_headers_never_come_times_out_and_leaves_the_queue() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        async with llm.stream_complete("fills it", n=4, max_tokens=LONG) as filling:
            await anext(filling)
            timeout = httpx2.Timeout(None, read=patient(IMPATIENT_S))
            with pytest.raises(openai.APITimeoutError):
                await llm.openai.chat.completions.create(messages=HELLO, model=MODEL, timeout=timeout)
            await until(lambda: router.outcomes.get(Outcome.CANCELLED_QUEUED) == 1, SOON_S, "out of the line")

    run(scenario)


class Broken:
    """Stands in for `serve_app.ray_adapter.IngressHandle`: an exchange that ends with an error, after these pieces."""

    def __init__(self, error: BaseException, *pieces: AnswerPiece) -> None:
        self.loop = asyncio.get_running_loop()
        self._error = error
        self._pieces = pieces
        self.accept_s: list[float | None] = []

    async def stream(self, *request: Any, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        self.accept_s.append(accept_s)
        for piece in self._pieces:
            yield piece
        raise self._error

    async def close(self) -> None:
        """Nothing runs."""


def nobody_in_time() -> Unavailable:
    error = Unavailable("nobody took it", code=NO_ROUTER)
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("error", "raised", "cause"),
    [
        (Unavailable("no such application", code=NO_ROUTER), openai.APIConnectionError, httpx2.ConnectError),
        (nobody_in_time(), openai.APITimeoutError, httpx2.ConnectTimeout),
        (Unavailable("the router has gone", code=DROPPED), openai.APIConnectionError, httpx2.ReadError),
        (ServeAppError("the router dropped the request"), openai.APIConnectionError, httpx2.ReadError),
    ],
)
def test_a_router_that_is_lost_is_a_connection_that_is_lost(
    error: ServeAppError, raised: type[Exception], cause: type[Exception]
) -> None:
    async def scenario() -> None:
        broken = Broken(error)
        llm = client_on(broken, KEY)
        with pytest.raises(raised) as lost:
            await llm.openai.chat.completions.create(messages=HELLO, model=MODEL)
        assert type(lost.value) is raised
        assert type(lost.value.__cause__) is cause
        with pytest.raises(openai.APIConnectionError):
            await llm.openai.models.list(timeout=2.5)
        assert broken.accept_s == [30.0, 2.5]

    asyncio.run(scenario())


def test_a_router_lost_in_mid_stream_is_a_connection_that_is_lost() -> None:
    async def scenario() -> None:
        events: AnswerPiece = (200, [(b"content-type", b"text/event-stream")], b'data: {"id":"1","choices":[]}\n\n')
        broken = Broken(Unavailable("the router has gone", code=DROPPED), events)
        llm = client_on(broken, KEY)
        stream = await llm.openai.chat.completions.create(messages=HELLO, model=MODEL, stream=True)
        assert (await anext(stream)).id == "1"
        with pytest.raises(openai.APIConnectionError):
            await anext(stream)

    asyncio.run(scenario())


def test_a_request_that_is_too_large_for_the_handle_is_a_413() -> None:
    async def scenario() -> None:
        llm = client_on(Broken(BodyTooLarge("too large", param="body")), KEY)
        with pytest.raises(openai.APIStatusError) as refused:
            await llm.openai.models.list()
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")

    asyncio.run(scenario())


def test_a_body_that_nobody_reads_holds_the_edge_up() -> None:
    sent = 0

    async def edge(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent += 1

    async def scenario() -> None:
        llm = client_of(AsgiBridge(edge), KEY, asyncio.get_running_loop())
        async with llm.http_client.stream("GET", "/x") as response:
            reading = response.aiter_raw()
            for read in range(1, 5):
                await anext(reading)
                await turns(50)
                assert sent <= read + 3

    asyncio.run(scenario())


def test_the_sdk_without_await() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)
        sdk = llm.sync.openai

        def thread() -> str | None:
            with sdk.chat.completions.create(messages=HELLO, model=MODEL, max_tokens=5, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            whole = sdk.chat.completions.create(messages=HELLO, model=MODEL, max_tokens=5)
            assert whole.choices[0].message.content == text
            with pytest.raises(openai.NotFoundError):
                sdk.chat.completions.create(messages=HELLO, model="nobody")
            assert llm.sync.http_client.get("models").json()["data"][0]["id"] == MODEL
            return text

        reported = await asyncio.gather(*(asyncio.to_thread(thread) for _ in range(4)))
        assert len(set(reported)) == 1
        assert (router.outcomes[Outcome.OK], router.outcomes[Outcome.BAD_REQUEST]) == (8, 4)
        with pytest.raises(RuntimeError, match="use `await`"):
            sdk.models.list()

    run(scenario)


def test_leaving_the_sdk_without_await_ends_the_request() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, router = await started(cluster)

        def leave() -> None:
            asked: Any = {"prompt": "long", "model": MODEL, "max_tokens": LONG}
            with llm.sync.openai.completions.create(stream=True, **asked) as stream:
                for _ in stream:
                    break
            llm.sync.openai.completions.create(stream=True, **asked).close()
            with pytest.raises(openai.APITimeoutError):
                llm.sync.openai.completions.create(timeout=patient(IMPATIENT_S), **asked)

        await asyncio.to_thread(leave)
        await gone(router, Outcome.CANCELLED_RUNNING, 3)

    run(scenario)


def test_the_sdk_in_one_loop_after_another() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        llm, _ = await started(cluster)
        reported: list[str] = []

        async def elsewhere() -> str:
            asked: Any = {"prompt": "p", "model": MODEL, "max_tokens": 50}
            async with await llm.openai.completions.create(stream=True, **asked) as stream:
                return "".join([piece.choices[0].text async for piece in stream])

        thread = threading.Thread(target=lambda: reported.extend(asyncio.run(elsewhere()) for _ in range(2)))
        thread.start()
        await asyncio.to_thread(thread.join, JOIN_S)
        assert reported == [expected_text("p", 50)] * 2

    run(scenario)


def test_neither_key_nor_environment_shows_or_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    asked: list[dict[bytes, bytes]] = []

    async def edge(scope: Any, receive: Any, send: Any) -> None:
        asked.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"data":[]}', "more_body": False})

    with home() as loop:
        llm = client_of(AsgiBridge(edge), KEY, loop)
        llm.sync.openai.models.list()
        llm.sync.http_client.get("models", headers={"authorization": "Bearer another"})
        assert [sent[b"authorization"] for sent in asked] == [b"Bearer " + KEY.encode(), b"Bearer another"]
        assert llm.openai is llm.openai
        assert KEY not in repr(llm.openai) + repr(llm.http_client) + repr(vars(llm)) + repr(vars(llm.sync))
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.sync.openai.models.list()
