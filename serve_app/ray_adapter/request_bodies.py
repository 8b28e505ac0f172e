"""Bounds what Serve (2.60.0) reads of a request's body ahead of the application: its queue of messages has no bound.

Invariant: while the application is busy with what it has, its client waits, whatever the size of the body. Where Serve
runs the application in a thread of its own (not on the fast path), or its own proxy reads bodies, nothing is bounded.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve._private import replica
from ray.serve._private.constants import RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD
from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

AHEAD_MESSAGES = 4  # of 64 KiB, as uvicorn reads: enough that the next one is there when one has been taken


class BoundedBody(ASGIDIReceiveProxy):
    """ASGI's `receive` for one request. A disconnect is seen once the messages before it are taken."""

    @property
    def queue(self) -> asyncio.Queue[Any]:
        if self._queue is None:
            self._queue = asyncio.Queue(AHEAD_MESSAGES)
        return self._queue


def bound_bodies() -> None:
    """For the requests of this process from now on."""
    if not RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD:
        replica.ASGIDIReceiveProxy = BoundedBody  # type: ignore[attr-defined]
