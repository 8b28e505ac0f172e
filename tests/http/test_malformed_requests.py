"""What is no HTTP request, and headers that Serve would trip over: 400 in OpenAI's format."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import auto

from serve_app.errors import BadRequest
from serve_app.http import malformed_requests
from tests.fakes.asgi_client import KEY, exchange, started
from tests.fakes.engines import FakeCluster, run

BOUND_S = 10.0  # of an exchange over loopback that takes milliseconds


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [[b"content-type", b"text/plain"]]})
        for body in (b"first ", b"second"):
            await send({"type": "http.response.body", "body": body, "more_body": body != b"second"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def _connection(
    app: Callable[..., Any] = _app,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """As Serve starts it: uvicorn with its automatic choice of a protocol."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        async with asyncio.timeout(BOUND_S):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            yield reader, writer
            writer.close()
    finally:
        server.should_exit = server.force_exit = True  # a request that goes on must not hold the test
        await serving


async def _ask(sent: bytes, app: Callable[..., Any] = _app) -> tuple[int, dict[str, str], bytes]:
    """The answer to all that was sent, up to the end of the connection."""
    async with _connection(app) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # for it to be put back
    malformed_requests.install_strict_protocol()


def _request(header: bytes, path: bytes = b"/") -> bytes:
    return (
        b"POST "
        + path
        + b" HTTP/1.1\r\nhost: here\r\nconnection: close\r\n"
        + header
        + b"\r\ncontent-length: 0\r\n\r\n"
    )


@pytest.mark.parametrize(
    "name", ["x-session-id", "x-request-id", "X-Session-Id", "idempotency-key", "x-queue-status", "traceparent", "any"]
)
def test_a_header_that_is_not_utf8_is_left_out_and_named_for_the_application(name: str) -> None:
    scopes = list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await _app(scope, receive, send)

    assert asyncio.run(_ask(_request(name.encode() + b": a\xffb"), app))[0] == 200
    (scope,) = scopes
    assert [header for header, _ in scope["headers"]] == [b"host", b"connection", b"content-length"]
    with pytest.raises(BadRequest) as refused:
        malformed_requests.check_headers(scope, dict(scope["headers"]))
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("headers", "more", "param"),
    [
        ({"x-request-disconnect-disabled": "?1"}, {}, "x-request-disconnect-disabled"),
        ({}, {malformed_requests.NO_TEXT: "X-Session-Id"}, "X-Session-Id"),
    ],
)
def test_a_wrong_header_is_explained_to_those_with_a_key(
    headers: dict[str, str], more: dict[str, str], param: str
) -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await client.edge(scope | more, receive, send)

        for key, status, reported in ((KEY, 400, param), (None, 401, None), ("sk-wrong", 401, None)):
            reply = await exchange(app, "GET", "/v1/models", [], headers, key=key)  # type: ignore[arg-type]
            assert (reply.status, reply.error["param"]) == (status, reported)

    run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: many\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        _request(b"na me: x"),
        _request(b"name: a\0b"),
        _request(b"name: x", path=b"/\xff"),
    ],
)
def test_what_is_no_request_is_refused_in_openais_format(sent: bytes) -> None:
    status, headers, body = asyncio.run(_ask(sent))
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_http")
    assert headers["connection"] == "close"


@pytest.mark.parametrize("value", [b"plain", "gr\u00fc\u00dfe".encode()])
def test_other_headers_pass(value: bytes) -> None:
    assert asyncio.run(_ask(_request(b"x-request-id: " + value)))[0] == 200


def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection() -> None:
    status, headers, body = asyncio.run(_ask(b"GET /stream HTTP/1.0\r\n\r\n"))
    assert (status, body) == (200, b"first second")
    assert "transfer-encoding" not in headers
    assert headers["connection"] == "close"


def test_a_whole_answer_to_an_http_1_0_client_keeps_its_length() -> None:
    status, headers, body = asyncio.run(_ask(b"GET / HTTP/1.0\r\n\r\n"))
    assert (status, headers["content-length"], body) == (200, "2", b"ok")


def test_a_stream_to_an_http_1_1_client_has_chunks() -> None:
    _, headers, _ = asyncio.run(_ask(_request(b"x: y", b"/stream")))
    assert headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("then", [b"1.0", b"1.1"])
def test_a_stream_of_http_1_0_is_whole_with_another_request_behind_it_which_is_not_answered(
    then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await _app(scope, receive, send)

    kept = b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    behind = b"GET /behind HTTP/" + then + b"\r\nhost: here\r\n\r\n"
    status, headers, body = asyncio.run(_ask(kept + behind, app))
    assert (status, headers["connection"], body) == (200, "close", b"first second")
    assert asked == ["/stream"]
    assert not caplog.records  # uvicorn has seen the answer to its end


def test_a_request_of_http_1_0_behind_others_gets_its_answer_as_http_1_0_and_the_others_theirs() -> None:
    first = b"GET /stream HTTP/1.1\r\nhost: here\r\n\r\n"
    _, headers, body = asyncio.run(_ask(first + b"GET /stream HTTP/1.0\r\n\r\n"))
    assert headers["transfer-encoding"] == "chunked"
    chunks, _, second = body.partition(b"HTTP/1.1 200 OK\r\n")
    assert chunks == b"6\r\nfirst \r\n6\r\nsecond\r\n0\r\n\r\n"
    assert second.partition(b"\r\n\r\n")[2] == b"first second"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_leaves_ends_the_request_that_runs_whatever_it_has_sent_behind_it(version: bytes) -> None:
    async def scenario() -> None:
        runs = asyncio.Event()
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            runs.set()
            if (await receive())["type"] == "http.disconnect":
                left.set()

        request = b"GET / HTTP/" + version + b"\r\nhost: here\r\nconnection: keep-alive\r\n\r\n"
        async with _connection(app) as (_, writer):
            writer.write(2 * request)
            await runs.wait()
            writer.transport.abort()
            await left.wait()

    asyncio.run(scenario())
