"""What the other router replicas answer.

Invariant: a router has answered within `ANSWER_TIMEOUT_S`, or it is left out and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from serve_app.ray_adapter import NO_ANSWER

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 2.0  # a router answers within milliseconds; one that is shutting down, never

# One of the release before takes other arguments.
FAILURES: tuple[type[BaseException], ...] = (TypeError, *NO_ANSWER)

T = TypeVar("T")


async def answer_or_none(answer: Awaitable[T], asked: str) -> T | None:
    """The answer of one router; None: there is none. `asked`: for the log."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer
    except FAILURES as error:
        logger.warning("Routers did not all answer %s, which lacks one part: %s", asked, error)
        return None
