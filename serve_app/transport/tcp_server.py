"""The engine replica's end of the data path (`serve_app.transport.tcp`): listens on the node's address for routers that
have a ticket, runs their requests, and sends them the frames.

Invariant: a connection without a valid ticket is closed after its first message, which is no longer than a ticket. A
request runs only while its connection and the connection's `hold` call are open; it ends with one last frame, whatever
ends its run, unless its router has cancelled it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from serve_app.core.times import TICKET_LIFE_S
from serve_app.errors import TASK_ENDS, EngineFailed, EngineUnreachable, RequestFailed
from serve_app.ray_adapter import in_fresh_context
from serve_app.transport.frame_batcher import FrameBatcher
from serve_app.transport.messages import (
    NO_SLOTS,
    STOPPED,
    Failure,
    Frame,
    Submit,
    TcpAddress,
    TokenUsage,
    Unsent,
)
from serve_app.transport.tcp import CANCEL, MAX_MESSAGE_BYTES, STOP, SUBMIT, Framing, brief
from serve_app.types import Operation

logger = logging.getLogger("ray.serve")

TICKET_BYTES = 32

_submits = msgspec.msgpack.Decoder(Submit)
_numbers = msgspec.msgpack.Decoder(int)

# Runs one request to its end: puts its frames, the last one with `usage`, or raises.
RunRequest = Callable[[Submit, Callable[[Frame], None]], Awaitable[None]]
# See `EngineBackend.produced`.
AskProduced = Callable[[Submit], Unsent]


class TcpServer:
    """Accepts the connections of routers.

    Args:
        run: runs a request.
        produced: of a request that runs.
        host: the node's address.
    """

    def __init__(self, run: RunRequest, produced: AskProduced, host: str) -> None:
        self.run = run
        self.produced = produced
        self._host = host
        self.slots = 0  # of the engine; routers receive them
        self.fingerprint: str | None = None  # of the engine; sent with the slots
        self.operations: list[str] | None = [one.value for one in Operation]  # that this release knows; sent, too
        self._drained_at: float | None = None  # by the loop's clock, when requests are to continue elsewhere
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self.tickets: dict[bytes, str] = {}
        self.connections: set[_RouterConnection] = set()
        self.by_router: dict[str, _RouterConnection] = {}  # the latest connection of each

    async def issue_ticket(self, router_id: str) -> TcpAddress:
        """Issue a ticket for one connection of this router; starts to listen first.

        Raises:
            EngineUnreachable: the replica is ending. OSError: it cannot listen.
        """
        async with self._starting:
            if self._closed:
                raise EngineUnreachable("this engine replica is ending")
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _RouterConnection(self).framing, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self.tickets[ticket] = router_id
        asyncio.get_running_loop().call_later(TICKET_LIFE_S, self.tickets.pop, ticket, None)
        return TcpAddress(self._host, port, ticket)

    async def hold(self, ticket: bytes) -> None:
        """Wait until the connection that this ticket has opened ends; cancelling this ends it, and no later one of its
        router.

        Raises:
            EngineUnreachable: there is no such connection.
        """
        connection = next((one for one in self.connections if one.ticket == ticket), None)
        if connection is None:
            raise EngineUnreachable("this replica has no connection of that ticket")
        try:
            await asyncio.shield(connection.ended)
        finally:
            connection.framing.abort()

    def set_slots(self, slots: int) -> None:
        """Change the slots, and send them to all routers."""
        self.slots = slots
        for connection in self.by_router.values():
            self.send_slots(connection.batcher)

    def drain(self, within_s: float) -> None:
        """Take no more requests; the routers stop those that still run after this time, to continue elsewhere."""
        self._drained_at = asyncio.get_running_loop().time() + within_s
        self.set_slots(NO_SLOTS)

    def tell_first_token(self, request_id: str, prompt: TokenUsage) -> None:
        """Tell the router of a running request that it has its first token (`EngineBackend.report_first_tokens`)."""
        for connection in self.connections:
            for number, running in connection.requests.items():
                if running.submit.request_id == request_id:
                    connection.batcher.put(Frame(number, b"", prompt=prompt))

    def send_slots(self, batcher: FrameBatcher) -> None:
        drained_at = self._drained_at
        left_s = None if drained_at is None else max(0.0, drained_at - asyncio.get_running_loop().time())
        batcher.set_slots(self.slots, left_s, self.fingerprint, self.operations)

    @property
    def requests(self) -> list[asyncio.Task[None]]:
        """The requests that run."""
        return [request.task for connection in self.connections for request in connection.requests.values()]

    @property
    def load(self) -> int:
        """How many of them count for the number of replicas."""
        return sum(one.submit.is_load for connection in self.connections for one in connection.requests.values())

    async def close(self) -> None:
        """Stop listening, and end every connection with its requests."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                self._server.close()
        for connection in list(self.connections):
            connection.close()


