"""A bridge to an application's routers, usable from any thread and any event loop of this process.

The exchanges run in one *home* loop that outlives them (`serve_app.ray_adapter`): Serve binds a handle to a loop for
ever, and a script may run many short loops. A reader in another loop or thread receives the pieces, and acknowledges
them from time to time.

Invariant: an exchange ends in the cluster when its reader is closed, cancelled or dropped, in any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from serve_app.errors import Unavailable
from serve_app.http import DROPPED, AnswerPiece, HttpRequest

MAX_UNREAD_PIECES = 64  # pieces buffered for a slow reader; then the router waits, too, as for a slow HTTP client

Loop: TypeAlias = asyncio.AbstractEventLoop
T = TypeVar("T")
# An item, and a future that the reader resolves on reading it; or None, and the error that ended the stream, if any.
Message: TypeAlias = tuple[T | None, asyncio.Future[None] | BaseException | None]


class Calls(Protocol):
    """Sends a request to a router; used in the home loop only."""

    loop: Loop

    def exchange(self, asked: HttpRequest, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it arrives; closing the generator ends the request. `accept_s`: time for a router to accept it;
        None: the default."""
        ...

    async def close(self) -> None:
        """End the running calls; no call is possible after that."""
        ...


class LoopBridge:
    """The calls of one client."""

    def __init__(self, make: Callable[[], Calls]) -> None:
        self.make = make
        self._calls: Calls | None = None
        self.closed = False
        self._lock = threading.Lock()

    def _open(self) -> Calls:
        """The calls; made again if their loop has ended, which a loop outside a replica may."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this client is closed")
            if self._calls is None or self._calls.loop.is_closed():
                self._calls = self.make()
            return self._calls

    async def exchange(self, asked: HttpRequest, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it arrives; closing the generator ends the request."""
        calls = self._open()
        pieces = calls.exchange(asked, accept_s)
        if _running_loop() is calls.loop:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
            return
        arrived: asyncio.Queue[Message[AnswerPiece]] = asyncio.Queue()
        here = asyncio.get_running_loop()
        forwarder = Forwarder(
            pieces, calls.loop, lambda message: here.call_soon_threadsafe(arrived.put_nowait, message)
        )
        try:
            while (read := forwarder.unwrap(await arrived.get())) is not None:
                yield read
        finally:
            forwarder.close()

    async def in_home_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the home loop and await it."""
        if _running_loop() is self._home_loop(coroutine):
            return await coroutine
        return await asyncio.wrap_future(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the home loop, from any thread, without waiting; cancelling the future ends it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._home_loop(coroutine))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the home loop and wait for it, from a thread that does not run that loop.

        Raises:
            RuntimeError: this thread runs the home loop: waiting would block it.
        """
        running = asyncio.run_coroutine_threadsafe(coroutine, self._home_loop(coroutine, waits=True))
        try:
            return running.result()
        except BaseException:  # Ctrl-C too: a coroutine without a waiter must not run on
            running.cancel()
            raise

    def forward(self, items: AsyncGenerator[T, None], put: Callable[[Message[T]], object]) -> Forwarder[T]:
        """Run a generator in the home loop, for a thread that does not run that loop. Raises as `run`."""
        return Forwarder(items, self._home_loop(waits=True), put)

    def _home_loop(self, coroutine: Coroutine[Any, Any, Any] | None = None, *, waits: bool = False) -> Loop:
        try:
            home = self._open().loop
            if waits and _running_loop() is home:
                raise RuntimeError("`sync` would block the event loop it needs: use `await` and `async for` here")
            return home
        except BaseException:
            if coroutine is not None:
                coroutine.close()
            raise

    def close(self, timeout_s: float) -> None:
        """End the running calls. Waits `timeout_s` at most for that, unless the home loop is the caller's own."""
        with self._lock:
            calls, self._calls, self.closed = self._calls, None, True
        if calls is None or calls.loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(calls.close(), calls.loop)
        if _running_loop() is not calls.loop:
            with contextlib.suppress(TimeoutError):
                ending.result(timeout_s)


class Forwarder(Generic[T]):
    """Runs a generator in the home loop and forwards its items to a reader elsewhere; closing or dropping the forwarder
    ends the generator.

    Args:
        put: called in the home loop with each message, in order; the reader passes each to `unwrap`.
    """

    def __init__(self, items: AsyncGenerator[T, None], home: Loop, put: Callable[[Message[T]], object]) -> None:
        self._home = home
        self._sending = asyncio.run_coroutine_threadsafe(_forward(items, put), home)

    def unwrap(self, message: Message[T]) -> T | None:
        """The item of a message; None after the last item. Raises what the generator raised."""
        item, note = message
        if isinstance(note, BaseException):
            raise note
        if note is not None:
            self._home.call_soon_threadsafe(_resolve, note)
        return item

    def close(self) -> None:
        """End the generator without waiting: the interpreter may be exiting."""
        if not self._home.is_closed():  # a stopped loop would log an error on cancelling
            self._sending.cancel()

    def __del__(self) -> None:
        self.close()


async def _forward(items: AsyncGenerator[T, None], put: Callable[[Message[T]], object]) -> None:
    error: BaseException | None = None
    try:
        async with contextlib.aclosing(items):
            sent = 0
            async for item in items:
                sent += 1
                reached = asyncio.get_running_loop().create_future() if sent % MAX_UNREAD_PIECES == 0 else None
                put((item, reached))
                if reached is not None:
                    await reached
    except asyncio.CancelledError:
        error = Unavailable("the call was dropped", code=DROPPED)
        raise
    except BaseException as raised:  # noqa: BLE001 - the boundary of the loop: any error goes to the reader
        error = raised
    finally:
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            put((None, error))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _running_loop() -> Loop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
