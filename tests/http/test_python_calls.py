"""A Python call in HTTP's terms, and back: nothing is lost on the way, and nothing is judged that the edge judges."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import errors
from serve_app.client import options
from serve_app.errors import BadRequest, EngineFailed, Overloaded, ServeAppError, Unavailable
from serve_app.http.contract import CONSUMED, FORWARDED
from serve_app.http.error_responses import error_response, sse_error
from serve_app.http.python_calls import (
    DROPPED,
    AnswerPiece,
    CallKind,
    HttpRequest,
    error_in,
    error_of,
    make_request,
    make_route_request,
    read_body,
    read_events,
)
from serve_app.types import Operation

HELLO = [{"role": "user", "content": "Hi"}]
HEAD = (200, [(b"content-type", b"text/event-stream")])


async def answered(*pieces: AnswerPiece) -> AsyncGenerator[AnswerPiece, None]:
    for piece in pieces:
        yield piece


def read(*pieces: AnswerPiece) -> tuple[list[bytes], ServeAppError | None]:
    """The events of a streamed answer, and the error it ended with."""
    reported: list[bytes] = []

    async def reading() -> None:
        async for event in read_events(answered(*pieces)):
            reported.append(event)

    try:
        asyncio.run(reading())
    except ServeAppError as error:
        return reported, error
    return reported, None


def sent(asked: HttpRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asked.body)
    return body


def test_keywords_become_the_headers_and_the_body_that_http_would_bring() -> None:
    asked = make_request(
        CallKind.CHAT,
        {
            "api_key": "sk-1",
            "messages": HELLO,
            "model": "tiny",
            "priority": "high",
            "session": "abc",
            "deadline_s": 1.5,
            "idempotency_key": "k",
            "temperature": None,
        },
    )
    assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
    assert dict(asked.headers) == {
        b"authorization": b"Bearer sk-1",
        b"x-session-id": b"abc",
        b"x-deadline-ms": b"1500",
        b"idempotency-key": b"k",
    }
    assert sent(asked) == {"messages": HELLO, "model": "tiny", "priority": "high"}
    assert sent(make_request(CallKind.STREAM, {"messages": HELLO})) == {"messages": HELLO, "stream": True}
    assert make_request(CallKind.EMBED, {"input": "x"}).headers == []
    assert make_route_request("sk-1", "GET", "/v1/models") == HttpRequest(
        "GET", "/v1/models", [(b"authorization", b"Bearer sk-1")], b""
    )
    assert make_route_request(None, "GET", "/v1/models").headers == []
    assert sent(make_route_request("sk-1", "POST", "/v1/sessions", {"ttl_s": 5, "wait_s": None})) == {"ttl_s": 5}


def test_a_deadline_is_rounded_up_and_judged_elsewhere() -> None:
    for given_s, header in ((0.0001, b"1"), (0, b"0"), (-3, b"-3000"), (1e300, b"%d" % (int(1e300) * 1000))):
        assert dict(make_request(CallKind.CHAT, {"deadline_s": given_s}).headers)[b"x-deadline-ms"][:6] == header[:6]


def test_extra_body_is_laid_over_the_body_unchecked() -> None:
    asked = make_request(CallKind.CHAT, {"messages": HELLO, "seed": 1, "extra_body": {"seed": 2, "made_up": True}})
    assert sent(asked) == {"messages": HELLO, "seed": 2, "made_up": True}


def test_an_unknown_keyword_is_an_error_that_names_the_near_one() -> None:
    for name, near in (("max_token", "max_tokens"), ("deadline", "deadline_s"), ("sesion", "session")):
        with pytest.raises(BadRequest, match=f"did you mean `{near}`") as refused:
            make_request(CallKind.CHAT, {"messages": HELLO, name: 1})
        assert refused.value.param == name
    with pytest.raises(BadRequest, match=r"chat\(\) has no argument `xyzzy`$"):
        make_request(CallKind.CHAT, {"xyzzy": 1})


def circle() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"messages": {1, 2}}, "messages"),
        ({"messages": HELLO, "seed": object()}, "seed"),
        ({"messages": HELLO, "temperature": float("nan")}, "temperature"),
        ({"messages": circle()}, "messages"),
        ({"messages": deep()}, "messages"),
        ({"messages": (part for part in HELLO)}, "messages"),
        ({"extra_body": {"x": b"bytes"}}, "x"),
        ({"extra_body": [1]}, "extra_body"),
        ({"stream": True}, "stream"),
        ({"session": 5}, "session"),
        ({"api_key": b"sk"}, "api_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
        ({"deadline_s": "5"}, "deadline_s"),
        ({"deadline_s": True}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
    ],
)
def test_what_has_no_form_in_http_is_refused_by_name(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        make_request(CallKind.CHAT, arguments)
    assert refused.value.param == param


def test_half_a_surrogate_pair_goes_on_for_the_edge_to_refuse() -> None:
    asked = make_request(
        CallKind.CHAT, {"messages": [{"role": "user", "content": "\ud800"}], "session": "\ud800", "api_key": "\ud800"}
    )
    assert asked.body.isascii()
    assert dict(asked.headers)[b"x-session-id"] == b"\xed\xa0\x80"


def test_an_object_of_the_openai_package_becomes_plain() -> None:
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": "x", "refusal": None})
    assert sent(make_request(CallKind.CHAT, {"messages": [message]})) == {
        "messages": [{"role": "assistant", "content": "x"}]
    }


def test_typed_keywords_are_fields_that_are_served() -> None:
    ours = {"idempotency_key", "extra_body", "deadline_s", "session"}
    for kind in (options.ChatOptions, options.CompletionOptions, options.EmbedOptions):
        assert get_type_hints(kind).keys() - ours <= FORWARDED | CONSUMED


CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ServeAppError)]
OURS_ALONE = {errors.ConfigError}  # raised before anything is asked


def fields(error: ServeAppError) -> tuple[Any, ...]:
    return type(error), error.message, error.param, error.retry_after_s, error.code


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in OURS_ALONE])
@pytest.mark.parametrize("more", [{}, {"param": "n"}, {"retry_after_s": 1.25}])
def test_an_error_comes_out_as_it_was_raised(kind: type[ServeAppError], more: dict[str, Any]) -> None:
    error = kind("told", **more)
    found = error_of(*error_response(error))
    assert fields(pickle.loads(pickle.dumps(error))) == fields(error)
    assert fields(found) == fields(error)


def test_codes_of_their_own_survive() -> None:
    codes = "slow_client", "not_continuable"
    failed = [EngineFailed("x", code=code) for code in codes]
    for error in (Overloaded("x", code="deadline"), *failed, Unavailable("x", code="y")):
        assert fields(error_of(*error_response(error))) == fields(error)


@pytest.mark.parametrize("kind", [BadRequest, Overloaded, Unavailable, EngineFailed, ServeAppError, errors.Forbidden])
def test_an_error_event_comes_out_as_it_was_raised(kind: type[ServeAppError]) -> None:
    reported, error = read(
        (*HEAD, b'data: {"a":1}\n\n' + sse_error(kind("told", param="p").body(), Operation.CHAT)), b"data: more\n\n"
    )
    assert reported == [b'{"a":1}'], "what came before the error is told"
    assert (type(error), str(error), error and error.param) == (kind, "told", "p")


def test_an_error_event_of_vllm_s_has_its_status_for_a_code() -> None:
    for code, kind in ((400, BadRequest), (503, Unavailable), (500, ServeAppError)):
        event = json.dumps({"error": {"message": "m", "type": "SomeError", "param": None, "code": code}}).encode()
        found = error_in(event)
        assert type(found) is kind
        assert found.code == kind.code


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b'{"error":"x"}', b'{"detail":{}}', b"\xff\xfe", b"null"])
@pytest.mark.parametrize(("status", "kind"), [(418, BadRequest), (503, Unavailable), (599, ServeAppError)])
def test_an_error_in_no_form_of_ours_still_is_one(body: bytes, status: int, kind: type[ServeAppError]) -> None:
    assert type(error_of(status, [], body)) is kind


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=8),
    cuts=st.lists(st.integers(min_value=1, max_value=60), max_size=12),
)
def test_events_are_read_alike_however_they_are_cut(texts: list[str], cuts: list[int]) -> None:
    reported = [json.dumps({"text": text}).encode() for text in texts]
    connection = b"".join(b"data: " + event + b"\n\n" for event in reported) + b"data: [DONE]\n\n"
    pieces: list[AnswerPiece] = []
    start = 0
    for cut in [*cuts, len(connection)]:
        piece = connection[start : start + cut]
        pieces.append(piece if pieces else (*HEAD, piece))
        start += cut
    assert read(*pieces) == (reported, None)


def test_a_whole_answer_is_its_pieces_joined() -> None:
    assert asyncio.run(read_body(answered((200, [], b'{"a":'), b"1}"))) == b'{"a":1}'


def test_an_answer_that_ends_before_it_began_is_lost() -> None:
    with pytest.raises(Unavailable) as lost:
        asyncio.run(read_body(answered()))
    assert lost.value.code == DROPPED


def test_a_refusal_of_a_stream_is_read_whole() -> None:
    status, headers, body = error_response(Overloaded("later", retry_after_s=2.0))
    reported, error = read((status, headers, body[:5]), body[5:])
    assert reported == []
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
