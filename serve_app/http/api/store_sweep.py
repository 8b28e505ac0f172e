"""The end of what the store keeps for a time: entries of the audit record, responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.errors import StoreAway
from serve_app.settings import Settings
from serve_app.store import Store

logger = logging.getLogger("ray.serve")

SWEEP_S = 3600.0  # entries and responses are kept for days: an hour more or less is no matter
SWEEP_ENTRIES = 10_000  # at once: a transaction of milliseconds
SWEEP_RESPONSES = 500  # at once: each has some items
DAY_S = 86_400.0


class StoreSweep:
    """Removes them.

    Args:
        store, settings: those that hold now.
        now: seconds since 1970 UTC.
    """

    def __init__(
        self, store: Callable[[], Store], settings: Callable[[], Settings], now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._settings = settings
        self._now = now

    async def sweep(self) -> int:
        """Remove what is old. Returns how many entries and responses. Raises StoreAway."""
        before = self._now() - self._settings().store.audit_days * DAY_S
        count = 0
        while (removed := await self._store().forget_audit(before, SWEEP_ENTRIES)) > 0:
            count += removed
        keep_s = self._settings().responses.keep_s  # it may be lower than it was when they were stored
        while (removed := await self._store().responses.forget(SWEEP_RESPONSES, keep_s)) > 0:
            count += removed
        return count

    async def run(self) -> None:
        """Remove it from time to time, until cancelled."""
        while True:
            try:
                await self.sweep()
            except StoreAway as error:
                logger.info("Store keeps old entries and responses for another hour: %s", error)
            except Exception:
                logger.exception("Store could not remove old entries and responses. Report this traceback")
            await asyncio.sleep(SWEEP_S)
