"""The answering half of one HTTP exchange: status, headers and bytes go out in order, and an error as long as it can.

Invariant: exactly one status goes out; nothing follows the last byte; what `keep` is told is exactly the answer that
went out, as it would have without comments before it.

A comment begins the stream, and its status 200 is out: what would have been an error after that, the line's or the
engine's, is an event with the error's body. `status` is the answer's own all the same: 400, where the engine said so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from serve_app.errors import ServeAppError
from serve_app.http.error_responses import (
    REQUEST_ID_HEADER,
    error_response,
    sse_comment,
    sse_error,
    sse_refusal,
    sse_retry_comment,
)
from serve_app.transport import Frame, Stream
from serve_app.types import Operation

Headers = list[tuple[bytes, bytes]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REPLAYED = (b"x-idempotent-replay", b"true")
_SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS: Headers = [(b"content-type", b"application/json")]


class Exchange:
    """The answering half of one HTTP exchange."""

    __slots__ = ("_headers", "_send", "_streaming", "keep", "operation", "request_id", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False
        self.status = 0
        self.request_id = ""
        self.operation = Operation.CHAT
        self._headers: Headers = []
        self.keep: Callable[[bytes], None] | None = None  # told what goes out

    def final(self) -> tuple[int, Headers] | None:
        """Status and headers of the answer; None where a repeat should be run again."""
        return (self.status, self._headers) if 200 <= self.status < 500 and self.status != 429 else None

    async def whole(self, status: int, headers: Headers, body: bytes, *, head: bool = False) -> None:
        """A complete answer; `head`: all of it but the body."""
        self.status, self._headers = status, headers
        if self.keep is not None:
            self.keep(body)
        headers = [*headers, (b"content-length", b"%d" % len(body))]
        if self.request_id:
            headers.append((REQUEST_ID_HEADER, self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"" if head else body, "more_body": False})

    async def comment(self, text: str) -> None:
        """Tell something ahead of an answer that will be streamed."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": sse_comment(text), "more_body": True})

    async def relay(self, stream: Stream, frames: list[Frame]) -> Frame:
        """Send frames as they arrive, up to the last, which is returned.

        Raises:
            EngineFailed: the engine broke; what has been sent stays sent. Until `stream.seen`, nothing has been.
        """
        first = frames[0]
        if first.media == "json":
            while frames[-1].usage is None:
                frames += await stream.next()
            body = b"".join([frame.body for frame in frames])
            stream.seen = True
            await (self._as_event if self._streaming else self.whole)(first.status, _JSON_HEADERS, body)
            return frames[-1]
        self.status, self._headers, stream.seen = first.status, _SSE_HEADERS, True
        await self._begin(first.status)
        while True:
            last = frames[-1].usage is not None
            body = frames[0].body if len(frames) == 1 else b"".join([frame.body for frame in frames])
            if self.keep is not None:
                self.keep(body)
            if body or last:
                await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            if last:
                return frames[-1]
            frames = await stream.next()

    async def fail(self, error: ServeAppError) -> None:
        """Say what went wrong: as a status while nothing is sent, as an event of the stream after that."""
        if self._streaming:
            wait = b"" if self.status else sse_retry_comment(error)
            body = wait + sse_error(error, self.operation)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif not self.status:
            await self.whole(*error_response(error))

    async def _begin(self, status: int = 200) -> None:
        """Send the head of a stream, once."""
        if self._streaming:
            return
        self._streaming = True
        headers = [*_SSE_HEADERS, (REQUEST_ID_HEADER, self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _as_event(self, status: int, headers: Headers, body: bytes) -> None:
        """The engine's refusal of a stream that comments have begun. A repeat gets it as it was."""
        self.status, self._headers = status, headers
        if self.keep is not None:
            self.keep(body)
        await self._send({"type": "http.response.body", "body": sse_refusal(body, self.operation), "more_body": False})
