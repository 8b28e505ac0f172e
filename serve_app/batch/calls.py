"""Calls of the store and the files that may be away: each is bounded, and repeated until it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from serve_app.core.times import BATCH_CALL_S
from serve_app.errors import ServeAppError

logger = logging.getLogger("ray.serve")

RETRY_S = 0.25  # the first wait; the store's actor restarts in seconds
MAX_RETRY_S = 5.0

T = TypeVar("T")


def is_away(error: BaseException) -> bool:
    """Whether an error says that the store or the files cannot be used now: the same call can succeed later."""
    return isinstance(error, (TimeoutError, OSError)) or (isinstance(error, ServeAppError) and error.status >= 500)


def loop_time() -> float:
    """Seconds of the running event loop's clock."""
    return asyncio.get_running_loop().time()


async def bounded(call: Awaitable[T], bound_s: float = BATCH_CALL_S) -> T:
    """The answer. Raises TimeoutError after `bound_s`."""
    async with asyncio.timeout(bound_s):
        return await call


async def until_answered(call: Callable[[], Awaitable[T]], action: str, bound_s: float = BATCH_CALL_S) -> T:
    """The answer of a call that may be repeated, however long the store or the files are away.

    Raises:
        What the call raises, unless it `is_away`.
    """
    wait_s = RETRY_S
    failures = 0
    while True:
        try:
            answer = await bounded(call(), bound_s)
        except Exception as error:
            if not is_away(error):
                raise
            if not failures:
                cause = str(error) or type(error).__name__
                logger.warning("Batch worker: %s failed and will be retried in %.1f s: %s", action, wait_s, cause)
            failures += 1
        else:
            if failures:
                logger.info("Batch worker: %s succeeded after %d failures", action, failures)
            return answer
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_RETRY_S)
