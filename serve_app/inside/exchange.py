"""The router's end of a call by handle: one exchange with the very edge that answers HTTP.

Invariant: nothing is decided here. Key, class, limits, line, outcome and metrics are the edge's; a caller that goes
away cancels the edge's task, as a disconnected HTTP client does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from serve_app.errors import ServeAppError
from serve_app.inside.calls import Asked, Headers, Kind, Piece, Reader, ask, ask_models

Message = MutableMapping[str, Any]
Edge = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

PIECE_BYTES = 2**20  # of an answer in one message: a process outside the cluster takes 4 MiB, gRPC's default


class Inside:
    """Calls by handle on one router replica.

    Args:
        edge: the router's ASGI application.
    """

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def exchange(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The answer as it comes: status, headers and first bytes in one, then bytes. Closing it ends the request.

        While the reader is behind, one message waits and the edge with it, so frames coalesce where they always do.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        room = asyncio.Semaphore(1)

        async def send(message: Message) -> None:
            await room.acquire()
            messages.put_nowait(message)

        task = asyncio.ensure_future(self._edge(_scope(asked), _receiver(asked.body), send))
        task.add_done_callback(lambda _: messages.put_nowait(None))  # else a task that fails leaves us waiting
        try:
            head: tuple[int, Headers] | None = None
            while (message := await messages.get()) is not None:
                room.release()
                if message["type"] == "http.response.start":
                    head = message["status"], message["headers"]
                    continue
                for piece in _pieces(message["body"]):
                    yield piece if head is None else (*head, piece)
                    head = None
            if task.cancelled():  # not by us: to the caller it must not look as if it had been cancelled itself
                raise ServeAppError("the router dropped the request")
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def answer(self, kind: Kind, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer to a call, as plain data. Raises the `ServeAppError` that HTTP would have told."""
        return await self._whole(ask(kind, arguments))

    async def models(self, api_key: str | None) -> dict[str, Any]:
        """The list of models, as GET /v1/models."""
        return await self._whole(ask_models(api_key))

    async def stream(self, kind: Kind, arguments: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer, as plain data. Raises as `answer`, before the first chunk or after it."""
        reader = Reader(streamed=True)
        async with contextlib.aclosing(self.exchange(ask(kind, arguments))) as pieces:
            async for piece in pieces:
                for event in reader.feed(piece):
                    yield msgspec.json.decode(event)
        reader.end()

    async def _whole(self, asked: Asked) -> dict[str, Any]:
        """In the caller's own task: cancelling it cancels the request."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await self._edge(_scope(asked), _receiver(asked.body), send)
        start, *parts = sent
        reader = Reader(streamed=False)
        reader.feed((start["status"], start["headers"], b"".join(part["body"] for part in parts)))
        answer: dict[str, Any] = msgspec.json.decode(reader.end())
        return answer


class RefusalsAreNoFailures(logging.Filter):
    """Keeps refusals out of a replica's log: Serve writes a traceback there for every error that a method raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, ServeAppError) and error.status != ServeAppError.status)


def _scope(asked: Asked) -> Message:
    return {"type": "http", "method": asked.method, "path": asked.path, "headers": asked.headers}


def _receiver(body: bytes) -> Callable[[], Awaitable[Message]]:
    """The body in one piece, and nothing after it: a caller that leaves cancels the task instead."""
    asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not asked:
            await asyncio.Event().wait()
        return asked.pop()

    return receive


def _pieces(body: bytes) -> list[bytes]:
    if len(body) <= PIECE_BYTES:
        return [body]
    return [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
