"""A link to an application's routers, usable from any thread and any event loop of this process.

The calls themselves run in one *home* loop that outlives them (`serve_adapter.home_loop`): Serve binds a handle to a
loop and cannot let go of it, and a script may run many short ones. A caller in another loop reads through a mailbox.

Invariant: a call ends in the cluster when its reader is closed, cancelled or dropped, in whatever thread that happens.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from serve_app.errors import Unavailable
from serve_app.inside.calls import DROPPED, Asked, Piece

MAX_BEHIND = 64  # pieces that wait for a slow reader; beyond them the router's own bound on such readers takes over

T = TypeVar("T")


class Calls(Protocol):
    """How a request reaches a router: in the home loop alone."""

    loop: asyncio.AbstractEventLoop

    def exchange(self, asked: Asked) -> AsyncGenerator[Piece, None]:
        """The answer as it comes; closing it ends the request."""
        ...

    async def close(self) -> None:
        """End what runs, and be of no more use."""
        ...


class Link:
    """The calls of one client."""

    def __init__(self, make: Callable[[], Calls]) -> None:
        self._make = make
        self._calls: Calls | None = None
        self.closed = False
        self._lock = threading.Lock()

    def _open(self) -> Calls:
        """The calls; made anew where their loop has ended, as one that is not a replica's own may."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this client is closed")
            if self._calls is None or self._calls.loop.is_closed():
                self._calls = self._make()
            return self._calls

    async def exchange(self, asked: Asked) -> AsyncGenerator[list[Piece], None]:
        """The answer as it comes, in lists of what has arrived since the last one."""
        calls = self._open()
        if asyncio.get_running_loop() is calls.loop:
            async with contextlib.aclosing(calls.exchange(asked)) as pieces:
                async for piece in pieces:
                    yield [piece]
            return
        mailbox: Mailbox[Piece] = Mailbox(asyncio.get_running_loop(), calls.loop)
        pump = _Pump(mailbox.fill(calls.exchange(asked)), calls.loop)
        try:
            while batch := await mailbox.take():
                yield batch
        finally:
            pump.stop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the home loop and wait for it, from a thread that does not run that loop.

        Raises:
            RuntimeError: it does: waiting would stop the very loop that has to work.
        """
        try:
            home = self._open().loop
            if _running_loop() is home:
                raise RuntimeError("`sync` would block the event loop it needs: use `await` and `async for` here")
        except RuntimeError:
            coroutine.close()
            raise
        running = asyncio.run_coroutine_threadsafe(coroutine, home)
        try:
            return running.result()
        except BaseException:  # Ctrl-C among them: what nobody waits for is not to run on
            running.cancel()
            raise

    def beside(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the home loop, from any thread, without waiting; cancelling what is returned ends it."""
        try:
            home = self._open().loop
        except RuntimeError:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, home)

    def drop(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close what was read with `run`, without waiting: this may be the end of the interpreter."""
        calls = self._calls
        if calls is not None and not calls.loop.is_closed():
            calls.loop.call_soon_threadsafe(lambda: calls.loop.create_task(close()))

    def close(self, timeout_s: float) -> None:
        """End what runs. Waits for that, `timeout_s` at most, unless the home loop is the caller's own."""
        with self._lock:
            calls, self._calls, self.closed = self._calls, None, True
        if calls is None or calls.loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(calls.close(), calls.loop)
        if _running_loop() is not calls.loop:
            with contextlib.suppress(TimeoutError):
                ending.result(timeout_s)


class _Pump:
    """What fills a mailbox, until it is stopped or its reader is no more: a generator that is left open when its loop
    is closed never gets to its end."""

    def __init__(self, filling: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._filling = asyncio.run_coroutine_threadsafe(filling, loop)

    def stop(self) -> None:
        if not self._loop.is_closed():  # else it is stopped, and to cancel it writes an error to the log
            self._filling.cancel()

    def __del__(self) -> None:
        self.stop()


class Mailbox(Generic[T]):
    """Items from the writer's loop to the reader's, in order, then the end or the error that ended them."""

    def __init__(self, reader: asyncio.AbstractEventLoop, writer: asyncio.AbstractEventLoop) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._ended = False
        self._error: BaseException | None = None
        self._wanted: asyncio.Future[None] | None = None  # the reader waits for an item
        self._room: asyncio.Future[None] | None = None  # the writer waits for the reader

    async def fill(self, source: AsyncGenerator[T, None]) -> None:
        """Deliver all of `source`; in the writer's loop. Cancelling it closes the source."""
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    await self._put(item)
        except asyncio.CancelledError:
            error = Unavailable("the call was dropped", code=DROPPED)
            raise
        except BaseException as raised:  # noqa: BLE001 - the border of the loop: whatever it is goes to the reader
            error = raised
        finally:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody reads
                self._tell(None, error)

    async def _put(self, item: T) -> None:
        room = self._tell(item, None)
        if room is not None:
            await room

    def _tell(self, item: T | None, error: BaseException | None) -> asyncio.Future[None] | None:
        """Put an item in, or the end; the future is there when the writer has to wait for the reader."""
        with self._lock:
            if item is None:
                self._ended, self._error = True, error
            else:
                self._items.append(item)
            wanted, self._wanted = self._wanted, None
            self._room = self._writer.create_future() if len(self._items) >= MAX_BEHIND else None
            room = self._room
        if wanted is not None:
            self._reader.call_soon_threadsafe(_resolve, wanted)
        return room

    async def take(self) -> list[T]:
        """What has arrived since the last call, at least one item; nothing at the end. In the reader's loop."""
        while True:
            with self._lock:
                items, self._items = self._items, []
                room, self._room = self._room, None
                ended = self._ended
                wanted = self._wanted = None if items or ended else self._reader.create_future()
            if room is not None:
                self._writer.call_soon_threadsafe(_resolve, room)
            if wanted is not None:
                await wanted
            elif items or self._error is None:
                return items
            else:
                raise self._error


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
