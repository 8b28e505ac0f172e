"""What was used of the quotas of a day or a month before this actor came to know: asked once for each scope.

The limits decide (`core.limits`): a request waits for the answer, and is refused when it does not come.

Invariant: a scope is asked for until its store answers, or another store is asked instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.core.limits import ActorLimits, Kind
from serve_app.core.shared_queue import messages
from serve_app.store import Store

logger = logging.getLogger("ray.serve")

RETRY_S = 0.05  # after the first failure; doubles each time: a store that restarts is away for a moment
MAX_RETRY_S = 5.0  # a store that is away for longer is asked for each scope no more often


class LimitUse:
    """Asks the store for the scopes that the limits do not know. `after`: called after each answer."""

    def __init__(
        self,
        limits: ActorLimits,
        after: Callable[[], None],
        open_store: Callable[[str | None], Store] = Store.at,
    ) -> None:
        self._limits = limits
        self._after = after
        self._open_store = open_store
        self._address: messages.StoreAddress | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def ask(self, address: messages.StoreAddress) -> None:
        """Begin to ask the store at this address for the scopes that have come up since the last call; for all that are
        unknown, if it is another store."""
        if address != self._address:
            self._address, store = address, self._open_store(address.url)
            self._store = store
            for task in self.tasks:
                task.cancel()
            self._limits.ask_again()
        for scope in self._limits.take_unknown():
            task = asyncio.create_task(self._ask(scope, self._store), name=f"used-by-{scope}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _ask(self, scope: str, store: Store) -> None:
        calendar = self._limits.calendar
        pause_s = RETRY_S
        while True:
            period = calendar.period
            try:
                of_day = await store.used(scope, calendar.first_day(Kind.REQUESTS_OF_DAY))
                of_month = await store.used(scope, calendar.first_day(Kind.COST_OF_MONTH))
            except Exception:
                if pause_s == RETRY_S:
                    logger.warning(
                        "Store did not report the used allowance of %s, whose requests wait for it",
                        scope,
                        exc_info=True,
                    )
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, MAX_RETRY_S)
                continue
            amounts = dict.fromkeys(Kind, 0.0) | {
                Kind.REQUESTS_OF_DAY: float(of_day.requests),
                Kind.TOKENS_OF_DAY: float(of_day.tokens),
                Kind.COST_OF_MONTH: float(of_month.cost_micro),
            }
            self._limits.on_used(scope, tuple(amounts.values()), period, time.monotonic())
            self._after()
            return
