"""The router's end of a call by handle, on the real edge: the same answers, outcomes and ends as over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from serve_app.errors import BadRequest, EngineFailed, Forbidden, NotFound, Overloaded, ServeAppError, Unauthorized
from serve_app.http import asgi_bridge
from serve_app.http.asgi_bridge import AsgiBridge, is_no_refusal
from serve_app.http.python_calls import (
    AnswerPiece,
    CallKind,
    HttpRequest,
    make_request,
    make_route_request,
    read_body,
)
from serve_app.types import Outcome
from tests.fakes import asgi_client
from tests.fakes.asgi_client import BATCH_KEY, KEY, Client
from tests.fakes.engines import MODEL, FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S, expected_text

ASKED = HttpRequest("POST", "/x", [], b"{}")


async def started(cluster: FakeCluster, *replicas: str, **settings: Any) -> tuple[Client, AsgiBridge]:
    await cluster.add(*replicas)
    client = await Client(cluster, **settings).start()
    return client, AsgiBridge(client.edge)


def call(prompt: str = "p", tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"api_key": KEY, "model": MODEL, "prompt": prompt, "max_tokens": tokens, **more}


def text_of(answer: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in answer["choices"])


async def gone(client: Client, outcome: Outcome, count: int = 1) -> None:
    await until(client.at_rest, SOON_S, "nothing waits, nothing is granted")
    await until(lambda: client.outcomes.get(outcome) == count, SOON_S, f"{count} ended as {outcome}")


def test_answers_are_those_over_http() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")
        over = json.loads((await client.post(asgi_client.ask("p", 7, stream=False))).body)
        whole = await inside.answer(make_request(CallKind.COMPLETE, call(tokens=7)))
        assert (whole["choices"], whole["usage"]) == (over["choices"], over["usage"])
        chunks = [chunk async for chunk in inside.stream(make_request(CallKind.STREAM_COMPLETE, call(tokens=7)))]
        assert "".join(map(text_of, chunks)) == expected_text("p", 7)
        assert (await inside.answer(make_route_request(KEY, "GET", "/v1/models")))["data"][0]["id"] == MODEL
        assert client.outcomes == {Outcome.OK: 3}
        assert client.figures("serve_app_completion_tokens_total", "tenant") == {("people",): 21}

    run(scenario)


@pytest.mark.parametrize("streamed", [False, True])
def test_refusals_are_those_over_http(streamed: bool) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")

        async def refused(kind: type[ServeAppError], **changes: Any) -> ServeAppError:
            asked = call(**changes)
            answered = (
                anext(inside.stream(make_request(CallKind.STREAM_COMPLETE, asked)))
                if streamed
                else inside.answer(make_request(CallKind.COMPLETE, asked))
            )
            with pytest.raises(kind) as raised:
                await answered
            assert type(raised.value) is kind
            return raised.value

        assert (await refused(Unauthorized, api_key="sk-nobody")).code == "invalid_api_key"
        assert (await refused(Unauthorized, api_key=None)).status == 401
        assert (await refused(NotFound, model="no")).code == "model_not_found"
        assert (await refused(Forbidden, api_key=BATCH_KEY, priority="high")).param == "priority"
        assert (await refused(BadRequest, prompt="")).param == "prompt"
        assert client.outcomes == {Outcome.UNAUTHORIZED: 2, Outcome.BAD_REQUEST: 3}

    run(scenario)


def test_a_deadline_passed_in_the_queue_is_a_refusal_with_its_code() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")
        async with aclosing(
            inside.stream(make_request(CallKind.STREAM_COMPLETE, call("fills it", LONG, n=4)))
        ) as filling:
            await anext(filling)
            with pytest.raises(Overloaded) as late:
                await inside.answer(make_request(CallKind.COMPLETE, call(deadline_s=0.05)))
        assert late.value.code == "deadline"
        assert late.value.retry_after_s is not None
        await gone(client, Outcome.REFUSED)

    run(scenario)


def test_a_caller_that_is_cancelled_takes_its_request_with_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")
        running = asyncio.create_task(inside.answer(make_request(CallKind.COMPLETE, call("runs", LONG, n=4))))
        await until(lambda: cluster["r1"].work == 4, SOON_S, "in the engine")
        queued = asyncio.create_task(inside.answer(make_request(CallKind.COMPLETE, call("waits"))))
        reading = asyncio.create_task(
            anext(inside.stream(make_request(CallKind.STREAM_COMPLETE, call("waits to be streamed"))))
        )
        await until(lambda: client.model.queue.waiting == 2, SOON_S, "in the line")
        for task in (queued, reading, running):
            task.cancel()
        await asyncio.wait({running, queued, reading})
        await gone(client, Outcome.CANCELLED_RUNNING)
        await gone(client, Outcome.CANCELLED_QUEUED, 2)
        await until(lambda: not cluster["r1"].work, SOON_S, "out of the engine")

    run(scenario)


def test_a_stream_that_is_closed_takes_its_request_with_it() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")
        stream = inside.stream(make_request(CallKind.STREAM_COMPLETE, call("long", LONG)))
        assert [text_of(await anext(stream)) for _ in range(3)]
        await stream.aclose()
        await gone(client, Outcome.CANCELLED_RUNNING)
        thrown_at = inside.stream(
            make_request(CallKind.STREAM_COMPLETE, call("long", LONG))
        )  # as Serve ends the stream of a lost caller
        await anext(thrown_at)
        with pytest.raises(asyncio.CancelledError):
            await thrown_at.athrow(asyncio.CancelledError())
        await gone(client, Outcome.CANCELLED_RUNNING, 2)
        await until(lambda: not cluster["r1"].work, SOON_S, "out of the engine")

    run(scenario)


def test_an_engine_lost_in_mid_stream_is_an_error_after_what_was_reported() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client, inside = await started(cluster, "r1")
        stream = inside.stream(make_request(CallKind.STREAM_COMPLETE, call("long", LONG)))
        received_so_far = text_of(await anext(stream))
        client.model.replica_set.info = None  # no engine is known that could go on
        cluster.kill("r1")

        async def read_on() -> None:
            nonlocal received_so_far
            async for chunk in stream:
                received_so_far += text_of(chunk)

        with pytest.raises(EngineFailed):
            await read_on()
        assert received_so_far == expected_text("long", len(received_so_far.split()))
        await gone(client, Outcome.ENGINE_FAILED)

    run(scenario, model(step_s=0.005))


async def pieces_of(edge: Callable[..., Any]) -> list[AnswerPiece]:
    return [piece async for piece in AsgiBridge(edge).exchange(ASKED)]


def answering(*bodies: bytes, status: int = 200) -> Callable[..., Any]:
    async def edge(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == ASKED.body
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        for number, body in enumerate(bodies, start=1):
            await send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})

    return edge


def test_status_and_headers_come_with_the_first_bytes() -> None:
    assert asyncio.run(pieces_of(answering(b"1", b"2", b""))) == [(200, [(b"a", b"b")], b"1"), b"2", b""]


def test_a_large_answer_travels_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_bridge, "PIECE_BYTES", 4)
    pieces = asyncio.run(pieces_of(answering(b"0123456789", status=404)))
    assert [piece[2] if isinstance(piece, tuple) else piece for piece in pieces] == [b"0123", b"4567", b"89"]
    with pytest.raises(NotFound, match="0123456789"):
        asyncio.run(read_body(AsgiBridge(answering(b"0123456789", status=404)).exchange(ASKED)))


def test_a_caller_that_does_not_read_holds_the_edge_up() -> None:
    """So that its frames wait, bounded, where all slow clients' frames do."""
    sent = 0

    async def edge(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent += 1

    async def scenario() -> None:
        reading: AsyncGenerator[AnswerPiece, None] = AsgiBridge(edge).exchange(ASKED)
        for read in range(1, 5):
            await anext(reading)
            await turns(50)
            assert sent <= read + 2
        await reading.aclose()

    asyncio.run(scenario())


async def _cancels_itself(scope: Any, receive: Any, send: Any) -> None:
    raise asyncio.CancelledError


async def _breaks(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise ValueError("broken")


def test_an_edge_that_breaks_leaves_no_caller_waiting_or_cancelled() -> None:
    with pytest.raises(ServeAppError, match="dropped"):
        asyncio.run(pieces_of(_cancels_itself))
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(pieces_of(_breaks))


def record_of(error: BaseException | None) -> logging.LogRecord:
    try:
        if error is not None:
            raise error
    except BaseException:  # noqa: BLE001 - it is the record's content
        return logging.LogRecord("ray.serve", logging.ERROR, __file__, 1, "Request failed.", (), sys.exc_info())
    return logging.LogRecord("ray.serve", logging.INFO, __file__, 1, "hello", (), None)


def test_a_replica_s_log_holds_failures_and_no_refusals() -> None:
    keeps = is_no_refusal
    assert not keeps(record_of(Overloaded("full")))
    assert not keeps(record_of(Unauthorized("no")))
    assert keeps(record_of(ServeAppError("our fault")))
    assert keeps(record_of(ValueError("broken")))
    assert keeps(record_of(None))
