"""How a server closes a connection on which a request is still arriving: its answer first, the connection later.

If a socket is closed with unread bytes in it, the kernel resets the connection, and a client or a proxy that is still
sending may lose an answer that it has not read yet (a 413, a 401, a 400). HAProxy asks for `connection: close` with
every request, so uvicorn closes after every answer, a refusal included.

Invariant: the answer's end is signalled at once. After that what arrives is read and dropped, for at most `LINGER_S`
and `LINGER_BYTES`, until the client closes. HAProxy hands the answer on meanwhile, and the client's connection stays
usable if the request ends within these bounds.
"""

from __future__ import annotations

import asyncio
from typing import Any

LINGER_S = 10.0  # as long as the first byte of a body may take (body.ARRIVAL_S)
LINGER_BYTES = 2**28  # more than the largest file by default; 0.1 s of the router's CPU time


class LingeringTransport:
    """A transport whose `close` waits for the rest of a request; see asyncio.Transport for all else.

    Args:
        transport: the connection's own.
        loop: measures `LINGER_S`.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._bytes_left = LINGER_BYTES
        self._end: asyncio.TimerHandle | None = None
        self.is_arriving = False  # a request has begun, and its end has not been read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def lingers(self) -> bool:
        """What arrives belongs to no request."""
        return self._end is not None

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """End the answer; close now if the request has been read to its end."""
        if not self.is_arriving or self._transport.is_closing():
            self._transport.close()
        elif not self.lingers:
            self._end = self._loop.call_later(LINGER_S, self._transport.close)
            self._transport.write_eof()
            if not self._transport.is_reading():
                self._transport.resume_reading()

    def drop(self, data: bytes) -> None:
        """Count what has arrived while the connection lingers."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._transport.close()

    def on_lost(self) -> None:
        """The connection is gone."""
        if self._end is not None:
            self._end.cancel()
