"""The engine replica's end of the data path (`serve_app.transport.tcp`): listens on the node's address for routers that
have a ticket.

Invariant: a connection without a valid ticket is closed after its first message, which is no longer than a ticket. The
requests submitted over a connection are cancelled as soon as its end is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from typing import Any, Protocol

import msgspec

from serve_app.errors import EngineUnreachable
from serve_app.ray_adapter import in_fresh_context
from serve_app.transport.messages import Submit, TcpAddress
from serve_app.transport.tcp import CANCEL, MAX_MESSAGE_BYTES, SUBMIT, Framing

logger = logging.getLogger("ray.serve")

TICKET_BYTES = 32
TICKET_LIFE_S = 10.0  # the router connects as soon as it has the ticket
HOLD_WAIT_S = 5.0  # a submit and its `hold` call leave the router in one turn, over two connections

_submits = msgspec.msgpack.Decoder(Submit)
_numbers = msgspec.msgpack.Decoder(int)


class RequestHandler(Protocol):
    """The methods of the engine replica that the server calls."""

    def attach(self, router_id: str, replica_id: str) -> Any:
        """The encoded messages to one router."""
        ...

    async def submit(self, router_id: str, submit: Submit, replica_id: str) -> None:
        """Run one request."""
        ...


class TcpServer:
    """Accepts the connections of routers.

    Args:
        handler: the engine replica.
        host: the node's address.
    """

    def __init__(self, handler: RequestHandler, host: str) -> None:
        self.handler = handler
        self._host = host
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

    async def hold(self, router_id: str, number: int) -> None:
        """Wait for a request's end; cancelling this cancels the request.

        Raises:
            EngineUnreachable: the request never arrived. EngineFailed: as `submit`.
        """
        router = self.by_router.get(router_id)
        if router is None:
            raise EngineUnreachable(f"router {router_id} has no channel to this replica")
        await router.hold(number)

    async def close(self) -> None:
        """Stop listening, and end every connection with its requests."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                self._server.close()
        for visitor in list(self.connections):
            visitor.close()

    def add_connection(self, connection: _RouterConnection) -> None:
        """Register a new connection."""
        self.connections.add(connection)

    def redeem_ticket(self, ticket: bytes, connection: _RouterConnection) -> str | None:
        """Use a ticket up; returns its router, whose connection this is from now on. None: an invalid ticket."""
        router_id = self.tickets.pop(ticket, None)
        if router_id is not None:
            self.by_router[router_id] = connection
        return router_id

    def remove_connection(self, connection: _RouterConnection, router_id: str | None) -> None:
        """Remove an ended connection; its router may have a later one."""
        self.connections.discard(connection)
        if router_id is not None and self.by_router.get(router_id) is connection:
            del self.by_router[router_id]


class _RouterConnection:
    """One connection: first a ticket, then requests from the router and frames to it."""

    def __init__(self, server: TcpServer) -> None:
        self._server = server
        self._router_id: str | None = None
        self._sender: asyncio.Task[None] | None = None
        self.running: dict[int, asyncio.Task[None]] = {}  # by number, until `hold` returns or the router cancels
        self.awaited: dict[int, asyncio.Future[asyncio.Task[None]]] = {}  # of `hold` calls before their requests
        self.framing = Framing(self._on_message, self._on_lost, limit=TICKET_BYTES)
        self._ticket_timer = asyncio.get_running_loop().call_later(TICKET_LIFE_S, self.framing.abort)
        server.add_connection(self)

    async def hold(self, number: int) -> None:
        """See `TcpServer.hold`."""
        run = self.running.get(number)
        if run is None:
            arrival = self.awaited[number] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(HOLD_WAIT_S):
                    run = await arrival
            except TimeoutError:
                raise EngineUnreachable(f"request {number} of router {self._router_id} did not arrive") from None
            finally:
                self.awaited.pop(number, None)
        try:
            await run
        finally:
            self.running.pop(number, None)

    def close(self) -> None:
        """End the connection; waiting bytes are still sent if the other side reads them."""
        if self._sender is None:
            self.framing.abort()
        else:
            self._sender.cancel()

    def _on_message(self, message: bytes) -> None:
        if self._router_id is None:
            self._redeem_ticket(message)
            return
        kind, content = message[:1], message[1:]
        try:
            if kind == SUBMIT:
                self._submit(_submits.decode(content))
            elif kind == CANCEL:
                self._cancel(_numbers.decode(content))
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except ValueError as error:  # includes msgspec's errors and that of invalid UTF-8
            logger.error("router %s sent an invalid message: %s", self._router_id, error)
            self.framing.abort()

    def _redeem_ticket(self, ticket: bytes) -> None:
        self._router_id = self._server.redeem_ticket(ticket, self)
        if self._router_id is None:
            self.framing.abort()
            return
        self._ticket_timer.cancel()
        self.framing.limit = MAX_MESSAGE_BYTES
        # In contexts of their own: this context is that of the call that first requested a ticket.
        self._sender = in_fresh_context(self._send(self._router_id), f"tcp-sender-{self._router_id}")
        self._sender.add_done_callback(self._on_sender_done)

    def _submit(self, submit: Submit) -> None:
        number = submit.number
        if number in self.running:
            raise ValueError(f"request {number} came twice")
        assert self._router_id is not None
        run = in_fresh_context(self._server.handler.submit(self._router_id, submit, ""), f"request-{number}")
        self.running[number] = run
        arrival = self.awaited.get(number)
        if arrival is not None and not arrival.done():
            arrival.set_result(run)

    def _cancel(self, number: int) -> None:
        """Cancel a request for which the router no longer waits and which no `hold` call holds."""
        run = self.running.pop(number, None)
        if run is not None:
            run.cancel()

    async def _send(self, router_id: str) -> None:
        """Send the router's messages while the connection is open and no later connection takes over."""
        async with contextlib.aclosing(self._server.handler.attach(router_id, "")) as messages:
            async for message in messages:
                self.framing.send(message)
                await self.framing.wait_writable()

    def _on_sender_done(self, pump: asyncio.Task[None]) -> None:
        """The connection has ended, from either side: cancel its requests."""
        if not pump.cancelled() and (error := pump.exception()) is not None:
            logger.error("the channel to router %s broke", self._router_id, exc_info=error)
        self.framing.close()
        self._server.remove_connection(self, self._router_id)
        runs, self.running = self.running, {}
        for run in runs.values():
            run.cancel()

    def _on_lost(self) -> None:
        self._ticket_timer.cancel()
        if self._sender is None:
            self._server.remove_connection(self, None)
        else:
            self._sender.cancel()
