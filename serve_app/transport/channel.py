"""The router's side of a channel: one connection to one engine replica, demultiplexed to its requests.

Invariant: every submitted request ends exactly once, by its last frame or by an error. The channel stays open while a
request needs it; it closes `IDLE_CLOSE_S` after the last one, or at once when the replica leaves Serve's set and no
request runs. A request needs the channel from before the attach until its last frame has arrived, however slowly its
client reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from serve_app.core.routing import FirstFrames, is_to_be_asked
from serve_app.core.times import CHANNEL_ATTACH_S, IDLE_CLOSE_S, SILENCE_CHECK_S, SILENCE_FLOOR_S
from serve_app.errors import EngineFailed, EngineUnreachable, OperationUnknown
from serve_app.ray_adapter import Handle, in_fresh_context
from serve_app.transport.messages import Submit, batch_decoder
from serve_app.transport.stream import ResponseStream, UnreadBytes
from serve_app.transport.tcp import CHANNEL_ERRORS, ReplicaConnection, brief
from serve_app.types import FIRST_OPERATIONS, Operation

logger = logging.getLogger("ray.serve")


@dataclass(slots=True, eq=False)
class Channel:
    """All requests of this router on one engine replica.

    Args:
        handle: makes Serve's calls of the replica.
        router_id: this router's name, unique for its process's life.
        replica_id: the engine replica.
        numbers: numbers for requests; no number repeats among this router's requests on this replica.
        on_slots: called with the replica's slots when the channel is attached, and with 0 when the replica drains; then
            also with the seconds after which its requests are to continue elsewhere, if it says them.
        unread: counts unread bytes of all requests of this router.
        may_break: whether the requests could run on another replica, if this one is silent (`core.routing.silence`).
    """

    handle: Handle
    router_id: str
    replica_id: str
    numbers: Iterator[int]
    on_slots: Callable[[int, float | None], None]
    unread: UnreadBytes = field(default_factory=UnreadBytes)
    may_break: Callable[[], bool] = lambda: False
    first_frames: FirstFrames = field(default_factory=FirstFrames)  # of streams
    # by number, those that run there or are on their way: they need the channel
    requests: dict[int, ResponseStream] = field(default_factory=dict)
    fingerprint: str | None = None  # of the replica (`Batch`), as of its last connection
    operations: frozenset[str] | None = None  # that the replica knows; None: it was never connected
    connection: ReplicaConnection | None = None  # open, or being opened: an ongoing call of the replica
    _attached: asyncio.Future[None] | None = None  # done once the connection's first message is there
    _opening: asyncio.Task[None] | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _silence_timer: asyncio.TimerHandle | None = None
    _message_at: float = 0.0  # of its last message, or of the first request of those that run
    _asking: asyncio.Task[None] | None = None  # for a sign of life
    has_no_sign: bool = False  # it was asked for one, and has given none since
    _retired: bool = False

    @contextlib.asynccontextmanager
    async def run(
        self,
        make: Callable[[int], Submit],
        on_end: Callable[[], None],
        on_tokens: Callable[[int], None] | None = None,
        to_continue: ResponseStream | None = None,
    ) -> AsyncIterator[ResponseStream]:
        """Submit a request; its stream ends with the block, and leaving the block early aborts it on the replica.

        Args:
            make: makes the request from its number.
            on_end: called at most once, if the replica is done with the request before the block ends: the last frame
                has arrived, the connection broke, or the client is too far behind and the request was aborted.
            on_tokens: called with the number of tokens that the engine has produced since the last call; with 0 at the
                first token of a whole answer. `stream.prompt` is known by then, if the engine tells it.
            to_continue: the earlier run that this one continues; None: it begins anew.

        Raises:
            EngineFailed: the replica cannot be reached. BodyTooLarge: it does not accept a request of this size.
            OperationUnknown: it is of an earlier release, and would cut off this router with all its requests.
        """
        number = next(self.numbers)
        stream = ResponseStream(self.unread, lambda: self._abort_unread(number), on_end, on_tokens)
        stream.stop = lambda: self._stop(number)
        if to_continue is not None:
            stream.produced = to_continue.produced
            stream.pace = to_continue.pace
            stream.prompt = to_continue.prompt
        if not self.requests:
            self._message_at = time.monotonic()
        self.requests[number] = stream
        connection = None
        try:
            connection = await self._attach()
            stream.fingerprint = self.fingerprint
            submit = make(number)
            self._require_known(submit.operation)
            connection.submit(submit)
            if _has_prompt_first_frame(submit):
                self.first_frames.on_sent(number, submit.prompt_tokens + stream.tokens, time.monotonic())
            self._watch_silence()
            yield stream
        finally:
            stream.close()
            self.first_frames.on_end(number)
            if self.requests.pop(number, None) is not None:
                if connection is not None:
                    connection.cancel(number)
                self._close_when_idle()

    def may_know(self, operation: Operation) -> bool:
        """Whether the replica knows an operation, or has not been asked yet."""
        return self.operations is None or operation in self.operations

    def _require_known(self, operation: Operation) -> None:
        if not self.may_know(operation):
            raise OperationUnknown(
                f"engine replica {self.replica_id} is of an earlier release, and does not know {operation.value!r}"
            )

    async def reach(self) -> None:
        """Return once the replica has accepted a connection; it closes again if no request comes.

        Raises:
            EngineFailed: the replica cannot be reached.
        """
        try:
            await self._attach()
        finally:
            self._close_when_idle()

    async def _attach(self) -> ReplicaConnection:
        """The connection, opened if need be, once the replica has accepted it."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self.connection is None:
            self._open()
        connection = self.connection
        attached = self._attached
        assert connection is not None
        assert attached is not None
        if not attached.done():
            await asyncio.wait({attached}, timeout=CHANNEL_ATTACH_S)
        if not attached.done():
            reason = f"engine replica {self.replica_id} does not answer"
            if self._attached is attached:
                self._drop(reason)
            raise EngineUnreachable(reason)
        attached.result()
        return connection

    def _open(self) -> None:
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._attached = attached

        def on_message(message: bytes) -> None:
            if self._attached is attached:  # else a late message of a dropped channel
                if not attached.done():
                    attached.set_result(None)  # the first message has the slots
                self._dispatch(message)

        def on_end(reason: str) -> None:
            if self._attached is attached:
                self._lose(reason)

        async def open_connection(connection: ReplicaConnection) -> None:
            try:
                await connection.open()
            except BaseException as error:
                on_end(brief(error))  # no effect if it was closed here meanwhile
                if not isinstance(error, CHANNEL_ERRORS):
                    raise

        self.connection = ReplicaConnection(self.handle, self.router_id, self.replica_id, on_message, on_end)
        self._opening = in_fresh_context(open_connection(self.connection), f"channel-{self.replica_id}")

    def _lose(self, why: str) -> None:
        """The connection has ended by itself: a later one cannot continue its requests, since frames are lost."""
        reason = f"the channel to engine replica {self.replica_id} broke: {why}"
        logger.warning(
            "Channel to replica %s broke; its %d requests continue elsewhere or fail: %s",
            self.replica_id,
            len(self.requests),
            why,
        )
        requests, self.requests = self.requests, {}
        self._drop(reason)
        for stream in requests.values():
            stream.fail(EngineFailed(reason), connection_lost=True)
            stream.on_end()

    def _dispatch(self, message: bytes) -> None:
        batch = batch_decoder.decode(message)
        now = self._message_at = time.monotonic()
        self.has_no_sign = False
        if batch.slots:
            self.fingerprint = batch.fingerprint
            self.operations = FIRST_OPERATIONS if batch.operations is None else frozenset(batch.operations)
            self.on_slots(max(0, batch.slots), batch.drain_s)
        for frame in batch.frames:
            stream = self.requests.get(frame.number)
            if stream is None:
                continue
            self.first_frames.on_frame(frame.number, now)
            tokens = stream.produced.add(frame.groups, frame.events)
            stream.prompt = stream.prompt or frame.prompt
            if tokens or frame.tells_first_token:
                stream.pace.on_tokens(now)
                if stream.on_tokens is not None:
                    stream.on_tokens(tokens)
            if not stream.push(frame):
                stream.fail(EngineFailed("the client reads too slowly", code="slow_client"))
                self._cancel(frame.number)
            if stream.is_finished:
                self._end(frame.number)

    def give_up(self, why: str) -> None:
        """The replica will answer no more: its requests are lost, and continue elsewhere."""
        if self.requests:
            self._lose(why)

    def _watch_silence(self) -> None:
        if self._silence_timer is None and self.requests:
            self._silence_timer = asyncio.get_running_loop().call_later(SILENCE_CHECK_S, self._check_silence)

    def _check_silence(self) -> None:
        """Give up a replica that takes requests and answers none: its requests are lost, and continue elsewhere."""
        self._silence_timer = None
        now = time.monotonic()
        if self._attached is not None and self._attached.done():
            if self.first_frames.is_silent(now) and self.may_break():
                self.give_up(f"it takes requests and answers none: {self.first_frames.waiting} wait for a first frame")
            elif not self._retired and self._asking is None and is_to_be_asked(self._message_at, now):
                self._asking = in_fresh_context(self._ask(), f"sign of life of {self.replica_id}")
        self._watch_silence()

    async def _ask(self) -> None:
        """Give up a replica whose process stands still. One that has left Serve's set gets no calls; its drain ends."""
        asked_at = time.monotonic()
        self.has_no_sign = True
        try:
            async with asyncio.timeout(SILENCE_FLOOR_S):
                await self.handle.call("load", replica_id=self.replica_id)
            self.has_no_sign = False
        except TimeoutError:
            # a router that has stood still itself has not read the answer yet
            is_late = time.monotonic() - asked_at > SILENCE_FLOOR_S + SILENCE_CHECK_S
            if self.has_no_sign and not is_late and not self._retired and self.may_break():
                self.give_up("its process stands still")
        except CHANNEL_ERRORS as error:  # its connection ends as well
            self.has_no_sign = False
            logger.info("Replica %s could not be asked for a sign of life: %s", self.replica_id, brief(error))
        finally:
            self._message_at = time.monotonic()  # the next question waits as long as this one did
            self._asking = None

    def _abort_unread(self, number: int) -> None:
        """End a request that has the most unread bytes while there are too many."""
        self._cancel(number)
        self._end(number)

    def _cancel(self, number: int) -> None:
        if number in self.requests and self.connection is not None:
            self.connection.cancel(number)

    def _stop(self, number: int) -> None:
        if number in self.requests and self.connection is not None:
            self.connection.stop(number)

    def _end(self, number: int) -> None:
        """The replica is done with a request."""
        stream = self.requests.pop(number, None)
        if stream is not None:
            stream.on_end()
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self.requests or self.connection is None:
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        delay_s = 0.0 if self._retired else IDLE_CLOSE_S
        self._idle_timer = asyncio.get_running_loop().call_later(delay_s, self._close)

    def _close(self) -> None:
        self._idle_timer = None
        if not self.requests:
            self._drop("closed")

    def _drop(self, reason: str) -> None:
        """Close the present connection, whether it is open or not yet."""
        connection, attached, self.connection, self._attached = self.connection, self._attached, None, None
        self.has_no_sign = False
        if attached is not None and not attached.done():
            attached.set_exception(EngineUnreachable(reason))
            attached.exception()  # mark as retrieved: perhaps no request waits for it any more
        if connection is not None:
            connection.close()
        if self._opening is not None and self._opening is not asyncio.current_task():
            self._opening.cancel()
        self._opening = None

    def retire(self) -> None:
        """The replica has left Serve's set: finish the running requests, then close at once.

        The connection holds up its drain. One that is not accepted yet may never be: Serve sends it no more calls.
        """
        self._retired = True
        if self._attached is not None and not self._attached.done():
            self._drop(f"engine replica {self.replica_id} has left")
        self._close_when_idle()

    def restore(self) -> None:
        """The replica is back in Serve's set."""
        self._retired = False


def _has_prompt_first_frame(submit: Submit) -> bool:
    """Whether its first frame says how fast its engine answers. An answer without a stream may have only its last one,
    and a large request is read before, one at a time, by a process that the first of them starts."""
    return bool(submit.body.get("stream")) and not submit.is_large
