"""How long the quota actor waits for Ray's GCS before its caller gets an error instead of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ray.exceptions import RayError

from serve_app.errors import QUOTA_AWAY, Unavailable


@contextlib.asynccontextmanager
async def bounded_wait(action: str, bound_s: float) -> AsyncIterator[None]:
    """For a block that waits for the GCS. Raises Unavailable: it has failed, or has not answered within `bound_s`."""
    try:
        async with asyncio.timeout(bound_s):
            yield
    except (TimeoutError, RayError) as error:
        why = str(error) or f"no answer within {bound_s:g} s"
        raise Unavailable(
            f"the quota actor waits for {action}, and Ray's GCS fails: {why}", code=QUOTA_AWAY, retry_after_s=1.0
        ) from None
