"""The router's side of a channel: one stream from one engine replica, demultiplexed to the requests that wait on it.

Invariant: every call handed in ends exactly once, by its last frame or by an error; the channel stands while a call
needs it, is closed `IDLE_CLOSE_S` after the last one, and at once when the replica leaves Serve's set and nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from serve_app.engine.protocol import Frame, Submit, batch_decoder
from serve_app.errors import EngineFailed, ServeAppError
from serve_app.serve_adapter import CALL_ERRORS, EngineHandle, in_fresh_context

logger = logging.getLogger("ray.serve")

IDLE_CLOSE_S = 1.0  # Serve waits for open calls when it drains: an idle channel must not hold that up
ATTACH_TIMEOUT_S = 10.0  # a local attach takes 2 ms; Serve retries an unreachable replica without end
MAX_BUFFERED_BYTES = 16 * 2**20  # per request, for a client that does not read; about 60,000 chat chunks


class Stream:
    """The frames of one request, in order, as they arrive."""

    __slots__ = ("_buffered", "_error", "_frames", "_waiter", "finished")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._buffered = 0
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.finished = False  # whether the last frame has arrived

    def push(self, frame: Frame) -> bool:
        """Add a frame. Returns False when the consumer is too far behind to go on."""
        self.finished = frame.usage is not None
        self._frames.append(frame)
        self._buffered += len(frame.body)
        self._wake()
        return self._buffered <= MAX_BUFFERED_BYTES

    def fail(self, error: BaseException) -> None:
        """End the stream; frames that have arrived are still delivered first."""
        if self._error is None:
            self._error = error
            self._wake()

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
        frames, self._frames = self._frames, []
        self._buffered = 0
        return frames

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Channel:
    """All requests of this router on one engine replica.

    Args:
        handle: how the replica is called.
        router_id: this router's name, unique for its process's life.
        replica_id: the engine replica.
        on_slots: called with this router's share of the replica's batch whenever the replica changes it.
    """

    def __init__(self, handle: EngineHandle, router_id: str, replica_id: str, on_slots: Callable[[int], None]) -> None:
        self._handle = handle
        self._router_id = router_id
        self.replica_id = replica_id
        self._on_slots = on_slots
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._reader: asyncio.Task[Any] | None = None
        self._attached: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._retired = False
        self._next_number = 0

    @contextlib.asynccontextmanager
    async def run(self, make: Callable[[int], Submit]) -> AsyncIterator[Stream]:
        """Hand a request in; its stream ends with the block, and leaving the block early aborts it on the replica.

        Raises:
            EngineFailed: the replica cannot be reached.
        """
        await self._attach()
        self._next_number += 1
        number = self._next_number
        stream = self._streams[number] = Stream()
        call = self._calls[number] = in_fresh_context(self._submit(make(number), stream), f"submit-{number}")
        try:
            yield stream
        finally:
            self._streams.pop(number, None)
            self._calls.pop(number, None)
            if not call.done() and not stream.finished:
                call.cancel()
            self._close_when_idle()

    async def _submit(self, submit: Submit, stream: Stream) -> None:
        try:
            await self._handle.call("submit", self._router_id, submit, replica_id=self.replica_id)
        except ServeAppError as error:
            stream.fail(error)
        except CALL_ERRORS as error:
            stream.fail(EngineFailed(f"engine replica {self.replica_id} failed: {_brief(error)}"))

    async def _attach(self) -> None:
        """Wait until the channel stands, opening it if need be."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._reader is None or self._reader.done():
            self._attached = asyncio.get_running_loop().create_future()
            self._reader = in_fresh_context(self._read(self._attached), f"channel-{self.replica_id}")
        assert self._attached is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._attached), ATTACH_TIMEOUT_S)
        except TimeoutError:
            raise EngineFailed(f"engine replica {self.replica_id} does not answer", code="no_channel") from None

    async def _read(self, attached: asyncio.Future[None]) -> None:
        """Demultiplex the channel until it ends; then no request on it can go on."""
        error: BaseException = EngineFailed(f"the channel to engine replica {self.replica_id} broke")
        try:
            async with contextlib.aclosing(
                self._handle.stream("attach", self._router_id, replica_id=self.replica_id)
            ) as messages:
                async for message in messages:
                    if not attached.done():
                        attached.set_result(None)  # the first message tells our share
                    self._dispatch(message)
        except CALL_ERRORS as failure:
            error = EngineFailed(f"the channel to engine replica {self.replica_id} broke: {_brief(failure)}")
            logger.warning("%s", error)
        finally:
            if not attached.done():
                attached.set_exception(error)
                attached.exception()  # retrieved here: nobody may be waiting any more
            for stream in list(self._streams.values()):
                stream.fail(error)

    def _dispatch(self, message: bytes) -> None:
        batch = batch_decoder.decode(message)
        if batch.slots:
            self._on_slots(batch.slots)
        for frame in batch.frames:
            stream = self._streams.get(frame.number)
            if stream is not None and not stream.push(frame):
                stream.fail(EngineFailed("the client reads too slowly", code="slow_client"))

    def _close_when_idle(self) -> None:
        if self._streams or self._reader is None:
            return
        if self._idle is not None:
            self._idle.cancel()
        delay_s = 0.0 if self._retired else IDLE_CLOSE_S
        self._idle = asyncio.get_running_loop().call_later(delay_s, self._close)

    def _close(self) -> None:
        self._idle = None
        if not self._streams and self._reader is not None:
            self._reader.cancel()
            self._reader = None

    def retire(self) -> None:
        """The replica has left Serve's set: finish what runs, then close at once."""
        self._retired = True
        self._close_when_idle()

    @property
    def busy(self) -> bool:
        """Whether a request of ours runs there."""
        return bool(self._streams)

    @property
    def open(self) -> bool:
        """Whether the channel stands (and so counts as one ongoing call of the replica)."""
        return self._reader is not None and not self._reader.done()


def _brief(error: BaseException) -> str:
    """The first line of an error: Ray's carry whole tracebacks."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
