"""A streamed answer in the caller's hands, with and without `await`.

Invariant: leaving the loop early ends the request, whether the stream is kept in a variable or not; a stream that has
ended or was left gives nothing more.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

from serve_app.client.loop_bridge import Forwarder, Link, Message

T = TypeVar("T")


class Stream(Generic[T]):
    """The chunks of one answer: `async for chunk in stream`. It is sent when it is first read, and read once.

    Leaving the loop, `aclose`, leaving an `async with` block or dropping the stream ends the request in the engine.
    """

    def __init__(self, chunks: AsyncGenerator[T, None]) -> None:
        self.chunks = chunks
        self._looped = False

    async def __anext__(self) -> T:
        return await anext(self.chunks)

    async def __aiter__(self) -> AsyncIterator[T]:
        # A generator of its own for the loop: the loop drops it on leaving, and that closes it.
        if self._looped:
            return
        self._looped = True
        async with self:
            async for chunk in self.chunks:
                yield chunk

    async def aclose(self) -> None:
        """End the request; harmless when it is over."""
        await self.chunks.aclose()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class SyncStream(Generic[T]):
    """The same without `await`: `for chunk in stream`, `close`, `with`. Another thread may close it: the loop ends."""

    def __init__(self, link: Link, chunks: AsyncGenerator[T, None]) -> None:
        self._link, self.chunks = link, chunks
        self._forwarder: Forwarder[T] | None = None  # once the stream is read
        self._messages: SimpleQueue[Message[T]] = SimpleQueue()
        self._looped = self._over = False

    def __next__(self) -> T:
        chunk = self._read()
        if chunk is None:
            raise StopIteration
        return chunk

    def __iter__(self) -> Iterator[T]:
        if self._looped:
            return
        self._looped = True
        with self:
            while (chunk := self._read()) is not None:
                yield chunk

    def _read(self) -> T | None:
        if self._over:
            return None
        if self._forwarder is None:
            self._forwarder = self._link.forward(self.chunks, self._messages.put)
        try:
            chunk = self._forwarder.unwrap(self._messages.get())
        except BaseException:  # Ctrl-C among them
            if self._over:  # closed by another thread meanwhile
                return None
            self.close()
            raise
        self._over = self._over or chunk is None
        return None if self._over else chunk

    def close(self) -> None:
        """End the request; harmless when it is over. Does not wait for the engine."""
        self._over = True
        if self._forwarder is not None:
            self._forwarder.close()

    def __enter__(self) -> SyncStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
