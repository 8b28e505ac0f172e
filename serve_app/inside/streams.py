"""A streamed answer in the caller's hands, with and without `await`.

Invariant: leaving the loop early ends the request, whether the stream is kept in a variable or not; a stream that has
ended or was left gives nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Generic, TypeVar

from serve_app.inside.link import Link

T = TypeVar("T")


class Stream(Generic[T]):
    """The chunks of one answer: `async for chunk in stream`. It is sent when it is first read, and read once.

    Leaving the loop, `aclose`, leaving an `async with` block or dropping the stream ends the request in the engine.
    """

    def __init__(self, batches: AsyncGenerator[list[T], None]) -> None:
        self._batches = batches
        self._arrived: deque[T] = deque()
        self._looped = False
        self.closed = False

    async def __anext__(self) -> T:
        while not self._arrived:
            if self.closed:
                raise StopAsyncIteration
            self._arrived.extend(await anext(self._batches))
        return self._arrived.popleft()

    async def __aiter__(self) -> AsyncIterator[T]:
        # A generator of its own for the loop: the loop drops it on leaving, and that closes it.
        if self._looped:
            return
        self._looped = True
        async with self:
            while True:
                try:
                    chunk = await self.__anext__()
                except StopAsyncIteration:
                    return
                yield chunk

    async def arrived(self) -> list[T]:
        """The chunks that have come since the last ones read, at least one; none at the end."""
        if self._arrived:
            told = list(self._arrived)
            self._arrived.clear()
            return told
        return [] if self.closed else await anext(self._batches, [])

    async def aclose(self) -> None:
        """End the request; harmless when it is over."""
        self.closed = True
        self._arrived.clear()
        await self._batches.aclose()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class SyncStream(Generic[T]):
    """The same without `await`: `for chunk in stream`, `close`, `with`. Another thread may close it: the loop ends."""

    def __init__(self, link: Link, stream: Stream[T]) -> None:
        self._link = link
        self._stream = stream
        self._arrived: deque[T] = deque()
        self._reading: asyncio.Task[Any] | None = None
        self._looped = False

    def __next__(self) -> T:
        if not self._arrived:
            self._arrived.extend(self._more())
            if not self._arrived:
                raise StopIteration
        return self._arrived.popleft()

    def _more(self) -> list[T]:
        try:
            return [] if self._stream.closed else self._link.run(self._read())
        except CancelledError:
            if self._stream.closed:
                return []
            raise

    async def _read(self) -> list[T]:
        self._reading = asyncio.current_task()
        try:
            return await self._stream.arrived()
        finally:
            self._reading = None

    async def _end(self) -> None:
        if self._reading is not None:  # in another thread's name
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._stream.aclose()

    def __iter__(self) -> Iterator[T]:
        if self._looped:
            return
        self._looped = True
        with self:
            while True:
                try:
                    chunk = self.__next__()
                except StopIteration:
                    return
                yield chunk

    def close(self) -> None:
        """End the request; harmless when it is over. Does not wait for the engine."""
        self._arrived.clear()
        if not self._stream.closed:
            self._stream.closed = True
            self._link.drop(self._end)

    def __enter__(self) -> SyncStream[T]:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
