"""Reports the use of this router's requests: `core.usage.meter` with a clock, a timer and calls of the store.

Invariant: at most one report a second, and none while nothing has changed; a report that fails is repeated as it was,
until the store has it. At a normal end of the router the last report is made before the process ends. For a router that
was killed another one of its node reports, from its journal.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from serve_app.core.limits import TokenPrices
from serve_app.core.times import ACTOR_RETRY_S, USAGE_ANSWER_S, USAGE_FLUSH_S, USAGE_HEARTBEAT_S
from serve_app.core.usage import (
    RequestUse,
    UsageBatch,
    UsageKey,
    UsageMeter,
    UsedModel,
    begin_line,
    end_line,
    meter_of,
    state_line,
)
from serve_app.ray_adapter import in_fresh_context
from serve_app.router.usage_journal import UsageJournal, is_too_old, remove, set_aside

logger = logging.getLogger("ray.serve")

USAGE_FOLDER = "serve_app_usage"  # of the journals, in the folder of Ray's session
CLOSE_S = 30.0  # for the last report; Ray needs seconds to restart the store's actor
DAY_S = 86400  # of UTC; POSIX time has no leap seconds

AddUsage = Callable[[UsageBatch], Awaitable[None]]


class UsageReporter:
    """Counts the use of this router's requests and reports it.

    Args:
        source: the router's name; no other router has ever had it.
        add_usage: gives a batch to the store; raises while the store is away.
        wall_clock: seconds since 1970.
        folder: of this node's journals; None: nothing is written down.
    """

    def __init__(
        self,
        source: str,
        add_usage: AddUsage,
        wall_clock: Callable[[], float] = time.time,
        folder: Path | None = None,
    ) -> None:
        self.meter = UsageMeter(source)
        self.journal = UsageJournal(folder, source)
        self.journal.restart(state_line(self.meter))
        self._looked_at = -math.inf  # for journals of others
        self._add_usage = add_usage
        self._wall_clock = wall_clock
        self._day_of = functools.lru_cache(maxsize=2)(lambda day: time.strftime("%Y-%m-%d", time.gmtime(DAY_S * day)))
        self._reported_at = time.monotonic()
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report."""
        self._task = in_fresh_context(self._run(), "usage-reports")

    def begin(self, request_id: str, key_id: str, tenant: str, used: UsedModel, prices: TokenPrices | None) -> None:
        """A request is handed to an engine; its day and its prices are those of now."""
        day = self._day_of(self._wall_clock() // DAY_S)
        key = UsageKey(day, key_id, tenant, *used)
        self.meter.begin(request_id, key, prices)
        self.journal.write(begin_line(request_id, key, prices))

    def end(self, request_id: str, use: RequestUse | None) -> None:
        """A request has ended; see `UsageMeter.end`."""
        if request_id in self.meter.in_flight:
            self.journal.write(end_line(request_id, use))
        self.meter.end(request_id, use)

    async def flush(self) -> bool:
        """Report what there is to report, if anything; whether the store has it all."""
        now = time.monotonic()
        sent = self.meter.sent
        batch = self.meter.next_batch(heartbeat=now - self._reported_at >= USAGE_HEARTBEAT_S)
        if batch is None:
            return True
        if batch is not sent:
            self.journal.restart(state_line(self.meter))
        if await self._send(self.meter, batch):
            self._reported_at = now
            return True
        return False

    async def _send(self, meter: UsageMeter, batch: UsageBatch) -> bool:
        try:
            async with asyncio.timeout(USAGE_ANSWER_S):
                await self._add_usage(batch)
        except Exception:  # whatever it is: the batch is kept and sent again
            if not self._is_away:
                logger.warning(
                    "Store did not take the usage report of %s; sums lag until a repeat succeeds",
                    batch.source,
                    exc_info=True,
                )
            self._is_away = True
            return False
        if self._is_away:
            logger.info("Store takes usage reports again")
        self._is_away = False
        meter.acknowledge(batch.seq)
        return True

    async def report_left_behind(self) -> None:
        """Report what routers of this node that were killed have left in their journals, and remove these."""
        try:
            with self.journal.left_behind() as journals:
                for file, journal in journals.items():
                    await self._report_journal(file, journal)
        except OSError:
            logger.exception(
                "Router %s cannot read the journals of killed routers, whose usage is missing. Check the disk",
                self.meter.source,
            )

    async def _report_journal(self, file: Path, journal: bytes) -> None:
        try:
            meter = meter_of(journal)
            if is_too_old(file):
                raise ValueError("it is so old that the store may have forgotten which part of it was reported")
        except ValueError as error:
            logger.error(
                "Journal %s is set aside, and its usage is in no sum: %s. Correct the bills by hand", file, error
            )
            set_aside(file)
            return
        while (batch := meter.next_batch()) is not None:
            if not await self._send(meter, batch):
                return
        remove(file)
        logger.info("Journal %s of a killed router was reported to the store", file)

    async def close(self) -> None:
        """Make the last report, once all requests have ended. Gives up after `CLOSE_S`, with what is lost in the
        log."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        deadline = time.monotonic() + CLOSE_S
        while not await self.flush() or self.meter.has_news:
            if time.monotonic() >= deadline:
                logger.warning(
                    "Router %s ends without its last usage report, which another router of this node makes: %r",
                    self.meter.source,
                    self.meter.next_batch(),
                )
                self.journal.leave()
                return
            await asyncio.sleep(ACTOR_RETRY_S)
        self.journal.close()

    async def _run(self) -> None:
        while True:
            if time.monotonic() - self._looked_at >= USAGE_HEARTBEAT_S:
                self._looked_at = time.monotonic()
                await self.report_left_behind()
            await asyncio.sleep(USAGE_FLUSH_S)
            await self.flush()
