"""The data path between a router and an engine replica: one TCP connection beside Serve's calls.

With Serve's gRPC, a submit and every message of frames take several turns of two busy event loops; here, one turn each.
The router opens the connection with a ticket that the replica issues in a call over Serve's authenticated path. A
ticket is valid once and for seconds; a connection without a ticket is closed. One Serve call (`hold`) stays open as
long as the connection, so that Serve's drain waits for it; when one ends, the other ends.

Format: each message is a 4-byte length (big endian) and as many bytes. The router first sends the ticket; each later
message is a kind (1 byte) and its content. The replica sends `Batch` messages.

Invariant: when a connection ends, the replica aborts the requests submitted over it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from serve_app.core.times import CHANNEL_CONNECT_S
from serve_app.errors import BodyTooLarge, EngineUnreachable
from serve_app.ray_adapter import CALL_ERRORS, Handle, in_fresh_context
from serve_app.transport.messages import Submit, TcpAddress

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 2**28  # a request is about as long as its JSON (8 MiB by default), a batch has about 1 MiB
# A peer whose machine or network is gone is given up after about ten seconds, idle or not.
KEEPALIVE = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 4,  # idle seconds before the first probe
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 2,  # seconds between probes
    (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 10_000,  # milliseconds for data that is not acknowledged
}
SUBMIT = b"S"
CANCEL = b"C"
STOP = b"P"

# A replica that is gone, has left or cannot be reached.
CHANNEL_ERRORS: tuple[type[BaseException], ...] = (*CALL_ERRORS, EngineUnreachable)

_encoder = msgspec.msgpack.Encoder()


class Framing(asyncio.Protocol):
    """Messages over a stream of bytes.

    Args:
        on_message: called with each message, in the turn of the loop in which its last byte came; never after `abort`.
            If it raises, asyncio or uvloop logs the error and ends the connection.
        on_lost: called once, when the connection has ended.
        limit: bytes; a longer message ends the connection.
        on_pause: called with True when the other side reads too slowly, and with False once it has caught up.
    """

    def __init__(
        self,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[], None],
        limit: int = MAX_MESSAGE_BYTES,
        on_pause: Callable[[bool], None] = lambda is_paused: None,
    ) -> None:
        self.on_message = on_message
        self._on_lost = on_lost
        self.limit = limit
        self._on_pause = on_pause
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        self._needed_bytes = HEADER_BYTES  # bytes needed for the next header or message
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        end = transport.get_extra_info("socket")
        for (level, name), value in KEEPALIVE.items():
            if hasattr(socket, name):  # some exist on Linux only
                end.setsockopt(level, getattr(socket, name), value)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._on_lost()

    def pause_writing(self) -> None:
        self._on_pause(True)

    def resume_writing(self) -> None:
        self._on_pause(False)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes < self._needed_bytes:
            return
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        start = 0
        size = len(buffer)
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
            self.on_message(buffer[start + HEADER_BYTES : end])
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

    def close(self) -> None:
        """End the connection once the sent messages have left."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """End the connection now."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.abort()


class ReplicaConnection:
    """The router's end of the connection to one replica.

    Args:
        handle: makes Serve's calls.
        on_message: see `Framing`.
        on_end: called at most once, with the reason, when the connection has ended by itself.
    """

    def __init__(
        self,
        handle: Handle,
        router_id: str,
        replica_id: str,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._handle = handle
        self._router_id = router_id
        self._replica_id = replica_id
        self._on_message = on_message
        self._on_end = on_end
        self._framing = Framing(self._on_first_message, lambda: self._end("the connection ended"))
        self._ticket = b""
        self._hold: asyncio.Task[None] | None = None
        self._is_closed = False

    async def open(self) -> None:
        """Get a ticket, connect and send it.

        Raises:
            CHANNEL_ERRORS: there is no ticket, or no connection within `CHANNEL_CONNECT_S`.
        """
        address: TcpAddress = await self._handle.call("open_wire", self._router_id, replica_id=self._replica_id)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CHANNEL_CONNECT_S):
                await loop.create_connection(lambda: self._framing, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise ConnectionError(f"no connection to {address.host}:{address.port}: {error}") from None
        self._ticket = address.ticket
        self._framing.send(self._ticket)

    def submit(self, submit: Submit) -> None:
        """Submit a request. Raises BodyTooLarge if the replica would reject its message as too long."""
        message = SUBMIT + _encoder.encode(submit)
        if len(message) > MAX_MESSAGE_BYTES:
            raise BodyTooLarge("the request is larger than an engine accepts", param="body")
        self._framing.send(message)

    def cancel(self, number: int) -> None:
        """Abort a request."""
        self._framing.send(CANCEL + _encoder.encode(number))

    def stop(self, number: int) -> None:
        """Stop a request; its last frame is a failure of code `STOPPED`, unless it has ended before."""
        self._framing.send(STOP + _encoder.encode(number))

    def close(self) -> None:
        """End the connection and its Serve call."""
        self._is_closed = True
        self._framing.close()
        if self._hold is not None:
            self._hold.cancel()

    def _on_first_message(self, message: bytes) -> None:
        """The replica has accepted the ticket."""
        self._framing.on_message = self._on_message
        self._hold = in_fresh_context(self._run_hold(), f"hold-{self._replica_id}")
        self._on_message(message)

    async def _run_hold(self) -> None:
        reason = "it was closed there"
        try:
            await self._handle.call("hold", self._ticket, replica_id=self._replica_id)
        except CHANNEL_ERRORS as error:
            reason = brief(error)
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(reason)


def brief(error: BaseException) -> str:
    """The first line of an error: Ray's errors contain whole tracebacks."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
