"""The stream of one console: the state as events, no faster than `BYTES_PER_S`.

Invariant: the key is looked up anew `CHECK_S` at most before each event and while nothing is sent: a stream ends within
a second after its router knows that the key is gone. A slow reader gets the newest state later, and no older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from serve_app.errors import Unauthorized
from serve_app.http.console.live_watch import LiveWatch
from serve_app.http.error_responses import sse_comment
from serve_app.http.response import HttpExchange
from serve_app.types import Identity

BYTES_PER_S = 50_000  # a mobile line; a state that is larger is sent less often
CHECK_S = 0.5
SILENT_S = 10.0  # after which a comment keeps proxies from closing the connection
SEND_S = 10.0  # for a reader to take what was sent; a browser connects again


class LiveStream:
    """Sends the events.

    Args:
        identify: who asks, as the key is now. Raises Unauthorized.
        name: of a key.
    """

    def __init__(self, watch: LiveWatch, identify: Callable[[], Identity], name: Callable[[Identity], str]) -> None:
        self._watch = watch
        self._identify = identify
        self._name = name

    async def run(self, exchange: HttpExchange) -> None:
        """Until the client leaves, the key is gone, or the router is taken out of service.

        Raises:
            Unavailable: too many consoles watch.
        """
        identity = self._identify()
        try:
            with self._watch.watching(identity):
                await self._send_states(identity, exchange)
            await self._send(exchange, b"", is_last=True)
        except TimeoutError:
            return  # the connection is closed without an end: the reader does not read

    async def _send_states(self, identity: Identity, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        scope = (identity.admin, identity.tenant)
        seen = self._watch.number
        may_send_at = loop.time()
        sent_at = loop.time()
        await self._send(exchange, sse_comment("live"))
        while not self._watch.is_leaving():
            is_new = await self._watch.wait_for_state(seen, CHECK_S)
            now = loop.time()
            try:
                identity = self._identify()
            except Unauthorized as error:
                await self._send(exchange, _event("end", msgspec.json.encode(error.body())))
                break
            if (identity.admin, identity.tenant) != scope:
                break  # its rights are others now: a new connection counts as what it is
            if is_new and now >= may_send_at:
                seen = self._watch.number
                event = self._event(identity)
                await self._send(exchange, event)
                sent_at = now
                may_send_at = now + len(event) / BYTES_PER_S
            elif is_new:
                await asyncio.sleep(min(CHECK_S, may_send_at - now))
            elif now - sent_at >= SILENT_S:
                await self._send(exchange, sse_comment("live"))
                sent_at = now

    def _event(self, identity: Identity) -> bytes:
        own = msgspec.json.encode({"name": self._name(identity), "admin": identity.admin})
        return _event("live", own[:-1] + b"," + self._watch.encoded(identity)[1:])

    async def _send(self, exchange: HttpExchange, data: bytes, *, is_last: bool = False) -> None:
        async with asyncio.timeout(SEND_S):
            await exchange.send_events(data, is_last=is_last)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
