"""Pieces of a file of one size, whatever the chunks are that it comes in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from serve_app.errors import BodyTooLarge

PIECE_BYTES = 2**20  # of one call of the owner or one write to a bucket


async def in_pieces(chunks: AsyncIterable[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Pieces of `PIECE_BYTES`, the last one shorter. Raises BodyTooLarge: there are more than `max_bytes`."""
    held = bytearray()
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > max_bytes:
            raise BodyTooLarge(f"a file may have {max_bytes} bytes at most", param="file")
        held += chunk
        while len(held) >= PIECE_BYTES:
            piece = bytes(held[:PIECE_BYTES])
            del held[:PIECE_BYTES]
            yield piece
    if held:
        yield bytes(held)
