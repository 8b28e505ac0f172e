"""Refusals on the wire, read by the official SDK's own parser."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors
from serve_app.http.api.routes import resolve
from serve_app.http.error_responses import MAX_RETRY_AFTER_S, error_response, sse_error
from serve_app.types import Operation

# The HTTP library under the SDK has changed its name between releases; its own client class tells which it is.
_client_class = next(c for c in openai.DefaultHttpxClient.__mro__ if c.__name__ == "Client")
httpx: Any = importlib.import_module(_client_class.__module__.partition(".")[0])

CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}


def sdk(*answers: tuple[int, list[tuple[bytes, bytes]], bytes], retries: int = 0) -> tuple[openai.OpenAI, list[Any]]:
    seen: list[Any] = []

    def handle(request: Any) -> Any:
        status, headers, body = answers[min(len(seen), len(answers) - 1)]
        seen.append(request)
        return httpx.Response(status, headers=headers, content=body)

    http_client = httpx.Client(transport=httpx.MockTransport(handle))
    return openai.OpenAI(api_key="k", base_url="http://test/v1", http_client=http_client, max_retries=retries), seen


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **more)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.BadRequest("no", param="n"), openai.BadRequestError),
        (errors.BodyTooLarge("no", param="body"), openai.APIStatusError),
        (errors.Unauthorized("no"), openai.AuthenticationError),
        (errors.Forbidden("no", param="priority"), openai.PermissionDeniedError),
        (errors.NotFound("no", param="model", code="model_not_found"), openai.NotFoundError),
        (errors.MethodNotAllowed("no"), openai.APIStatusError),
        (errors.Overloaded("no", retry_after_s=0.25, code="shed"), openai.RateLimitError),
        (errors.Unavailable("no", retry_after_s=3), openai.InternalServerError),
        (errors.EngineFailed("no"), openai.InternalServerError),
        (errors.ServeAppError("no"), openai.InternalServerError),
    ],
)
def test_the_sdk_raises_the_right_exception_with_code_param_and_type(
    error: errors.ServeAppError, expected: type[openai.APIStatusError]
) -> None:
    client, _ = sdk(error_response(error))
    with pytest.raises(expected) as caught:
        ask(client)
    raised = caught.value
    assert (raised.status_code, raised.code, raised.param) == (error.status, error.code, error.param)
    assert raised.type == error.type
    assert raised.body == error.body()["error"]
    assert error.message in raised.message


def test_the_sdk_waits_as_long_as_announced_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {**CHUNK, "object": "chat.completion"}
    refused = error_response(errors.Overloaded("full", retry_after_s=0.3001))
    client, seen = sdk(refused, (200, [(b"content-type", b"application/json")], json.dumps(done).encode()), retries=1)
    waits: list[float] = []
    base = importlib.import_module("openai._base_client")
    monkeypatch.setattr(base.time, "sleep", waits.append)
    assert ask(client).id == "x"
    assert len(seen) == 2
    assert waits == [pytest.approx(0.301)]


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest("no"),
        errors.BodyTooLarge("no"),
        errors.Forbidden("no"),
        errors.AnswerNotKept("no"),
        errors.Overloaded("too late", retry_after_s=1, code="deadline"),
    ],
)
def test_the_sdk_does_not_repeat_what_is_pointless(error: errors.ServeAppError) -> None:
    client, seen = sdk(error_response(error), retries=2)
    with pytest.raises(openai.APIStatusError):
        ask(client)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "error", [errors.BodyTooSlow("no"), errors.Overloaded("no"), errors.Unavailable("no"), errors.EngineFailed("no")]
)
def test_what_may_succeed_later_may_be_repeated(error: errors.ServeAppError) -> None:
    assert b"x-should-retry" not in dict(error_response(error)[1])


def stream_of(ending: bytes, first: dict[str, Any]) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    return 200, [(b"content-type", b"text/event-stream")], b"data: " + json.dumps(first).encode() + b"\n\n" + ending


def drain(stream: Any) -> Iterator[Any]:
    yield from stream


def test_a_stream_that_breaks_raises_with_code_and_param_after_what_was_sent() -> None:
    error = errors.EngineFailed("the replica\ndied: é \ud800", param="model")
    client, _ = sdk(stream_of(sse_error(error.body(), Operation.CHAT), CHUNK))
    stream = drain(ask(client, stream=True))
    assert next(stream).id == "x"
    with pytest.raises(openai.APIError) as caught:
        next(stream)
    assert (caught.value.code, caught.value.param) == ("engine_failed", "model")
    assert caught.value.message == error.message


def test_a_responses_stream_that_breaks_raises_too() -> None:
    error = errors.Overloaded("shed", code="shed")
    first = {"type": "response.in_progress", "sequence_number": 0, "response": {}}
    client, _ = sdk(stream_of(sse_error(error.body(), Operation.RESPONSES), first))
    stream = drain(client.responses.create(model="m", input="hi", stream=True))
    assert next(stream).type == "response.in_progress"
    with pytest.raises(openai.APIError) as caught:
        next(stream)
    assert caught.value.code == "shed"


def test_an_error_event_ends_a_chat_stream_and_a_responses_stream_in_their_own_way() -> None:
    error = errors.EngineFailed("x")
    chat = sse_error(error.body(), Operation.CHAT)
    responses = sse_error(error.body(), Operation.RESPONSES)
    assert chat.endswith(b"\n\ndata: [DONE]\n\n")
    assert json.loads(chat.split(b"\n\n")[0].removeprefix(b"data: ")) == error.body()
    assert responses.startswith(b"event: error\ndata: {")
    assert b"[DONE]" not in responses
    event = json.loads(responses.strip().partition(b"data: ")[2])
    assert (event["type"], event["code"], event["message"]) == ("error", "engine_failed", "x")


@pytest.mark.parametrize(
    ("wait_s", "seconds", "millis"),
    [
        (0.0, b"0", b"0"),
        (0.0001, b"1", b"1"),
        (0.25, b"1", b"250"),
        (1.1, b"2", b"1100"),
        (60, b"60", b"60000"),
        (-5, b"0", b"0"),
        (math.inf, b"86400", b"86400000"),
    ],
)
def test_the_wait_is_given_in_seconds_and_milliseconds_rounded_up(wait_s: float, seconds: bytes, millis: bytes) -> None:
    headers = dict(error_response(errors.Overloaded("x", retry_after_s=wait_s))[1])
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (seconds, millis)
    assert MAX_RETRY_AFTER_S == 86_400


@pytest.mark.parametrize("wait_s", [None, math.nan])
def test_an_unknown_wait_is_not_reported(wait_s: float | None) -> None:
    headers = dict(error_response(errors.Unavailable("x", retry_after_s=wait_s))[1])
    assert headers == {b"content-type": b"application/json"}


def test_401_names_the_scheme_and_405_the_methods() -> None:
    assert dict(error_response(errors.Unauthorized("x"))[1])[b"www-authenticate"] == b"Bearer"
    with pytest.raises(errors.MethodNotAllowed) as caught:
        resolve("PUT", "/v1/models")
    assert dict(error_response(caught.value)[1])[b"allow"] == b"GET, HEAD"


@given(st.text(), st.none() | st.text(), st.floats() | st.none())
def test_any_text_of_a_client_stays_on_one_line_of_the_body_and_out_of_the_headers(
    message: str, param: str | None, wait_s: float | None
) -> None:
    error = errors.BadRequest(message, param=param, retry_after_s=wait_s)
    status, headers, body = error_response(error)
    assert status == 400
    assert json.loads(body) == error.body()
    assert body.isascii()
    assert b"\n" not in body
    assert b"\r" not in body
    assert all(value.isascii() and value.decode().isprintable() for _, value in headers)
    assert sse_error(error.body(), Operation.CHAT).count(b"\n\n") == 2
