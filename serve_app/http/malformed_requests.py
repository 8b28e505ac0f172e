"""Malformed HTTP that never reaches the ASGI application: the server refuses it in OpenAI's error format. And HTTP/1.0,
to which uvicorn would send a stream in chunks, which that version does not have.

Serve runs uvicorn and decodes some headers before it calls the application (`X-Request-Id`, `X-Session-Id`): a header
that is not UTF-8 would raise there, and the answer be a plain 500. Such a header is left out, and its name is in the
scope for the application to refuse, once it knows the key.

Invariant: a malformed request is answered 400 with an OpenAI error, and the connection ends. A connection that ends
while a request arrives ends as `lingering_close` describes, whatever the answer was. The end of a stream to an
HTTP/1.0 client is the end of its connection, and requests after it on that connection are not answered.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve_app.errors import BadRequest
from serve_app.http.error_responses import error_response
from serve_app.http.lingering_close import LingeringTransport

NO_TEXT = "serve_app.no_text"  # in a scope: the name of a header that is not UTF-8
# Serve acts on it before the application runs: with it an abandoned request would keep its slot to the end.
REFUSED_HEADER = b"x-request-disconnect-disabled"


def check_headers(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
    """Refuse what no request may have. Raises BadRequest: `param` is the header."""
    if REFUSED_HEADER in headers:
        raise BadRequest("this header is not accepted here", param=REFUSED_HEADER.decode())
    if NO_TEXT in scope:
        raise BadRequest(f"the header {scope[NO_TEXT]} is not UTF-8", param=scope[NO_TEXT])


class StrictProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with refusals in OpenAI's format, and answers that reach a client which is still sending."""

    _lingering: LingeringTransport
    _running: RequestResponseCycle | None = None  # of pipelined requests the one that is answered now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._lingering = LingeringTransport(transport, self.loop)
        super().connection_made(cast(asyncio.Transport, self._lingering))

    def data_received(self, data: bytes) -> None:
        if self._lingering.lingers:
            self._lingering.drop(data)
        else:
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._lingering.is_arriving = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._lingering.is_arriving = False
        super().on_message_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See uvicorn."""
        try:
            value.decode()
        except UnicodeDecodeError:
            cast(dict[str, Any], self.scope)[NO_TEXT] = name.decode("latin-1")
        else:
            super().on_header(name, value)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """See uvicorn, which calls this for each request of a connection as its turn comes."""
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_run_without_chunks, cycle, app)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn, which tells the request that was read last; an earlier one may be the one that runs."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self._lingering.on_lost()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """See uvicorn."""
        error = BadRequest("this is not an HTTP request that can be read", code="invalid_http")
        _, headers, body = error_response(error)
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        head = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + body)
        self.transport.close()


async def _run_without_chunks(cycle: RequestResponseCycle, app: Any, scope: Any, receive: Any, send: Any) -> None:
    await app(scope, receive, _close_delimited(cycle, send))


def _close_delimited(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]]
) -> Callable[[Any], Awaitable[None]]:
    """ASGI's `send` for an HTTP/1.0 client: as uvicorn's `send` with a Content-Length, else without chunks."""
    has_length = True

    async def send_plain(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            headers = [*cycle.default_headers, *message.get("headers", ())]
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            if not has_length:
                head = [b"%s: %s\r\n" % (name, value) for name, value in headers]  # Serve's own are lists
                cycle.transport.write(b"".join([STATUS_LINE[message["status"]], *head, b"connection: close\r\n\r\n"]))
                cycle.response_started = True
                return
        if has_length:
            await send(message)
            return
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()

    return send_plain


def install_strict_protocol() -> None:
    """Use `StrictProtocol` in servers that start in this process from now on, as Serve's in a router replica."""
    auto.AutoHTTPProtocol = StrictProtocol
