"""Repeats a call whose connection was lost: its `Idempotency-Key` makes that safe.

The repeat joins the run, gets its answer, or runs if the first one never ran or died with its router.

Invariant: a caller gets the answer of one run. A stream goes on where it was cut only if the repeat begins with the
same event, whose id names the run; else the first error is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from serve_app.client.loop_bridge import LoopBridge
from serve_app.errors import DROPPED, AnswerNotKept, EngineFailed, Unavailable
from serve_app.http import HttpRequest, read_events

PAUSES_S = (0.0, 1.0)  # before each repeat; at once, for a run to be found that has lost its client just now
# A caller that leaves by itself aborts its call, which is promised within a second: a lost connection is repeated at
# once, well within this.
GRACE_MS = b"250"
KEY = b"idempotency-key"
GRACE = b"x-disconnect-grace-ms"
RETRY_COUNT = b"x-stainless-retry-count"  # of OpenAI's SDKs
ONLY_REPLAY = (b"x-replay-only", b"1")


def with_key(asked: HttpRequest) -> HttpRequest:
    """The request with a key of its own, unless the caller gave one."""
    if any(name == KEY for name, _ in asked.headers):
        return asked
    headers = [*asked.headers, (KEY, secrets.token_hex(16).encode()), (GRACE, GRACE_MS)]
    return replace(asked, headers=headers)


def again(asked: HttpRequest, attempts: int) -> HttpRequest:
    """The request as sent after so many refused attempts: a limit that has reserved a moment for it recognises it, also
    among others with the same body."""
    return replace(asked, headers=[*asked.headers, (RETRY_COUNT, b"%d" % attempts)])


async def read(bridge: LoopBridge, asked: HttpRequest) -> bytes:
    """The body of the answer to a request with a key. Raises `serve_app.errors`."""
    lost: Unavailable | None = None
    for pause_s in (*PAUSES_S, None):
        try:
            return await bridge.read(asked)
        except AnswerNotKept as error:
            raise lost or error from None
        except Unavailable as error:
            lost = lost or error
            if error.code != DROPPED or pause_s is None or bridge.is_closed:
                raise
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable")


async def events(bridge: LoopBridge, asked: HttpRequest) -> AsyncGenerator[bytes, None]:
    """The events of the streamed answer to a request with a key, each once and as JSON. Raises `serve_app.errors`."""
    # of the events yielded
    count = 0
    first = b""
    lost: Unavailable | None = None
    for pause_s in (*PAUSES_S, None):
        try:
            async with contextlib.aclosing(read_events(bridge.exchange(asked))) as received:
                number = 0
                async for event in received:
                    if lost is not None and number == 0 and count and event != first:
                        raise lost
                    if number == count:
                        first = first or event
                        count += 1
                        yield event
                    number += 1
            return
        except (AnswerNotKept, EngineFailed) as error:
            raise (lost if lost is not None and count else error) from None
        except Unavailable as error:
            if error is lost:
                raise
            if error.code != DROPPED or pause_s is None or bridge.is_closed:
                if lost is not None and count:
                    raise lost from error
                raise
            lost = lost or error
            if count:  # another run has another answer
                asked = replace(asked, headers=[*asked.headers, ONLY_REPLAY])
        await asyncio.sleep(pause_s)
