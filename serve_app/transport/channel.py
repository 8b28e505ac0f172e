"""The router's side of a channel: one stream from one engine replica, demultiplexed to its requests.

Invariant: every submitted request ends exactly once, by its last frame or by an error. The channel stays open while a
request needs it; it closes `IDLE_CLOSE_S` after the last one, or at once when the replica leaves Serve's set and no
request runs. A request needs the channel from before the attach until its last frame has arrived, however slowly its
client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError
from serve_app.ray_adapter import CALL_ERRORS, Handle, in_fresh_context
from serve_app.transport.messages import Submit, batch_decoder
from serve_app.transport.stream import ResponseStream, UnreadBytes

logger = logging.getLogger("ray.serve")
CHANNEL_ERRORS: tuple[type[BaseException], ...] = (*CALL_ERRORS, EngineUnreachable)

IDLE_CLOSE_S = 1.0  # Serve waits for open calls when it drains: an idle channel must not delay that
ATTACH_TIMEOUT_S = 10.0  # a local attach takes 2 ms; Serve retries an unreachable replica without end
SUBMIT_ARRIVAL_S = 5.0  # a call older than this has arrived: Serve needs milliseconds, a busy router one or two seconds


class _ChannelRequest:
    """A request on a replica: its stream, and the unary call that keeps it alive there."""

    __slots__ = ("_submitted_at", "_task", "on_end", "on_tokens", "stream")

    def __init__(
        self,
        on_end: Callable[[], None],
        on_tokens: Callable[[int], None] | None,
        unread: UnreadBytes,
        on_unread_abort: Callable[[], None],
    ) -> None:
        self.stream = ResponseStream(unread, on_unread_abort)
        self.on_end = on_end
        self.on_tokens = on_tokens
        self._task: asyncio.Task[Any] | None = None
        self._submitted_at = 0.0

    def submit(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[Any]:
        self._submitted_at = asyncio.get_running_loop().time()
        self._task = in_fresh_context(coroutine, name)
        return self._task

    def is_received(self) -> bool:
        """Whether the replica has certainly received the request."""
        waited_s = asyncio.get_running_loop().time() - self._submitted_at
        return self.stream.has_begun or (self._task is not None and waited_s > SUBMIT_ARRIVAL_S)

    def abort(self) -> None:
        """Cancel the call on the replica, unless it is done or its last frame has arrived."""
        if self._task is not None and not self._task.done() and not self.stream.is_finished:
            self._task.cancel()


class Channel:
    """All requests of this router on one engine replica.

    Args:
        handle: how the replica is called.
        router_id: this router's name, unique for its process's life.
        replica_id: the engine replica.
        numbers: numbers for requests; no number repeats among this router's requests on this replica.
        on_slots: called with the replica's slots when the channel is attached, and with 0 when the replica drains.
        unread: counts unread bytes of all requests of this router.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        replica_id: str,
        numbers: Iterator[int],
        on_slots: Callable[[int], None],
        unread: UnreadBytes | None = None,
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self.replica_id = replica_id
        self._numbers = numbers
        self._on_slots = on_slots
        self._unread = UnreadBytes() if unread is None else unread
        self.requests: dict[int, _ChannelRequest] = {}  # those that need the channel
        self.tasks: set[asyncio.Task[Any]] = set()  # strong references: the event loop keeps weak ones only
        self._reader: asyncio.Task[Any] | None = None
        self._attached: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._retired = False

    @contextlib.asynccontextmanager
    async def run(
        self,
        make: Callable[[int], Submit],
        on_end: Callable[[], None],
        on_tokens: Callable[[int], None] | None = None,
    ) -> AsyncIterator[ResponseStream]:
        """Submit a request; its stream ends with the block, and leaving the block early aborts it on the replica.

        Args:
            make: makes the request from its number.
            on_end: called at most once, if the replica is done with the request before the block ends: the last frame
                has arrived, or the client is too far behind and the request was aborted.
            on_tokens: called with the number of tokens that the engine has produced since the last call.

        Raises:
            EngineFailed: the replica cannot be reached.
        """
        number = next(self._numbers)
        call = self.requests[number] = _ChannelRequest(
            on_end, on_tokens, self._unread, lambda: self._abort_unread(number)
        )
        try:
            await self._attach()
            task = call.submit(self._submit(make(number), call.stream), f"submit-{number}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            yield call.stream
        finally:
            call.abort()
            call.stream.clear()
            if self.requests.pop(number, None) is not None:
                self._close_when_idle()

    async def _submit(self, submit: Submit, stream: ResponseStream) -> None:
        """The unary call. If it ends without a last frame, it ends the stream: its reader would wait for ever."""
        try:
            await self._handle.call("submit", self._router_id, submit, replica_id=self.replica_id)
        except ServeAppError as error:
            stream.fail(error)
        except CALL_ERRORS as error:
            stream.fail(EngineFailed(f"engine replica {self.replica_id} failed: {_brief(error)}"), connection_lost=True)
        except asyncio.CancelledError:  # ours, or one that happened on the replica: Serve passes that on as it is
            stream.fail(EngineFailed(f"engine replica {self.replica_id} dropped the request"))
            raise
        except Exception as error:
            logger.exception("engine replica %s failed a request", self.replica_id)
            stream.fail(EngineFailed(f"engine replica {self.replica_id} failed: {_brief(error)}"))

    async def _attach(self) -> None:
        """Wait until the channel stands, opening it if need be."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._reader is None or self._reader.done():
            self._attached = asyncio.get_running_loop().create_future()
            self._reader = in_fresh_context(self._read(self._attached), f"channel-{self.replica_id}")
        attached = self._attached
        assert attached is not None
        if attached.done():
            return attached.result()
        try:
            return await asyncio.wait_for(asyncio.shield(attached), ATTACH_TIMEOUT_S)
        except TimeoutError:
            if attached.done():  # answered in this same turn: the channel may carry requests already
                return attached.result()
            reason = f"engine replica {self.replica_id} does not answer"
            if self._attached is attached:
                self._drop(reason)
            raise EngineUnreachable(reason) from None

    async def _read(self, attached: asyncio.Future[None]) -> None:
        """Read the channel until it ends; then fail all its requests."""
        reason = f"the channel to engine replica {self.replica_id} broke"
        try:
            arrived = functools.partial(self._on_message, attached)
            await self._handle.attach(self._router_id, arrived, replica_id=self.replica_id)
        except CHANNEL_ERRORS as failure:
            reason = f"{reason}: {_brief(failure)}"
            logger.warning("%s", reason)
        finally:
            if self._attached is attached:  # else it was dropped, and `requests` belongs to a later channel
                calls, self.requests = self.requests, {}  # a later channel cannot continue them: frames are lost
                for call in calls.values():
                    call.stream.fail(EngineFailed(reason), connection_lost=True)
                    call.abort()
                self._drop(reason)

    def _on_message(self, attached: asyncio.Future[None], message: bytes) -> None:
        if self._attached is not attached:
            return  # a late message of a dropped channel
        if not attached.done():
            attached.set_result(None)  # the first message has the slots
        self._dispatch(message)

    def _dispatch(self, message: bytes) -> None:
        batch = batch_decoder.decode(message)
        now = time.monotonic()
        if batch.slots:
            self._on_slots(max(0, batch.slots))
        for frame in batch.frames:
            call = self.requests.get(frame.number)
            if call is None:
                continue
            if frame.groups:
                tokens = sum(map(len, frame.groups)) - len(frame.groups)
                call.stream.tokens += tokens
                call.stream.pace.on_tokens(now)
                if call.on_tokens is not None:
                    call.on_tokens(tokens)
            fits = call.stream.push(frame)
            if not (fits or call.stream.is_finished):
                call.stream.fail(EngineFailed("the client reads too slowly", code="slow_client"))
                call.abort()
            if (not fits or call.stream.is_finished) and self.requests.pop(frame.number, None) is not None:
                call.on_end()
                self._close_when_idle()

    def _abort_unread(self, number: int) -> None:
        """End a request that has the most unread bytes while there are too many."""
        call = self.requests.pop(number, None)
        if call is not None:
            call.abort()
            call.on_end()
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self.requests or self._reader is None:
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        delay_s = 0.0 if self._retired else IDLE_CLOSE_S
        self._idle_timer = asyncio.get_running_loop().call_later(delay_s, self._close)

    def _close(self) -> None:
        self._idle_timer = None
        if not self.requests and self._reader is not None:
            self._drop("closed")

    def _drop(self, reason: str) -> None:
        """Drop the present reader, whether it runs or has just ended."""
        reader, attached, self._reader, self._attached = self._reader, self._attached, None, None
        if attached is not None and not attached.done():
            attached.set_exception(EngineUnreachable(reason))
            attached.exception()  # mark as retrieved: perhaps no request waits for it any more
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        for task in list(self.tasks):  # calls of ended requests: Serve may still look for a replica that has left
            task.cancel()

    def retire(self) -> None:
        """The replica has left Serve's set: finish the running requests, then close at once.

        Serve sends no more calls to it, so a request that it may not have received must go to another replica.
        """
        self._retired = True
        reason = f"engine replica {self.replica_id} has left"
        for call in self.requests.values():
            if not call.is_received():
                call.stream.fail(EngineUnreachable(reason))
        if self._attached is not None and not self._attached.done():
            self._drop(reason)
        self._close_when_idle()

    def restore(self) -> None:
        """The replica is back in Serve's set."""
        self._retired = False

    @property
    def is_busy(self) -> bool:
        """Whether a request of this router runs there or is on its way."""
        return bool(self.requests)

    @property
    def is_open(self) -> bool:
        """Whether the channel is open (and so counts as one ongoing call of the replica)."""
        return self._reader is not None and not self._reader.done()


def _brief(error: BaseException) -> str:
    """The first line of an error: Ray's errors contain whole tracebacks."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
