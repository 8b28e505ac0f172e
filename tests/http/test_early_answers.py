"""A request that is answered before its body has arrived: the answer reaches a client that goes on sending."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http import auto

from serve_app.http import lingering_close, malformed_requests
from tests.requires import requires
from tests.system.real_haproxy import edge

BOUND_S = 20.0  # of an exchange over loopback that takes a tenth of a second
LARGE = 9 * 2**20  # far above what the sockets of a connection hold
REFUSAL = b'{"error": "refused"}'


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers at once; at /first once it has read some of the body."""
    if scope["path"] == "/first":
        await receive()
    status = 200 if scope["path"] == "/-/healthz" else 413
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(REFUSAL))]}
    )
    await send({"type": "http.response.body", "body": REFUSAL})


@dataclass(frozen=True)
class Served:
    """A server as Serve starts it in a router."""

    name: str
    port: int


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def served(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Served]:
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # for it to be put back
    malformed_requests.install_strict_protocol()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(_app, lifespan="off", log_config=None, access_log=False))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        runner = asyncio.Runner(loop_factory=request.param)
        thread = threading.Thread(target=lambda: runner.run(server.serve(sockets=[listening])))
        thread.start()
        yield Served("a", listening.getsockname()[1])
        server.should_exit = server.force_exit = True
        thread.join()
        runner.close()


def _head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n".encode()


def _answer_of_all(port: int, sent: bytes) -> bytes:
    """The answer to a client that reads nothing before it has sent everything. Raises OSError: it could not."""
    with socket.create_connection(("127.0.0.1", port), BOUND_S) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def _send_without_end(connection: socket.socket) -> None:
    while True:  # ends by the server's bound, or by BOUND_S
        connection.sendall(b" " * 65_536)


@pytest.mark.parametrize("path", ["/", "/first"])
def test_an_answer_before_the_end_of_a_body_reaches_a_client_that_sends_it_all(served: Served, path: str) -> None:
    answer = _answer_of_all(served.port, _head(path, LARGE) + b" " * LARGE)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(REFUSAL)


def test_a_request_that_cannot_be_read_is_answered_though_the_client_goes_on(served: Served) -> None:
    answer = _answer_of_all(served.port, b"GET / HTTP/9.9\r\n\r\n" + b" " * LARGE)

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer


def test_it_reaches_a_client_of_haproxy_whose_connection_stays_usable(served: Served, tmp_path: Path) -> None:
    requires("linux")
    with edge(tmp_path) as front:
        front.start(served)  # type: ignore[arg-type]  # a name and a port
        with socket.create_connection(("127.0.0.1", front.port), BOUND_S) as connection:
            for _ in range(3):
                connection.sendall(_head("/", LARGE).replace(b"connection: close\r\n", b"") + b" " * LARGE)
                answer = b""
                while not answer.endswith(REFUSAL):
                    part = connection.recv(65_536)
                    assert part, answer
                    answer += part
                assert answer.startswith(b"HTTP/1.1 413 ")


def test_the_end_of_an_answer_is_seen_before_the_body_has_ended(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), BOUND_S) as connection:
        connection.sendall(_head("/", LARGE) + b" ")
        assert b"".join(iter(lambda: connection.recv(65_536), b"")).endswith(REFUSAL)


@pytest.mark.parametrize(("bound", "value"), [("LINGER_BYTES", LARGE), ("LINGER_S", 0.05)])
def test_a_body_without_an_end_is_not_read_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(lingering_close, bound, value)
    with socket.create_connection(("127.0.0.1", served.port), BOUND_S) as connection:
        connection.sendall(_head("/", 10**12))
        assert b"".join(iter(lambda: connection.recv(65_536), b"")).endswith(REFUSAL)
        with pytest.raises(ConnectionError):
            _send_without_end(connection)
