"""Reports the use of this router's requests: `core.usage.meter` with a clock, a timer and calls of the store.

Invariant: at most one report a second, and none while nothing has changed; a report that fails is repeated as it was,
until the store has it. At a normal end of the router the last report is made before the process ends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from serve_app.core.limits import TokenPrices
from serve_app.core.usage import RequestUse, UsageBatch, UsageKey, UsageMeter
from serve_app.ray_adapter import in_fresh_context

logger = logging.getLogger("ray.serve")

FLUSH_S = 1.0  # between reports: what a killed router loses
HEARTBEAT_S = 5.0  # between reports of unchanged requests in flight; the store calls three such spans of silence an end
ANSWER_TIMEOUT_S = 10.0  # a busy database takes seconds; a later answer changes nothing, since a repeat counts once
CLOSE_S = 30.0  # for the last report; Ray needs seconds to restart the store's actor
CLOSE_RETRY_S = 0.25
DAY_S = 86400  # of UTC; POSIX time has no leap seconds

AddUsage = Callable[[UsageBatch], Awaitable[None]]


class UsageReporter:
    """Counts the use of this router's requests and reports it.

    Args:
        source: the router's name; no other router has ever had it.
        add_usage: gives a batch to the store; raises while the store is away.
        wall_clock: seconds since 1970.
    """

    def __init__(self, source: str, add_usage: AddUsage, wall_clock: Callable[[], float] = time.time) -> None:
        self.meter = UsageMeter(source)
        self._add_usage, self._wall_clock = add_usage, wall_clock
        self._day_of = functools.lru_cache(maxsize=2)(lambda day: time.strftime("%Y-%m-%d", time.gmtime(DAY_S * day)))
        self._reported_at = time.monotonic()
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report."""
        self._task = in_fresh_context(self._run(), "usage-reports")

    def begin(self, request_id: str, key_id: str, tenant: str, model: str, prices: TokenPrices | None) -> None:
        """A request is handed to an engine; its day and its prices are those of now."""
        day = self._day_of(self._wall_clock() // DAY_S)
        self.meter.begin(request_id, UsageKey(day, key_id, tenant, model), prices)

    def end(self, request_id: str, use: RequestUse | None) -> None:
        """A request has ended; see `UsageMeter.end`."""
        self.meter.end(request_id, use)

    async def flush(self) -> bool:
        """Report what there is to report, if anything; whether the store has it all."""
        now = time.monotonic()
        batch = self.meter.next_batch(heartbeat=now - self._reported_at >= HEARTBEAT_S)
        if batch is None:
            return True
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._add_usage(batch)
        except Exception:  # whatever it is: the batch is kept and sent again
            if not self._is_away:
                logger.exception("the store does not take the report of use, which is kept and repeated")
            self._is_away = True
            return False
        if self._is_away:
            logger.info("the store takes the reports of use again")
        self._is_away, self._reported_at = False, now
        self.meter.acknowledge(batch.seq)
        return True

    async def close(self) -> None:
        """Make the last report, once all requests have ended. Gives up after `CLOSE_S`, with what is lost in the
        log."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        deadline = time.monotonic() + CLOSE_S
        while not await self.flush() or self.meter.has_news:
            if time.monotonic() >= deadline:
                logger.error("this router ends, and its last report of use is lost: %r", self.meter.next_batch())
                return
            await asyncio.sleep(CLOSE_RETRY_S)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
