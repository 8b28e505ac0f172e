"""The frames of one request as they arrive at a router, and how much of all requests is not read yet.

Invariant: frames are delivered in order; a stream that failed still delivers what arrived before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.core.receipts import Pace
from serve_app.errors import EngineFailed
from serve_app.transport.messages import Frame, Usage

MAX_BUFFERED_BYTES = 16 * 2**20  # per request, for a client that does not read; about 60,000 chat chunks
MAX_UNREAD_BYTES = 256 * 2**20  # of all requests of a router: sixteen that do not read at all


class Unread:
    """What the requests of one router have not read yet, in bytes. Above `most` those with most of it end, one by one:
    backpressure would hold up all others on their channel."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self.bytes = 0
        self.ended = 0  # requests, so far
        self._most = most
        self._streams: set[Stream] = set()  # those that have some

    def add(self, stream: Stream, more: int) -> None:
        self._streams.add(stream)
        self.bytes += more
        while self.bytes > self._most:
            self.ended += 1
            max(self._streams, key=lambda one: one.buffered).cut()

    def read(self, stream: Stream) -> None:
        """It has none any more."""
        self._streams.discard(stream)
        self.bytes -= stream.buffered


class Stream:
    """The frames of one request, in order, as they arrive.

    Args:
        unread: what it does not read counts here.
        on_cut: called when it has ended because too much is unread.
    """

    __slots__ = (
        "_error",
        "_frames",
        "_on_cut",
        "_unread",
        "_waiter",
        "begun",
        "buffered",
        "lost",
        "pace",
        "seen",
        "tokens",
        "usage",
    )

    def __init__(self, unread: Unread, on_cut: Callable[[], None]) -> None:
        self._unread, self._on_cut = unread, on_cut
        self._frames: list[Frame] = []
        self.buffered = 0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.tokens = 0  # that the engine has made
        self.pace = Pace()  # when they came, however late a client reads them
        self.begun = False  # whether the first frame has arrived
        self.seen = False  # whether the client has been sent anything of it; its reader says so
        self.usage: Usage | None = None  # comes with the last frame
        self.lost = False  # whether it failed because the connection to the replica did

    @property
    def finished(self) -> bool:
        """Whether the last frame has arrived."""
        return self.usage is not None

    def push(self, frame: Frame) -> bool:
        """Add a frame. Returns False when the consumer is too far behind to go on. One that comes after `fail` is
        dropped: others may be missing before it."""
        if self._error is not None:
            return True
        self.begun = True
        self.usage = frame.usage
        self._frames.append(frame)
        self.buffered += len(frame.body)
        self._wake()
        self._unread.add(self, len(frame.body))
        return self.buffered <= MAX_BUFFERED_BYTES

    def fail(self, error: BaseException, *, lost: bool = False) -> None:
        """End the stream; frames that have arrived are still delivered first."""
        if self._error is None:
            self._error = error
            self.lost = lost
            self._wake()

    def clear(self) -> None:
        """Drop what was not read."""
        self._unread.read(self)
        self._frames, self.buffered = [], 0

    def cut(self) -> None:
        """End it, and drop what was not read."""
        self.clear()
        self.fail(EngineFailed("the client reads too slowly, and too much waits for others", code="slow_client"))
        self._on_cut()

    async def next(self) -> list[Frame]:
        """All frames that have arrived since the last call, at least one.

        Raises:
            ServeAppError: the request cannot go on.
        """
        if not self._frames:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self._frames and self._error is not None:
                raise self._error
        frames = self._frames
        self.clear()
        return frames

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
