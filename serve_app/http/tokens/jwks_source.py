"""Where a JWKS comes from: an address, or a file of this node.

Invariant: nothing here blocks the event loop, and nothing larger than `MAX_JWKS_BYTES` is kept. No redirect is
followed, so that the keys come from the address of the configuration alone.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable

import httpx2

from serve_app.http.tokens.key_set import MAX_JWKS_BYTES, JwksError
from serve_app.settings import JwtSettings

FETCH_S = 10.0  # for the whole answer; a provider takes milliseconds
IDENTITY = "identity"  # no compression: a small answer could be as large as the memory when it is unpacked
REQUEST_HEADERS = {"accept": "application/json", "accept-encoding": IDENTITY}

ReadJwks = Callable[[JwtSettings], Awaitable[bytes]]


async def read_jwks(settings: JwtSettings) -> bytes:
    """The text of the JWKS. Raises JwksError."""
    if settings.jwks_file is not None:
        return await asyncio.to_thread(read_jwks_file, settings.jwks_file)
    try:
        async with asyncio.timeout(FETCH_S):
            return await _fetch(settings.jwks_url or "")
    except TimeoutError:
        raise JwksError(f"no answer within {FETCH_S:.0f} s") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise JwksError(f"{type(error).__name__}: {error}") from None


async def _fetch(url: str) -> bytes:
    # a thread makes the client: it reads the certificates of all authorities
    client = await asyncio.to_thread(httpx2.AsyncClient, timeout=FETCH_S, follow_redirects=False)
    async with client, client.stream("GET", url, headers=REQUEST_HEADERS) as answer:
        if answer.status_code != httpx2.codes.OK:
            raise JwksError(f"HTTP status {answer.status_code}")
        if answer.headers.get("content-encoding", IDENTITY).lower() != IDENTITY:
            raise JwksError("the answer is compressed")
        text = bytearray()
        async for piece in answer.aiter_raw():
            text += piece
            if len(text) > MAX_JWKS_BYTES:
                raise JwksError(f"it is larger than {MAX_JWKS_BYTES} bytes")
        return bytes(text)


def read_jwks_file(path: str) -> bytes:
    """The text of a JWKS in a file, at most one byte more than is accepted. Raises JwksError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: it may be a pipe
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise JwksError(f"{path} is not a plain file")
            return file.read(MAX_JWKS_BYTES + 1)
    except OSError as error:
        raise JwksError(f"{path}: {error.strerror or error}") from None