class _RunningSubmit(NamedTuple):
    submit: Submit
    task: asyncio.Task[None]


class _RouterConnection:
    """One connection: first a ticket, then requests from the router and frames to it."""

    def __init__(self, server: TcpServer) -> None:
        loop = asyncio.get_running_loop()
        self._server = server
        self._router_id: str | None = None
        self.ticket: bytes | None = None  # the one that has opened it
        self.requests: dict[int, _RunningSubmit] = {}  # by number, those that run
        self.ended: asyncio.Future[None] = loop.create_future()
        self.framing = Framing(self._on_message, self._on_lost, TICKET_BYTES, lambda paused: self.batcher.pause(paused))
        self.batcher = FrameBatcher(self.framing.send)
        self._ticket_timer = loop.call_later(TICKET_LIFE_S, self.framing.abort)
        server.connections.add(self)

    def close(self) -> None:
        """End the connection and its requests; bytes that wait are still sent if the other side reads them."""
        self._cancel_all()
        self.framing.close()

    def _on_message(self, message: bytes) -> None:
        if self._router_id is None:
            self._redeem_ticket(message)
            return
        kind = message[:1]
        content = message[1:]
        try:
            if kind == SUBMIT:
                self._submit(_submits.decode(content))
            elif kind == CANCEL:
                self._cancel(_numbers.decode(content))
            elif kind == STOP:
                self._stop(_numbers.decode(content))
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except ValueError as error:  # includes msgspec's errors and that of invalid UTF-8
            logger.error(
                "Router %s sent an invalid message and is cut off: %s. Install one release everywhere",
                self._router_id,
                error,
            )
            self.framing.abort()

    def _redeem_ticket(self, ticket: bytes) -> None:
        router_id = self._server.tickets.pop(ticket, None)
        if router_id is None:
            self.framing.abort()
            return
        self._ticket_timer.cancel()
        self._router_id = router_id
        self.ticket = ticket
        self.framing.limit = MAX_MESSAGE_BYTES
        former = self._server.by_router.get(router_id)
        self._server.by_router[router_id] = self
        if former is not None:  # its router has lost it
            former.framing.abort()
        self._server.send_slots(self.batcher)

    def _submit(self, submit: Submit) -> None:
        if submit.number in self.requests:
            raise ValueError(f"request {submit.number} came twice")
        # A task of its own: each token resumes every Python frame of the task that awaits it.
        task = in_fresh_context(self._run(submit), f"request-{submit.number}")
        self.requests[submit.number] = _RunningSubmit(submit, task)

    async def _run(self, submit: Submit) -> None:
        """Run a request; its failure becomes its last frame."""
        number = submit.number
        is_whole = False
        failure = Failure("the engine ended the request without an answer", RequestFailed.code)

        def put(frame: Frame) -> None:
            nonlocal is_whole
            if number in self.requests:  # vLLM's serving objects turn a cancellation into an answer: "disconnected"
                self.batcher.put(frame)
                is_whole = is_whole or frame.usage is not None

        try:
            await self._server.run(submit, put)
        except EngineFailed as error:
            failure = Failure(error.message, error.code, error.retry_after_s)
        except TASK_ENDS:
            failure = Failure("the engine replica dropped the request")
            raise
        except BaseException as error:
            logger.exception(
                "Request %s failed inside the engine replica (traceparent %s). Report this traceback",
                submit.request_id,
                submit.traceparent or "none",
            )
            failure = Failure(f"the engine could not handle this request: {brief(error)}", RequestFailed.code)
        finally:
            if self.requests.pop(number, None) is not None and not is_whole:  # else its router has left it
                self.batcher.put(Frame(number, b"", failure=failure))

    def _cancel(self, number: int) -> None:
        request = self.requests.pop(number, None)
        if request is not None:
            request.task.cancel()

    def _stop(self, number: int) -> None:
        """End a request with what it has produced; one that has ended already has sent its last frame."""
        request = self.requests.get(number)
        if request is not None:
            groups, prompt = self._server.produced(request.submit)
            self._cancel(number)
            failure = Failure("the request was stopped for others, and no replica took it again", STOPPED)
            self.batcher.put(Frame(number, b"", groups=groups, failure=failure, prompt=prompt))

    def _cancel_all(self) -> None:
        for number in list(self.requests):
            self._cancel(number)

    def _on_lost(self) -> None:
        """The connection has ended, from either side."""
        self._ticket_timer.cancel()
        self._cancel_all()
        self._server.connections.discard(self)
        if self._router_id is not None and self._server.by_router.get(self._router_id) is self:
            del self._server.by_router[self._router_id]
        if not self.ended.done():
            self.ended.set_result(None)
