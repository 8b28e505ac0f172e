"""Requests over a bare socket, for clients that go away: closing it is all they do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.stack import REQUEST_TIMEOUT_S, Stack

SEGMENT_GAP_S = 0.03  # long enough for the proxy to have read the headers before the body comes


def send(
    stack: Stack,
    path: str,
    body: Mapping[str, Any],
    *,
    in_two: bool = False,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> socket.socket:
    """An open connection on which the request has been sent. `in_two`: its body in a segment of its own, as the SDK
    and `requests` send it."""
    parts = urlsplit(stack.base_url)
    data = json.dumps(body).encode()
    reported = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": str(len(data))}
    reported |= stack.headers(key) | dict(headers or {})
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in reported.items()) + "\r\n"
    connection = socket.create_connection((parts.hostname, parts.port), timeout=REQUEST_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if in_two:
        connection.sendall(head.encode())
        time.sleep(SEGMENT_GAP_S)  # so that head and body arrive in two segments
        connection.sendall(data)
    else:
        connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """What the server has sent up to `mark`, and a little more."""
    seen = b""
    while mark not in seen:
        piece = connection.recv(65536)
        assert piece, f"the server closed after {seen!r}"
        seen += piece
    return seen


@contextlib.contextmanager
def reading(connection: socket.socket) -> Iterator[None]:
    """Read all that comes for the block, then close: whoever never reads is cut off once the buffers are full."""

    def read() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while connection.recv(65536):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the server may have closed first
            connection.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()
