"""Answers with and without `await`: streams, and blocking versions of async methods.

Invariant: leaving the loop early ends the request, also if a variable keeps the stream; a stream that has ended or was
left yields nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from serve_app.client.loop_bridge import MAX_UNREAD_PIECES, Forwarder, LoopBridge, Message

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Stream(Generic[T]):
    """The chunks of one answer: `async for chunk in stream`. The first read sends the request; a stream is read once.
    Or the results of a map, in the same way.

    Leaving the loop, `aclose`, leaving an `async with` block or dropping the stream ends the request in the engine.
    """

    def __init__(self, chunks: AsyncGenerator[T, None]) -> None:
        self.chunks = chunks
        self._is_iterated = False

    async def __anext__(self) -> T:
        return await anext(self.chunks)

    async def __aiter__(self) -> AsyncIterator[T]:
        # A separate generator for the loop: the loop drops it on leaving, which closes it.
        if self._is_iterated:
            return
        self._is_iterated = True
        async with self:
            async for chunk in self.chunks:
                yield chunk

    async def aclose(self) -> None:
        """End the request; no effect after its end."""
        await self.chunks.aclose()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SyncStream(Generic[T]):
    """The same without `await`: `for chunk in stream`, `close`, `with`. Another thread may close it: the loop ends.

    Args:
        messages: may hold functions, too, which the reader calls when it comes to them.
        max_unread: chunks that may have been made and not read.
        on_close: called once, when the stream has ended or is closed.
    """

    def __init__(
        self,
        bridge: LoopBridge,
        chunks: AsyncGenerator[T, None],
        *,
        messages: SimpleQueue[Message[T] | Callable[[], object]] | None = None,
        max_unread: int = MAX_UNREAD_PIECES,
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self._bridge = bridge
        self.chunks = chunks
        self._forwarder: Forwarder[T] | None = None  # once the stream is read
        self._messages = SimpleQueue[Message[T] | Callable[[], object]]() if messages is None else messages
        self._max_unread = max_unread
        self._on_close = on_close
        self._is_iterated = self._has_ended = False

    def __next__(self) -> T:
        chunk = self._read()
        if chunk is None:
            raise StopIteration
        return chunk

    def __iter__(self) -> Iterator[T]:
        if self._is_iterated:
            return
        self._is_iterated = True
        with self:
            while (chunk := self._read()) is not None:
                yield chunk

    def _read(self) -> T | None:
        if self._has_ended:
            return None
        if self._forwarder is None:
            home = self._bridge.home_to_wait_for()
            self._forwarder = Forwarder(self.chunks, home, self._messages.put, self._max_unread)
        try:
            while callable(message := self._messages.get()):
                message()
            chunk = self._forwarder.unwrap(message)
        except BaseException:  # Ctrl-C too
            if self._has_ended:  # closed by another thread meanwhile
                return None
            self.close()
            raise
        if chunk is None and not self._has_ended:
            self._has_ended = True
            self._tell_closed()
        return None if self._has_ended else chunk

    def close(self) -> None:
        """End the request; no effect after its end. Does not wait for the engine."""
        self._has_ended = True
        if self._forwarder is not None:
            self._forwarder.close()
        self._tell_closed()

    def _tell_closed(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> SyncStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Synchronous(Generic[T]):
    """Waits for the calls of `wrapped`.

    It works in any thread, also in one with a running event loop (a notebook's cell; that loop is blocked meanwhile).
    Only the event loop of a Serve replica raises a RuntimeError: the calls themselves run in that loop.
    """

    def __init__(self, wrapped: T, bridge: LoopBridge) -> None:
        self._wrapped = wrapped
        self._bridge = bridge


def blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Synchronous[T], P], R]:
    """The blocking version of a method."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bridge.run(method, self._wrapped, *args, **kwargs)

    return call


def blocking_stream(
    method: Callable[Concatenate[T, P], Stream[R]],
) -> Callable[Concatenate[Synchronous[T], P], SyncStream[R]]:
    """The version of a method whose stream is read without `await`."""

    @functools.wraps(method)
    def call(self: Synchronous[T], /, *args: P.args, **kwargs: P.kwargs) -> SyncStream[R]:
        return SyncStream(self._bridge, method(self._wrapped, *args, **kwargs).chunks)

    return call
