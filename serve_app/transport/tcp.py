"""The data path between a router and an engine replica: one TCP connection beside Serve's calls.

With Serve's gRPC, a submit and every message of frames take several turns of two busy event loops; here, one turn each.
The router opens the connection with a ticket that the replica issues in a call over Serve's authenticated path. A
ticket is valid once and for seconds; a connection without a ticket is closed. Each request is a unary Serve call
(`hold`) as well, so that Serve's count of ongoing requests, its drain and its cancellation stay correct.

Format: each message is a 4-byte length (big endian) and as many bytes. The router first sends the ticket; each later
message is a kind (1 byte) and its content. The replica sends `Batch` messages.

Invariant: when a connection ends, the replica aborts the requests submitted over it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from serve_app.errors import BodyTooLarge, EngineUnreachable
from serve_app.ray_adapter import EngineHandle, ReplicasChanged
from serve_app.transport.messages import Submit, TcpAddress

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 2**28  # a request is about as long as its JSON (8 MiB by default), a batch has about 1 MiB
CONNECT_TIMEOUT_S = 5.0  # within a cluster a connection opens in milliseconds
# A peer whose machine or network is gone is given up after about ten seconds, idle or not.
KEEPALIVE = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 4,  # idle seconds before the first probe
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 2,  # seconds between probes
    (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 10_000,  # milliseconds for data that is not acknowledged
}
SUBMIT, CANCEL = b"S", b"C"

_encoder = msgspec.msgpack.Encoder()


class Framing(asyncio.Protocol):
    """Messages over a stream of bytes.

    Args:
        on_message: called with each message, in the turn of the loop in which its last byte came; never after `abort`.
            If it raises, asyncio or uvloop logs the error and ends the connection.
        on_lost: called once, when the connection has ended.
        limit: bytes; a longer message ends the connection.
    """

    def __init__(
        self, on_message: Callable[[bytes], None], on_lost: Callable[[], None], limit: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.limit = limit
        self._on_message = on_message
        self._on_lost = on_lost
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        self._needed_bytes = HEADER_BYTES  # bytes needed for the next header or message
        self.transport: asyncio.Transport | None = None
        self.writable: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        end = transport.get_extra_info("socket")
        for (level, name), value in KEEPALIVE.items():
            if hasattr(socket, name):  # some exist on Linux only
                end.setsockopt(level, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.resume_writing()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes < self._needed_bytes:
            return
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        start, size = 0, len(buffer)
        self._needed_bytes = HEADER_BYTES
        while size - start >= HEADER_BYTES:
            length = int.from_bytes(buffer[start : start + HEADER_BYTES])
            if length > self.limit:
                self.abort()
                return
            end = start + HEADER_BYTES + length
            if end > size:
                self._needed_bytes = HEADER_BYTES + length
                break
            self._on_message(buffer[start + HEADER_BYTES : end])
            if self.transport is None:  # aborted by `on_message`
                return
            start = end
        rest = buffer[start:] if start else buffer
        self._parts = [rest] if rest else []
        self._buffered_bytes = len(rest)

    def send(self, message: bytes) -> None:
        """Send a message; does nothing once the connection has ended."""
        if self.transport is not None:
            self.transport.write(len(message).to_bytes(HEADER_BYTES) + message)

    def pause_writing(self) -> None:
        self.writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self.writable is not None and not self.writable.done():
            self.writable.set_result(None)
        self.writable = None

    async def wait_writable(self) -> None:
        """Wait until the other side keeps up or the connection has ended."""
        if self.writable is not None:
            await asyncio.shield(self.writable)

    def close(self) -> None:
        """End the connection once the sent messages have left."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End the connection now."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.abort()


class _Connection:
    """The router's end of the connection to one replica.

    Args:
        on_message: see `Framing`.
    """

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._framing = Framing(on_message, self._on_lost)

    async def open(self, address: TcpAddress) -> None:
        """Connect and send the ticket.

        Raises:
            ConnectionError: no connection within `CONNECT_TIMEOUT_S`.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: self._framing, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"no connection to {address.host}:{address.port}: {error}") from None
        self._framing.send(address.ticket)

    def submit(self, submit: Submit) -> None:
        """Submit a request. Raises BodyTooLarge if the replica would reject its message as too long."""
        message = SUBMIT + _encoder.encode(submit)
        if len(message) > MAX_MESSAGE_BYTES:
            raise BodyTooLarge("the request is larger than an engine accepts", param="body")
        self._framing.send(message)

    def cancel(self, number: int) -> None:
        self._framing.send(CANCEL + _encoder.encode(number))

    def close(self) -> None:
        self._framing.close()

    def _on_lost(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class TcpHandle:
    """An `EngineHandle` whose channels and submits use our own TCP connections."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._connections: dict[str, _Connection] = {}  # open ones, by replica

    async def watch(self, listener: ReplicasChanged) -> None:
        """See `EngineHandle.watch`."""
        await self._handle.watch(listener)

    async def call_any_replica(self) -> None:
        """See `EngineHandle.call_any_replica`."""
        await self._handle.call_any_replica()

    async def close(self) -> None:
        """See `EngineHandle.close`."""
        await self._handle.close()

    async def attach(self, router_id: str, on_message: Callable[[bytes], None], *, replica_id: str) -> None:
        """See `Handle.attach`."""
        address = await self._handle.call("open_wire", router_id, replica_id=replica_id)
        connection = _Connection(on_message)
        try:
            await connection.open(address)
            self._connections[replica_id] = connection
            await connection.ended
        finally:
            if self._connections.get(replica_id) is connection:
                del self._connections[replica_id]
            connection.close()
        raise ConnectionError("the connection ended")

    async def call(self, method: str, *arguments: Any, replica_id: str) -> Any:
        """A unary call; `submit` goes over the TCP connection and is held open by a Serve call."""
        if method != "submit":
            return await self._handle.call(method, *arguments, replica_id=replica_id)
        router_id, submit = arguments
        connection = self._connections.get(replica_id)
        if connection is None:
            raise EngineUnreachable(f"the channel to engine replica {replica_id} has ended")
        connection.submit(submit)
        ended = False
        try:
            result = await self._handle.call("hold", router_id, submit.number, replica_id=replica_id)
            ended = True
            return result
        finally:
            if not ended:  # cancelled, or the call was lost: the request has no reader here any more
                connection.cancel(submit.number)
