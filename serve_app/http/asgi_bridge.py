"""The router's end of a call by handle: one exchange with the same ASGI app that answers HTTP.

Invariant: nothing is decided here. The ASGI app decides key, class, limits, queue, outcome and metrics; a caller that
disconnects cancels the app's task, as a disconnected HTTP client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from serve_app.errors import ServeAppError
from serve_app.http.error_responses import CLIENT_ID_HEADER, REQUEST_ID_HEADER, Headers
from serve_app.http.keys import RowOwner
from serve_app.http.python_calls import AnswerPiece, HttpRequest, read_body, read_events

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

ROW_OWNER = "serve_app.row_owner"  # in a scope: whose batch the request is a row of; no server of HTTP sets it
PIECE_BYTES = 2**20  # of an answer in one message: a process outside the cluster accepts 4 MiB, gRPC's default


class AsgiBridge:
    """Calls by handle on one router replica.

    Args:
        app: the router's ASGI application.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def exchange(self, request: HttpRequest, row: RowOwner | None = None) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it arrives: status, headers and first bytes in one piece, then bytes. Closing the generator
        ends the request. `row`: whose batch it is a row of; then no key is needed.

        While the reader is slow, one message waits and the ASGI app waits with it, so frames coalesce in the stream as
        they do for a slow HTTP client.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        room = asyncio.Semaphore(1)

        async def send(message: Message) -> None:
            await room.acquire()
            messages.put_nowait(message)

        scope: Message = {
            "type": "http",
            "method": request.method,
            "path": request.path,
            "headers": request.headers,
            "query_string": request.query,
            ROW_OWNER: row,
        }
        # No message comes after the body: a caller that disconnects cancels the task instead.
        sent: asyncio.Queue[Message] = asyncio.Queue()
        sent.put_nowait({"type": "http.request", "body": request.body, "more_body": False})
        task = asyncio.ensure_future(self._app(scope, sent.get, send))
        task.add_done_callback(lambda _: messages.put_nowait(None))  # else a failed task leaves `get` waiting
        try:
            head: tuple[int, Headers] | None = None
            while (message := await messages.get()) is not None:
                room.release()
                if message["type"] == "http.response.start":
                    headers = message["headers"]
                    # as Serve adds it to an answer over HTTP: the caller's own, if it sent one
                    request_id = dict(request.headers).get(CLIENT_ID_HEADER) or dict(headers).get(REQUEST_ID_HEADER)
                    head = message["status"], headers + ([] if request_id is None else [(CLIENT_ID_HEADER, request_id)])
                    continue
                body = message["body"]
                pieces = [body]
                if len(body) > PIECE_BYTES:
                    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
                for piece in pieces:
                    yield piece if head is None else (*head, piece)
                    head = None
            if task.cancelled():  # not by this method: the caller must not take it for its own cancellation
                raise ServeAppError("the router dropped the request")
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def answer(self, request: HttpRequest) -> dict[str, Any]:
        """A complete answer, as plain data. Raises the `ServeAppError` that HTTP would have sent."""
        answer: dict[str, Any] = msgspec.json.decode(await read_body(self.exchange(request)))
        return answer

    async def stream(self, request: HttpRequest) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer, as plain data. Raises as `answer`, before the first chunk or after it."""
        async with contextlib.aclosing(read_events(self.exchange(request))) as events:
            async for event in events:
                yield msgspec.json.decode(event)


def is_no_refusal(record: logging.LogRecord) -> bool:
    """A filter that keeps refusals out of a replica's log: Serve logs a traceback for every error of a method."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, ServeAppError) and error.status != ServeAppError.status)
