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
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from serve_app.errors import DROPPED, Unavailable
from serve_app.http import AnswerPiece, HttpRequest, read_body
from serve_app.ray_adapter import IngressHandle

MAX_UNREAD_PIECES = 64  # pieces buffered for a slow reader; then the router waits, too, as for a slow HTTP client

Loop: TypeAlias = asyncio.AbstractEventLoop
P = ParamSpec("P")
T = TypeVar("T")
# An item, and an event that the reader sets on reading it; or None, and the error that ended the stream, if any.
Message: TypeAlias = tuple[T | None, asyncio.Event | BaseException | None]


class LoopBridge:
    """The calls of one client.

    Args:
        make: makes the handle that sends the requests; it is used in its home loop only.
    """

    def __init__(self, make: Callable[[], IngressHandle]) -> None:
        self.make = make
        self._handle: IngressHandle | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _open(self) -> IngressHandle:
        """The handle; made again if its loop has ended, which a loop outside a replica may."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this client is closed")
            if self._handle is None or self._handle.loop.is_closed():
                self._handle = self.make()
            return self._handle

    async def exchange(self, asked: HttpRequest, accept_s: float | None = None) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it arrives; closing the generator ends the request. `accept_s`: time for a router to accept it;
        None: the default."""
        handle = self._open()
        arguments = asked.method, asked.path, asked.headers, asked.body, asked.query
        pieces = handle.stream(*arguments, accept_s=accept_s)
        here = asyncio.get_running_loop()
        if here is handle.loop:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
            return
        arrived: asyncio.Queue[Message[AnswerPiece]] = asyncio.Queue()
        forwarder = Forwarder(
            pieces, handle.loop, lambda message: here.call_soon_threadsafe(arrived.put_nowait, message)
        )
        try:
            while (read := forwarder.unwrap(await arrived.get())) is not None:
                yield read
        finally:
            forwarder.close()

    async def read(self, asked: HttpRequest) -> bytes:
        """The body of the answer, read in the home loop. Raises `serve_app.errors`."""
        if self._open().loop is asyncio.get_running_loop():
            return await read_body(self.exchange(asked))
        return await asyncio.wrap_future(self.submit(read_body, self.exchange(asked)))

    def submit(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Run an async function in the home loop, from any thread, without waiting; cancelling the future ends it."""
        home = self._open().loop
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), home)

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an async function in the home loop and wait for it. Raises as `home_to_wait_for`."""
        home = self.home_to_wait_for()
        running = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), home)
        try:
            return running.result()
        except BaseException:  # Ctrl-C too: a coroutine without a waiter must not run on
            running.cancel()
            raise

    def home_to_wait_for(self) -> Loop:
        """The home loop, for a thread that waits for something in it.

        Raises:
            RuntimeError: this thread runs the home loop: waiting would block it.
        """
        home = self._open().loop
        if _running_loop() is home:
            raise RuntimeError("`sync` would block the event loop it needs: use `await` and `async for` here")
        return home

    def close(self, timeout_s: float) -> None:
        """End the running calls. Waits `timeout_s` at most for that, unless the home loop is the caller's own."""
        with self._lock:
            handle, self._handle = self._handle, None
            self._is_closed = True
        if handle is None or handle.loop.is_closed():
            return
        ending = asyncio.run_coroutine_threadsafe(handle.close(), handle.loop)
        if _running_loop() is not handle.loop:
            with contextlib.suppress(TimeoutError):
                ending.result(timeout_s)


class Forwarder(Generic[T]):
    """Runs a generator in the home loop and forwards its items to a reader elsewhere; closing or dropping the forwarder
    ends the generator.

    Args:
        put: called in the home loop with each message, in order; the reader passes each to `unwrap`.
        max_unread: items that may be forwarded and not read.
    """

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        home: Loop,
        put: Callable[[Message[T]], object],
        max_unread: int = MAX_UNREAD_PIECES,
    ) -> None:
        self._home = home
        self._sending = asyncio.run_coroutine_threadsafe(_forward(items, put, max_unread), home)

    def unwrap(self, message: Message[T]) -> T | None:
        """The item of a message; None after the last item. Raises what the generator raised."""
        item, note = message
        if isinstance(note, BaseException):
            raise note
        if note is not None:
            self._home.call_soon_threadsafe(note.set)
        return item

    def close(self) -> None:
        """End the generator without waiting: the interpreter may be exiting."""
        if not self._home.is_closed():  # a stopped loop would log an error on cancelling
            self._sending.cancel()

    def __del__(self) -> None:
        self.close()


async def _forward(items: AsyncGenerator[T, None], put: Callable[[Message[T]], object], max_unread: int) -> None:
    error: BaseException | None = None
    try:
        async with contextlib.aclosing(items):
            sent = 0
            async for item in items:
                sent += 1
                reached = asyncio.Event() if sent % max_unread == 0 else None
                put((item, reached))
                if reached is not None:
                    await reached.wait()
    except asyncio.CancelledError:
        error = Unavailable("the call was dropped", code=DROPPED)
        raise
    except BaseException as raised:  # noqa: BLE001 - the boundary of the loop: any error goes to the reader
        error = raised
    finally:
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed
            put((None, error))


def _running_loop() -> Loop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
