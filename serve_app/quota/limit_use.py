"""What was used of the quotas of a day or a month before this actor came to know: asked once for each scope.

The limits decide (`core.limits`); a request waits for the answer for a short while, and without one the quota counts as
unused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.core.limits import ActorLimits, Kind
from serve_app.core.shared_queue import messages
from serve_app.store import Store

logger = logging.getLogger("serve_app.quota")


class LimitUse:
    """Asks the store at this address for the scopes that the limits do not know. `after`: called after each answer."""

    def __init__(
        self,
        limits: ActorLimits,
        address: messages.StoreAddress,
        after: Callable[[], None],
        open_store: Callable[[str | None], Store] = Store.at,
    ) -> None:
        self._limits, self.address, self._after = limits, address, after
        self._store = open_store(address.url)
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
            of_day = await self._store.used(scope, calendar.first_day(Kind.REQUESTS_OF_DAY))
            of_month = await self._store.used(scope, calendar.first_day(Kind.COST_OF_MONTH))
        except Exception:
            logger.exception("what was used of the quotas of %s is unknown and counts as nothing", scope)
            return
        amounts = dict.fromkeys(Kind, 0.0) | {
            Kind.REQUESTS_OF_DAY: float(of_day.requests),
            Kind.TOKENS_OF_DAY: float(of_day.tokens),
            Kind.COST_OF_MONTH: float(of_month.cost_micro),
        }
        self._limits.on_used(scope, tuple(amounts.values()), time.monotonic())
        self._after()
