"""Reads the items of a map from any iterable, one at a time and only when asked, without blocking an event loop.

An async iterable is read in the map's loop, as is a collection that is there as a whole. Any other iterable may do I/O:
an async map reads it in one thread of its own, a map of `llm.sync` in the thread that reads the results.

Invariant: a source that is left is closed, in the thread that read it: at once, or when an item that is being read is
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

IN_PLACE = (list, tuple, set, frozenset, deque, range)  # nothing is computed or fetched on reading them
CLOSE_S = 1.0  # a source's `close` may take so long; then its thread goes on with it alone

logger = logging.getLogger("serve_app")


END: Final = object()  # what a source gives after its last item


class Source(Protocol):
    """The items of a map."""

    async def read(self) -> Any:
        """The next item, or `END`. Raises what the iterable raised."""

    async def close(self) -> None:
        """Read no more. Raises what closing a generator raised."""


def check(items: object) -> int | None:
    """The number of items, if it is known.

    Raises:
        TypeError: this is no source of items, or certainly not the one that was meant.
    """
    if isinstance(items, str | bytes):
        raise TypeError("`prompts` is one text: give an iterable of them, such as [text]")
    if isinstance(items, Mapping):
        raise TypeError("`prompts` is one mapping: give an iterable of items, such as [mapping]")
    if not isinstance(items, AsyncIterable | Iterable) and not hasattr(items, "__getitem__"):
        raise TypeError(f"`prompts` is a {type(items).__name__}: give an iterable or an async iterable of items")
    return len(items) if isinstance(items, Sized) else None


def source_of(items: Any) -> Source:
    """The source of an async map."""
    if isinstance(items, IN_PLACE):
        items = _each(items)
    return AsyncSource(items) if isinstance(items, AsyncIterable) else ThreadSource(items)


async def _each(items: Iterable[Any]) -> AsyncGenerator[Any, None]:
    for item in items:
        yield item


class AsyncSource:
    """An async iterable."""

    def __init__(self, items: AsyncIterable[Any]) -> None:
        self._items = aiter(items)

    async def read(self) -> Any:
        return await anext(self._items, END)

    async def close(self) -> None:
        if isinstance(self._items, AsyncGenerator):
            await self._items.aclose()


class ThreadSource:
    """An iterable that is read in one thread, which ends with the source."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items
        self._iterator: Iterator[Any] | None = items if isinstance(items, Generator) else None
        self._thread = ThreadPoolExecutor(1, "serve-app-map")

    async def read(self) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._next)

    async def close(self) -> None:
        closed = asyncio.wrap_future(self._thread.submit(self._close))
        self._thread.shutdown(wait=False)
        await asyncio.wait({closed}, timeout=CLOSE_S)
        if closed.done():
            closed.result()
        else:
            closed.add_done_callback(_log_error)

    def _next(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items)
        return next(self._iterator, END)

    def _close(self) -> None:
        if isinstance(self._iterator, Generator):
            self._iterator.close()


def _log_error(closed: asyncio.Future[None]) -> None:
    error = None if closed.cancelled() else closed.exception()
    if error is not None:
        logger.warning("Map could not close its iterator of prompts, which may hold files open: %r", error)


class ReaderSource:
    """An iterable that is read in the thread that reads the results of a sync map, which calls what `put` is given.

    Args:
        put: hands a function to that thread; it calls it when it next waits for a result.
    """

    def __init__(self, items: Iterable[Any], put: Callable[[Callable[[], None]], None]) -> None:
        self._iterator = iter(items)
        self._put = put
        self._reading = threading.Lock()
        self._is_closed = False

    async def read(self) -> Any:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Any] = loop.create_future()

        def read_one() -> None:
            item: Any = END
            error: Exception | None = None
            with self._reading:
                if self._is_closed:
                    return
                try:
                    item = next(self._iterator, END)
                except Exception as raised:  # noqa: BLE001 - it belongs to the map, which raises it in this thread
                    error = raised
            if self._is_closed:
                self.close_in_reader()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, arrived, item, error)

        self._put(read_one)
        return await arrived

    async def close(self) -> None:
        """The reader closes it."""

    def close_in_reader(self) -> None:
        """Read no more. While another thread reads an item, that thread closes the iterable afterwards."""
        self._is_closed = True
        if self._reading.acquire(blocking=False):
            try:
                if isinstance(self._iterator, Generator):
                    self._iterator.close()
            finally:
                self._reading.release()


def _settle(arrived: asyncio.Future[Any], item: Any, error: Exception | None) -> None:
    if not arrived.done():
        arrived.set_result(item) if error is None else arrived.set_exception(error)
