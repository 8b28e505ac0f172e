"""Clients that take connections and send nothing, or too slowly, keep nobody out and do not stay."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from serve_app.http.body import ARRIVAL_S
from serve_app.machine.haproxy import BUFFER_BYTES, PER_SOURCE, REQUEST_S, TOLD
from tests.e2e.stack import Stack
from tests.requires import missing

SLOW = 200  # of each kind, below PER_SOURCE in all
ENDS_S = REQUEST_S + 20.0  # the rest is for a busy machine
ASKED_S = 10.0
OTHER = "127.0.0.9"  # another client
SENT = 2 * BUFFER_BYTES  # of a body: HAProxy hands it on before it is whole


def opened(there: Stack, count: int, sent: Callable[[str], str], size: int = 0) -> list[socket.socket]:
    """So many connections on which this and a body of `size` were sent."""
    port = urlsplit(there.base_url).port
    connections = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port), ASKED_S)
        with contextlib.suppress(ConnectionError):  # one too many
            one.sendall(sent(there.api_key).encode() + b"x" * size)
        connections.append(one)
    return connections


def asked(there: Stack, source: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection(
        "127.0.0.1", urlsplit(there.base_url).port, timeout=ASKED_S, source_address=(source, 0)
    )
    with contextlib.closing(connection):
        connection.request("GET", "/v1/models", headers=there.headers())
        return connection.getresponse().status


def ended(connections: list[socket.socket]) -> list[bytes]:
    """What each got before its end; each within ENDS_S of the call."""
    deadline, answers = time.monotonic() + ENDS_S, []
    for one in connections:
        one.settimeout(max(deadline - time.monotonic(), 0.01))
        with contextlib.suppress(ConnectionResetError):
            answer = b"".join(iter(lambda one=one: one.recv(65_536), b""))  # type: ignore[misc]
            answers.append(answer)
        one.close()
    return answers


def test_slow_headers_and_bodies_keep_nobody_out_and_end(stack: Stack) -> None:
    if stack.cluster is None:
        missing("another machine's client has another address")

    def body(key: str) -> str:
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            f"content-length: {4 * SENT}\r\n\r\n"
        )

    heads = opened(stack, SLOW, lambda key: "GET /v1/models HTTP/1.1\r\nhost: x\r\nauth")
    bodies = opened(stack, SLOW, body, SENT)
    assert asked(stack) == 200
    assert ARRIVAL_S < REQUEST_S
    for answer in ended(bodies):
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b'"code":"request_timeout"' in answer.replace(b": ", b":"), answer
    assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in ended(heads))
    assert asked(stack) == 200


def test_one_client_s_idle_connections_keep_no_other_out_and_end(stack: Stack) -> None:
    if stack.cluster is None:
        missing("another machine's client has another address")
    idle = opened(stack, PER_SOURCE + TOLD + 100, lambda key: "")
    assert asked(stack, OTHER) == 200
    assert not any(ended(idle))
    assert asked(stack) == 200
