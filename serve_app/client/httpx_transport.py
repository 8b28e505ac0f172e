"""HTTP without a connection: httpx transports that send to the application's router over its Serve handle.

Code for the OpenAI SDK or for httpx then runs inside the cluster without a change. Status, headers and body are the
ASGI app's, byte for byte. The timeouts of a request are obeyed: `connect` is for a router to accept it, `read` for the
first bytes of the answer and for each wait after them.

Invariant: a response that is closed, dropped or cancelled ends its request in the engine; a failure without an answer
of the router is an `httpx2.TransportError`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2

from serve_app.client.caller_span import with_caller_span
from serve_app.client.loop_bridge import LoopBridge
from serve_app.client.streams import Stream, SyncStream
from serve_app.errors import NO_ROUTER, BodyTooLarge, ServeAppError
from serve_app.http import AnswerPiece, Headers, HttpRequest, error_response, read_head

BASE_URL = "http://serve-app/v1"  # a placeholder host: every request goes to the application's routers


class Transport(httpx2.AsyncBaseTransport, httpx2.BaseTransport):
    """For `httpx2.AsyncClient` in any event loop, and for `httpx2.Client` in any thread."""

    def __init__(self, bridge: LoopBridge) -> None:
        self._bridge = bridge

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        await request.aread()
        status, headers, body = await self._answer(request)
        return httpx2.Response(status, headers=headers, stream=_AsyncBody(body))

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        status, headers, body = self._bridge.run(self._answer, request)
        return httpx2.Response(status, headers=headers, stream=_SyncBody(self._bridge, body))

    async def _answer(self, request: httpx2.Request) -> tuple[int, Headers, AsyncGenerator[bytes, None]]:
        """Status, headers and body of the answer to a request whose body is read."""
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        path = request.url.path
        asked = with_caller_span(HttpRequest(request.method, path, headers, request.content, request.url.query))
        answered: AsyncGenerator[Any, None] = self._exchange(asked, request.extensions.get("timeout", {}))
        status, headers = await anext(answered)
        return status, headers, answered

    async def _exchange(
        self, asked: HttpRequest, timeouts: Mapping[str, float | None]
    ) -> AsyncGenerator[tuple[int, Headers] | bytes, None]:
        """Status and headers, then the body: one generator, so that closing it ends the request at any time."""
        try:
            async with contextlib.aclosing(self._bridge.exchange(asked, timeouts.get("connect"))) as pieces:
                try:
                    async with asyncio.timeout(timeouts.get("read")):
                        status, headers, piece = await read_head(pieces)
                except BodyTooLarge as error:
                    status, headers, piece = error_response(error)
                yield status, headers
                more: AnswerPiece | None = piece
                while isinstance(more, bytes):
                    yield more
                    async with asyncio.timeout(timeouts.get("read")):
                        more = await anext(pieces, None)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("the router did not send in time") from error
        except ServeAppError as error:
            if error.code != NO_ROUTER:
                raise httpx2.ReadError(error.message) from error
            kind = httpx2.ConnectTimeout if isinstance(error.__cause__, TimeoutError) else httpx2.ConnectError
            raise kind(error.message) from error


class _AsyncBody(Stream[bytes], httpx2.AsyncByteStream):
    """The body of one response."""


class _SyncBody(SyncStream[bytes], httpx2.SyncByteStream):
    """The body of one response; the request runs before the body is read."""

    def close(self) -> None:
        super().close()
        with contextlib.suppress(RuntimeError):  # the client is closed, which ended the request
            self._bridge.submit(self.chunks.aclose)
