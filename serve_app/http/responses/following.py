"""Sends the stream of a background response from the store, from any event on and through any router.

Invariant: events come in the order of their numbers, each once; the stream ends when the response has.
"""

from __future__ import annotations

import asyncio

from serve_app.core.responses import events_after
from serve_app.http.response import HttpExchange
from serve_app.store import BackgroundStore

LOOK_S = 0.5  # between looks for new events: as often as a run writes them
COMMENT_LOOKS = 20  # without an event: a comment, so that nothing between takes the connection for dead
PIECES = 100  # of one look: each is half a second of a stream


async def follow(store: BackgroundStore, response_id: str, tenant: str, after: int, exchange: HttpExchange) -> None:
    """Send the events behind the number `after`. Raises KeyError: there is no such response; StoreAway."""
    looks = 0
    while True:
        pieces, is_over = await store.events(response_id, tenant, after, PIECES)
        body = ""
        for piece in pieces:
            body += events_after(piece.body, piece.first, after)
            after = piece.last
        if body or is_over:
            await exchange.send_events(body.encode(), is_last=is_over)
            looks = 0
        if is_over:
            return
        if len(pieces) < PIECES:
            await asyncio.sleep(LOOK_S)
            looks += 1
            if looks % COMMENT_LOOKS == 0:
                await exchange.send_comment("the response has no new event")
