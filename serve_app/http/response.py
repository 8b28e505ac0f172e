"""The response of one HTTP exchange: sends status, headers and bytes in order, and an error while one can be sent.

Invariant: exactly one status is sent; nothing follows the last byte. An answer of a known length that fails after its
first bytes breaks the connection: neither a status nor an event could say so.

A comment begins the stream with status 200: a later error of the queue or the engine is sent as an event with the
error's body. `status` is still the answer's own, for instance the engine's 400.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.http.error_responses import (
    JSON,
    NO_RETRY,
    Header,
    Headers,
    answer_in_form,
    error_response,
    id_headers,
    is_final,
    retry_headers,
    sse_comment,
    sse_error,
    sse_retry_comment,
)
from serve_app.transport import Frame, ResponseStream
from serve_app.types import Operation

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODILESS = (204, 304)  # an answer with such a status has no body, and no length
REPLAYED = (b"x-idempotent-replay", b"true")
TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class PieceAnswer:
    """An answer of `size` bytes that is sent as its pieces are read."""

    headers: Headers
    size: int
    pieces: AsyncGenerator[bytes, None]


class HttpExchange:
    """The response of one HTTP exchange. `status` is ours, also where an answer in Anthropic's form has another one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun_stream = self._has_begun_pieces = False
        self.status = 0
        self.request_id = ""
        self.operation = Operation.CHAT
        self._headers: Headers = []
        self.limit_headers: Callable[[], Headers] = list  # asked for when the answer begins
        self.trace_headers: tuple[Header, ...] = ()

    @property
    def head(self) -> tuple[int, Headers]:
        """Status and headers of the answer, without those of this exchange alone; the status is 0 until it has one."""
        return self.status, self._headers

    async def send_answer(
        self, status: int, headers: Headers, body: bytes, *, is_head: bool = False, times: Iterable[Header] = ()
    ) -> None:
        """Send a complete answer; `is_head`: without the body; `times`: headers that a repeat does not get. In a stream
        that comments have begun, it is an engine's refusal and sent as an event; a repeat gets the refusal itself."""
        self.status = status
        self._headers = headers
        if self._has_begun_stream:
            event = sse_error(json.loads(body), self.operation, status)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        status, body = answer_in_form(self.operation, status, body, self.request_id)
        headers = [*headers, *times, *self.limit_headers(), *self.trace_headers]
        if status not in BODILESS:
            headers.append((b"content-length", b"%d" % len(body)))
        if self.request_id:
            headers += id_headers(self.operation, self.request_id)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if is_head else body, "more_body": False})

    async def send_pieces(self, answer: PieceAnswer, *, is_head: bool = False) -> None:
        """Send an answer piece by piece, each once the client has room for it; `is_head`: without the body. Raises what
        reading a piece raises; before the first one is read, nothing is sent."""
        async with contextlib.aclosing(answer.pieces):
            piece = None if is_head else await anext(answer.pieces, None)
            self.status = 200
            self._headers = answer.headers
            self._has_begun_pieces = True
            headers = [*answer.headers, *self.limit_headers(), (b"content-length", b"%d" % answer.size)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            while piece is not None:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(answer.pieces, None)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextlib.contextmanager
    def through(self, over: Callable[[Send], Send]) -> Iterator[None]:
        """Send what the block sends to what `over` returns, which gets the way to the client."""
        direct = self._send
        self._send = over(direct)
        try:
            yield
        finally:
            self._send = direct

    async def send_comment(self, text: str) -> None:
        """Send a comment before the events of a streamed answer."""
        await self._start_stream()
        await self._send({"type": "http.response.body", "body": sse_comment(text), "more_body": True})

    async def relay(self, stream: ResponseStream, frames: list[Frame], times: Callable[[], Headers]) -> Frame:
        """Send frames as they arrive, up to the last, which is returned. An answer that is not streamed carries the
        headers `times`, asked for once it is complete.

        Raises:
            EngineFailed: the engine failed; bytes sent stay sent. Until `stream.client_has_seen`, none are.
        """
        first = frames[0]
        if first.media != "sse":
            body = await read_whole(stream, frames)
            stream.client_has_seen = True
            # an engine that answers lives: with an error of its own it would answer a repeat, too
            is_in_vain = is_final(first.status) or (first.status >= 500 and first.retry_after_s is None)
            kind = JSON if first.media == "json" else TEXT
            headers = [*kind, NO_RETRY] if is_in_vain else [*kind, *retry_headers(first.retry_after_s)]
            await self.send_answer(first.status, headers, body, times=times())
            return frames[-1]
        self.status = first.status
        self._headers = SSE_HEADERS
        stream.client_has_seen = True
        await self._start_stream(first.status)
        while True:
            last = frames[-1].usage is not None
            body = frames[0].body if len(frames) == 1 else b"".join([frame.body for frame in frames])
            if body or last:
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return frames[-1]
            frames = await stream.next()

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send events of a stream, which the first ones begin."""
        await self.send_part(200, SSE_HEADERS, events, is_last=is_last)

    async def send_part(self, status: int, headers: Headers, body: bytes, *, is_last: bool) -> None:
        """Send a part of a streamed answer; the first one begins it with this status and these headers."""
        self.status = status
        self._headers = headers
        await self._start_stream(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def send_error(self, error: ServeAppError) -> None:
        """Send the error: as a status while nothing is sent, as an event of the stream after that. Raises it, if
        neither is possible."""
        if self._has_begun_pieces:
            raise error
        if self._has_begun_stream:
            wait = b"" if self.status else sse_retry_comment(error)
            body = wait + sse_error(error.body(), self.operation, error.status)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif not self.status:
            await self.send_answer(*error_response(error))

    async def _start_stream(self, status: int = 200, headers: Headers = SSE_HEADERS) -> None:
        """Send the status and headers of a stream, once."""
        if self._has_begun_stream:
            return
        self._has_begun_stream = True
        own = id_headers(self.operation, self.request_id)
        headers = [*headers, *self.limit_headers(), *self.trace_headers, *own]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


async def read_whole(stream: ResponseStream, frames: list[Frame]) -> bytes:
    """The body of an answer that is no stream, from its first frames on; the others are added to them."""
    while frames[-1].usage is None:
        frames += await stream.next()
    return b"".join([frame.body for frame in frames])
