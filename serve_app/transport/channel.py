"""The router's side of a channel: one stream from one engine replica, demultiplexed to the requests that wait on it.

Invariant: every call handed in ends exactly once, by its last frame or by an error; the channel stands while a call
needs it, is closed `IDLE_CLOSE_S` after the last one, and at once when the replica leaves Serve's set and nothing runs.
A call needs it from before the channel is attached until its last frame has arrived, however slowly its client reads.
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
from serve_app.transport.stream import Stream, Unread

logger = logging.getLogger("ray.serve")
CHANNEL_ERRORS: tuple[type[BaseException], ...] = (*CALL_ERRORS, EngineUnreachable)

IDLE_CLOSE_S = 1.0  # Serve waits for open calls when it drains: an idle channel must not hold that up
ATTACH_TIMEOUT_S = 10.0  # a local attach takes 2 ms; Serve retries an unreachable replica without end
HANDOVER_S = 5.0  # Serve sends a call on within ms, a busy router within a second or two: an older one has arrived


class _Call:
    """A request on its way: its stream, and the unary call that keeps it alive on the replica."""

    __slots__ = ("_handed_in_s", "_task", "on_end", "on_tokens", "stream")

    def __init__(
        self,
        on_end: Callable[[], None],
        on_tokens: Callable[[int], None] | None,
        unread: Unread,
        cut: Callable[[], None],
    ) -> None:
        self.stream = Stream(unread, cut)
        self.on_end = on_end
        self.on_tokens = on_tokens
        self._task: asyncio.Task[Any] | None = None
        self._handed_in_s = 0.0

    def hand_in(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[Any]:
        self._handed_in_s = asyncio.get_running_loop().time()
        self._task = in_fresh_context(coroutine, name)
        return self._task

    def surely_there(self) -> bool:
        """Whether the replica has the request beyond doubt."""
        waited_s = asyncio.get_running_loop().time() - self._handed_in_s
        return self.stream.begun or (self._task is not None and waited_s > HANDOVER_S)

    def abort(self) -> None:
        """End the call on the replica unless it is over, or as good as over."""
        if self._task is not None and not self._task.done() and not self.stream.finished:
            self._task.cancel()


class Channel:
    """All requests of this router on one engine replica.

    Args:
        handle: how the replica is called.
        router_id: this router's name, unique for its process's life.
        replica_id: the engine replica.
        numbers: numbers for requests; none is given twice to this router's requests on this replica.
        on_slots: called with the slots of the replica when the channel stands, and with 0 when it drains.
        unread: what all requests of this router have not read.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        replica_id: str,
        numbers: Iterator[int],
        on_slots: Callable[[int], None],
        unread: Unread | None = None,
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self.replica_id = replica_id
        self._numbers = numbers
        self._on_slots = on_slots
        self._unread = Unread() if unread is None else unread
        self._calls: dict[int, _Call] = {}  # those that need the channel
        self._tasks: set[asyncio.Task[Any]] = set()  # the event loop itself refers to tasks weakly
        self._reader: asyncio.Task[Any] | None = None
        self._attached: asyncio.Future[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._retired = False

    @contextlib.asynccontextmanager
    async def run(
        self,
        make: Callable[[int], Submit],
        on_end: Callable[[], None],
        on_tokens: Callable[[int], None] | None = None,
    ) -> AsyncIterator[Stream]:
        """Hand a request in; its stream ends with the block, and leaving the block early aborts it on the replica.

        Args:
            make: the request, with the number it is given.
            on_end: called at most once, when the replica is done with the request and the block is not: the last frame
                has arrived, or the client is too far behind and the request was aborted.
            on_tokens: called with the number of tokens that the engine has produced since the last call.

        Raises:
            EngineFailed: the replica cannot be reached.
        """
        number = next(self._numbers)
        call = self._calls[number] = _Call(on_end, on_tokens, self._unread, lambda: self._cut(number))
        try:
            await self._attach()
            task = call.hand_in(self._submit(make(number), call.stream), f"submit-{number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            yield call.stream
        finally:
            call.abort()
            call.stream.clear()
            if self._calls.pop(number, None) is not None:
                self._close_when_idle()

    async def _submit(self, submit: Submit, stream: Stream) -> None:
        """The unary call. Whatever ends it without a last frame ends the stream, or its reader would wait for ever."""
        try:
            await self._handle.call("submit", self._router_id, submit, replica_id=self.replica_id)
        except ServeAppError as error:
            stream.fail(error)
        except CALL_ERRORS as error:
            stream.fail(EngineFailed(f"engine replica {self.replica_id} failed: {_brief(error)}"), lost=True)
        except asyncio.CancelledError:  # ours, or one that happened on the replica: Serve passes that on as it is
            stream.fail(EngineFailed(f"engine replica {self.replica_id} dropped the request"))
            raise
        except Exception as error:
            logger.exception("engine replica %s failed a request", self.replica_id)
            stream.fail(EngineFailed(f"engine replica {self.replica_id} failed: {_brief(error)}"))

    async def _attach(self) -> None:
        """Wait until the channel stands, opening it if need be."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
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
            if attached.done():  # answered in the very turn: requests may be on their way over it already
                return attached.result()
            reason = f"engine replica {self.replica_id} does not answer"
            if self._attached is attached:
                self._drop(reason)
            raise EngineUnreachable(reason) from None

    async def _read(self, attached: asyncio.Future[None]) -> None:
        """Demultiplex the channel until it ends; then no request on it can go on."""
        reason = f"the channel to engine replica {self.replica_id} broke"
        try:
            arrived = functools.partial(self._arrived, attached)
            await self._handle.attach(self._router_id, arrived, replica_id=self.replica_id)
        except CHANNEL_ERRORS as failure:
            reason = f"{reason}: {_brief(failure)}"
            logger.warning("%s", reason)
        finally:
            if self._attached is attached:  # else it was dropped, and what is in `_calls` belongs to a later one
                calls, self._calls = self._calls, {}  # a later channel must not go on with what has lost frames
                for call in calls.values():
                    call.stream.fail(EngineFailed(reason), lost=True)
                    call.abort()
                self._drop(reason)

    def _arrived(self, attached: asyncio.Future[None], message: bytes) -> None:
        if self._attached is not attached:
            return  # what a dropped channel still brings is for nobody
        if not attached.done():
            attached.set_result(None)  # the first message has the slots
        self._dispatch(message)

    def _dispatch(self, message: bytes) -> None:
        batch = batch_decoder.decode(message)
        now = time.monotonic()
        if batch.slots:
            self._on_slots(max(0, batch.slots))
        for frame in batch.frames:
            call = self._calls.get(frame.number)
            if call is None:
                continue
            if frame.groups:
                tokens = sum(map(len, frame.groups)) - len(frame.groups)
                call.stream.tokens += tokens
                call.stream.pace.came(now)
                if call.on_tokens is not None:
                    call.on_tokens(tokens)
            fits = call.stream.push(frame)
            if not (fits or call.stream.finished):
                call.stream.fail(EngineFailed("the client reads too slowly", code="slow_client"))
                call.abort()
            if (not fits or call.stream.finished) and self._calls.pop(frame.number, None) is not None:
                call.on_end()
                self._close_when_idle()

    def _cut(self, number: int) -> None:
        """Too much is unread, and of this request most."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.abort()
            call.on_end()
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._calls or self._reader is None:
            return
        if self._idle is not None:
            self._idle.cancel()
        delay_s = 0.0 if self._retired else IDLE_CLOSE_S
        self._idle = asyncio.get_running_loop().call_later(delay_s, self._close)

    def _close(self) -> None:
        self._idle = None
        if not self._calls and self._reader is not None:
            self._drop("closed")

    def _drop(self, reason: str) -> None:
        """Be done with the present reader, whether it runs or has just ended."""
        reader, attached, self._reader, self._attached = self._reader, self._attached, None, None
        if attached is not None and not attached.done():
            attached.set_exception(EngineUnreachable(reason))
            attached.exception()  # retrieved here: nobody may be waiting any more
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        for task in list(self._tasks):  # of requests that are over, and yet Serve may look for a replica that has left
            task.cancel()

    def retire(self) -> None:
        """The replica has left Serve's set: finish what runs, then close at once.

        Serve sends nothing more to it, so a request that may still be on its way there has to go elsewhere.
        """
        self._retired = True
        reason = f"engine replica {self.replica_id} has left"
        for call in self._calls.values():
            if not call.surely_there():
                call.stream.fail(EngineUnreachable(reason))
        if self._attached is not None and not self._attached.done():
            self._drop(reason)
        self._close_when_idle()

    def restore(self) -> None:
        """The replica is back in Serve's set."""
        self._retired = False

    @property
    def busy(self) -> bool:
        """Whether a request of ours runs there, or is on its way."""
        return bool(self._calls)

    @property
    def open(self) -> bool:
        """Whether the channel stands (and so counts as one ongoing call of the replica)."""
        return self._reader is not None and not self._reader.done()


def _brief(error: BaseException) -> str:
    """The first line of an error: Ray's carry whole tracebacks."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
