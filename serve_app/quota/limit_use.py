"""What was used of the quotas of a day or a month before this actor came to know: asked once for each scope.

The limits decide (`core.limits`); a request waits for the answer for a short while, and without one the quota counts as
unused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from serve_app.core.limits import ActorLimits, Kind

logger = logging.getLogger("serve_app.quota")

# Of a scope (`key:ID`, `tenant:NAME`, `model:TENANT/MODEL`) since a day (`2026-11-25`, UTC): requests, tokens, and the
# cost in millionths.
UsedSince = Callable[[str, str], Awaitable[tuple[int, int, int]]]


class LimitUse:
    """Asks `used` for the scopes that the limits do not know. `after`: called after each answer."""

    def __init__(self, limits: ActorLimits, used: UsedSince, after: Callable[[], None]) -> None:
        self._limits, self._used, self._after = limits, used, after
        self.tasks: set[asyncio.Task[None]] = set()
        limits.asks_store = True

    def ask(self) -> None:
        """Begin to ask for the scopes that have come up since the last call."""
        for scope in self._limits.take_unknown():
            task = asyncio.create_task(self._ask(scope), name=f"used-by-{scope}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _ask(self, scope: str) -> None:
        calendar = self._limits.calendar
        try:
            requests, tokens, _ = await self._used(scope, calendar.first_day(Kind.REQUESTS_OF_DAY))
            _, _, cost = await self._used(scope, calendar.first_day(Kind.COST_OF_MONTH))
        except Exception:
            logger.exception("what was used of the quotas of %s is unknown and counts as nothing", scope)
            return
        amounts = dict.fromkeys(Kind, 0.0) | {
            Kind.REQUESTS_OF_DAY: float(requests),
            Kind.TOKENS_OF_DAY: float(tokens),
            Kind.COST_OF_MONTH: float(cost),
        }
        self._limits.on_used(scope, tuple(amounts.values()), time.monotonic())
        self._after()
