"""The frames of one request as they arrive at a router, and the unread bytes of all requests.

Invariant: frames are delivered in order, events of a stream whole; a failed stream first delivers what has arrived
whole before the failure, so that `produced` is then the record of all that its reader got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.continuation import Produced
from serve_app.core.receipts import TokenPace
from serve_app.errors import EngineFailed, ServeAppError
from serve_app.transport.messages import Frame, TokenUsage

MAX_BUFFERED_BYTES = 16 * 2**20  # per request, for a client that does not read; about 60,000 chat chunks
MAX_UNREAD_BYTES = 256 * 2**20  # of all requests of a router: sixteen clients that do not read at all


class UnreadBytes:
    """The unread bytes of all requests of one router. Above `max_bytes`, the requests with the most unread bytes end,
    one by one: backpressure would delay all other requests on their channel."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.bytes = 0
        self.ended_requests = 0  # counter
        self.streams: set[ResponseStream] = set()  # those of requests that have not ended
        self._max_bytes = max_bytes

    def add(self, more: int) -> None:
        """Count more unread bytes."""
        self.bytes += more
        while self.bytes > self._max_bytes:
            self.ended_requests += 1
            max(self.streams, key=lambda stream: stream.buffered).abort_unread()


@dataclass(slots=True, eq=False)
class ResponseStream:
    """The frames of one request, in order, as they arrive.

    Args:
        unread: counts this stream's unread bytes.
        on_unread_abort: called when the stream was ended because of too many unread bytes.
        on_end, on_tokens: see `Channel.run`, which calls them.
        produced: by the request's runs so far, this one included.
        pace: arrival times of the tokens, however the client reads; of these runs, too.
        prompt: tokens of the prompt, from the first frame of a stream's first run.
        fingerprint: of the replica that runs it (`Batch`).
        stop: asks the replica to stop the request; it then fails with the code `STOPPED`.
    """

    unread: UnreadBytes
    on_unread_abort: Callable[[], None]
    on_end: Callable[[], None]
    on_tokens: Callable[[int], None] | None = None
    produced: Produced = field(default_factory=Produced)
    pace: TokenPace = field(default_factory=TokenPace)
    prompt: TokenUsage | None = None
    fingerprint: str | None = None
    stop: Callable[[], None] = lambda: None
    media: str = ""  # of its first frame
    client_has_seen: bool = False  # whether any of it was sent to the client; set by the stream's reader
    usage: TokenUsage | None = None  # comes with the last frame
    connection_lost: bool = False  # whether it failed because the connection to the replica broke
    buffered: int = 0  # bytes of the unread frames
    whole_frames: list[Frame] = field(default_factory=list)  # up to the last one that ends an event
    _parts: list[Frame] = field(default_factory=list)  # after them: of a frame that was too long, without its end
    error: ServeAppError | None = None  # why it failed
    _waiter: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.unread.streams.add(self)

    @property
    def tokens(self) -> int:
        """Output tokens received, of all runs so far."""
        return self.produced.tokens

    @property
    def can_be_continued(self) -> bool:
        """Whether another run can continue what this one has produced: the client has a part, or it was no stream and
        has told all that it had."""
        return self.client_has_seen or (self.tokens > 0 and not self.produced.events)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes: the last frame has arrived, or it has failed."""
        return self.usage is not None or self.error is not None

    def push(self, frame: Frame) -> bool:
        """Add a frame; returns False if the client is too far behind. A frame after `fail` is dropped, since
        frames before it may be missing."""
        if self.error is not None:
            return True
        if frame.status:
            self.media = frame.media
        if frame.body or frame.status or frame.usage is not None:
            self.usage = frame.usage
            self.buffered += len(frame.body)
            self._parts.append(frame)
            if frame.events or frame.usage is not None or not frame.body or self.media != "sse":
                self.whole_frames += self._parts
                self._parts.clear()
                self._wake()
        if frame.failure is not None:
            self.fail(frame.failure.error())
        self.unread.add(len(frame.body))
        return self.buffered <= MAX_BUFFERED_BYTES

    def fail(self, error: ServeAppError, *, connection_lost: bool = False) -> None:
        """End the stream with an error; what has arrived whole is delivered first."""
        if self.error is None:
            self._drop(self._parts)
            self.error = error
            self.connection_lost = connection_lost
            self._wake()

    def clear(self) -> None:
        """Drop the unread frames."""
        self._drop(self.whole_frames)
        self._drop(self._parts)

    def _drop(self, frames: list[Frame]) -> None:
        self._forget(sum(len(frame.body) for frame in frames))
        frames.clear()

    def _forget(self, size: int) -> None:
        """So many bytes are unread no more."""
        self.unread.bytes -= size
        self.buffered -= size

    def close(self) -> None:
        """The request has ended: nobody reads its frames any more."""
        self.clear()
        self.unread.streams.discard(self)

    def abort_unread(self) -> None:
        """End the stream because of too many unread bytes, and drop these; also one that has failed and could
        continue elsewhere, since its client lacks what is dropped."""
        self.clear()
        self.error = None
        self.connection_lost = False
        self.fail(EngineFailed("the client reads too slowly, and the router's buffer is full", code="slow_client"))
        self.on_unread_abort()

    async def next(self) -> list[Frame]:
        """All frames that have arrived since the last call, at least one.

        Raises:
            ServeAppError: the stream has failed.
        """
        if not self.whole_frames:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if not self.whole_frames and self.error is not None:
                raise self.error
        frames, self.whole_frames = self.whole_frames, []
        self._forget(self.buffered - sum(len(frame.body) for frame in self._parts))
        return frames

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
