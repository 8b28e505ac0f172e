"""The engine replica's end of the data path (`serve_app.transport.tcp`): listens on the node's address for who has a
ticket.

Invariant: a connection without a valid ticket is cut after its first message, which is no longer than a ticket. What
came over a connection ends with it: its requests are cancelled as soon as its end is seen.
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
from serve_app.transport.messages import Submit, WireAddress
from serve_app.transport.tcp import CANCEL, MAX_MESSAGE_BYTES, SUBMIT, Framing

logger = logging.getLogger("ray.serve")

TICKET_BYTES = 32
TICKET_LIFE_S = 10.0  # the router connects as soon as it has it
HOLD_WAIT_S = 5.0  # a hand-in and the call that holds it leave the router in one turn, over two connections

_submits = msgspec.msgpack.Decoder(Submit)
_numbers = msgspec.msgpack.Decoder(int)


class Requests(Protocol):
    """What the server needs of the engine replica."""

    def attach(self, router_id: str, replica_id: str) -> Any:
        """The messages to one router."""
        ...

    async def submit(self, router_id: str, submit: Submit, replica_id: str) -> None:
        """Run one request."""
        ...


class WireServer:
    """Listens for routers.

    Args:
        requests: the engine replica.
        host: the node's address.
    """

    def __init__(self, requests: Requests, host: str) -> None:
        self.requests = requests
        self._host = host
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._tickets: dict[bytes, str] = {}
        self._visitors: set[_Visitor] = set()
        self._routers: dict[str, _Visitor] = {}  # the latest connection of each

    async def admit(self, router_id: str) -> WireAddress:
        """A ticket for one connection of this router.

        Raises:
            EngineUnreachable: the replica is ending. OSError: it cannot listen.
        """
        async with self._starting:
            if self._closed:
                raise EngineUnreachable("this engine replica is ending")
            if self._server is None:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: _Visitor(self).framing, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = router_id
        asyncio.get_running_loop().call_later(TICKET_LIFE_S, self._tickets.pop, ticket, None)
        return WireAddress(self._host, port, ticket)

    async def hold(self, router_id: str, number: int) -> None:
        """Wait for a request's end; cancelling this cancels the request.

        Raises:
            EngineUnreachable: it never came. EngineFailed: as `submit`.
        """
        router = self._routers.get(router_id)
        if router is None:
            raise EngineUnreachable(f"router {router_id} has no channel to this replica")
        await router.hold(number)

    async def close(self) -> None:
        """Listen no more, and end every connection with all that came over it."""
        self._closed = True
        async with self._starting:
            if self._server is not None:
                self._server.close()
        for visitor in list(self._visitors):
            visitor.leave()

    def enter(self, visitor: _Visitor) -> None:
        """A connection has come."""
        self._visitors.add(visitor)

    def redeem(self, ticket: bytes, visitor: _Visitor) -> str | None:
        """The router this ticket was given to, which is this visitor from now on; it is good once."""
        router_id = self._tickets.pop(ticket, None)
        if router_id is not None:
            self._routers[router_id] = visitor
        return router_id

    def left(self, visitor: _Visitor, router_id: str | None) -> None:
        """A connection has ended; the router may have another one by now."""
        self._visitors.discard(visitor)
        if router_id is not None and self._routers.get(router_id) is visitor:
            del self._routers[router_id]


class _Visitor:
    """One connection: a ticket first, then requests one way and frames the other."""

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._router_id: str | None = None
        self._pump: asyncio.Task[None] | None = None
        self._runs: dict[int, asyncio.Task[None]] = {}  # by number, until somebody knows how it ended
        self._arrivals: dict[int, asyncio.Future[asyncio.Task[None]]] = {}  # of requests held before they came
        self.framing = Framing(self._received, self._lost, limit=TICKET_BYTES)
        self._late = asyncio.get_running_loop().call_later(TICKET_LIFE_S, self.framing.abort)
        server.enter(self)

    async def hold(self, number: int) -> None:
        """See `WireServer.hold`."""
        run = self._runs.get(number)
        if run is None:
            arrival = self._arrivals[number] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(HOLD_WAIT_S):
                    run = await arrival
            except TimeoutError:
                raise EngineUnreachable(f"request {number} of router {self._router_id} did not arrive") from None
            finally:
                self._arrivals.pop(number, None)
        try:
            await run
        finally:
            self._runs.pop(number, None)

    def leave(self) -> None:
        """End the connection; what waits to leave leaves, if the other side takes it."""
        if self._pump is None:
            self.framing.abort()
        else:
            self._pump.cancel()

    def _received(self, message: bytes) -> None:
        if self._router_id is None:
            self._enter(message)
            return
        kind, content = message[:1], message[1:]
        try:
            if kind == SUBMIT:
                self._hand_in(_submits.decode(content))
            elif kind == CANCEL:
                self._cancel(_numbers.decode(content))
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except ValueError as error:  # msgspec's errors are, and that of text that is no UTF-8
            logger.error("router %s does not speak our protocol: %s", self._router_id, error)
            self.framing.abort()

    def _enter(self, ticket: bytes) -> None:
        self._router_id = self._server.redeem(ticket, self)
        if self._router_id is None:
            self.framing.abort()
            return
        self._late.cancel()
        self.framing.limit = MAX_MESSAGE_BYTES
        # In contexts of their own: this one is of the call that first asked for a ticket.
        self._pump = in_fresh_context(self._send(self._router_id), f"wire-{self._router_id}")
        self._pump.add_done_callback(self._sent)

    def _hand_in(self, submit: Submit) -> None:
        number = submit.number
        if number in self._runs:
            raise ValueError(f"request {number} came twice")
        assert self._router_id is not None
        run = in_fresh_context(self._server.requests.submit(self._router_id, submit, ""), f"request-{number}")
        self._runs[number] = run
        arrival = self._arrivals.get(number)
        if arrival is not None and not arrival.done():
            arrival.set_result(run)

    def _cancel(self, number: int) -> None:
        """The router waits for it no more, and does not hold it (any more)."""
        run = self._runs.pop(number, None)
        if run is not None:
            run.cancel()

    async def _send(self, router_id: str) -> None:
        """The router's messages, for as long as the connection stands and no later one takes them."""
        async with contextlib.aclosing(self._server.requests.attach(router_id, "")) as messages:
            async for message in messages:
                self.framing.send(message)
                await self.framing.writable()

    def _sent(self, pump: asyncio.Task[None]) -> None:
        """The connection is over, whoever ended it."""
        if not pump.cancelled() and (error := pump.exception()) is not None:
            logger.error("the channel to router %s broke", self._router_id, exc_info=error)
        self.framing.close()
        self._server.left(self, self._router_id)
        runs, self._runs = self._runs, {}
        for run in runs.values():
            run.cancel()

    def _lost(self) -> None:
        self._late.cancel()
        if self._pump is None:
            self._server.left(self, None)
        else:
            self._pump.cancel()
