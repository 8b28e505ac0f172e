"""A router's request log and history on the disk of its node: a thread writes what the event loop hands over.

    requests, failures      a line for each ended request; what failed by an engine or this system is in `failures`
    minutes                 what was counted since the line before (`core.records.MinuteBook`)

Of the node's requests and failures together the oldest requests are removed first, so that failures are kept longest.

Invariant: the event loop never waits for the disk. What has ended is written within `GATHER_S`, or at an orderly end;
what was counted at the end of its minute, when somebody asks, or at an orderly end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serve_app.core.receipts import Receipt
from serve_app.core.records import FAILED, MINUTE_S, Group, MinuteBook, RecordKind, record_fields
from serve_app.system import DurationSketch, EventKind, RecordBounds, RecordFile, Sweeper, event

logger = logging.getLogger("ray.serve")

GATHER_S = 0.2  # between two writes: a router that is killed loses so much
FLUSH_S = 1.5  # for the disk; below the bound of a call of other routers
MAX_HANDED_OVER = 50_000  # requests that a disk has not taken yet: some 50 MB
# A day and an hour of minutes. 10 requests a second of 20 tenants take some 8 MB a day.
MINUTE_BOUNDS = RecordBounds(keep_s=25 * 3600.0, max_bytes=64 * 2**20)


class EndedRequest(NamedTuple):
    """A request that has ended.

    Args:
        at, ended_at: its arrival and its end, in seconds since 1970.
        own: what its record has beside the receipt.
    """

    receipt: Receipt
    at: float
    ended_at: float
    own: Mapping[str, Any]


class RequestLog:
    """The log of one router replica.

    Args:
        folder: of the node; None: nothing is kept.
        router, node: the ids of this router and of its node.
        clock: seconds since 1970.
        count_lost: called in the log's thread with the number of records that no disk took, zero at first.
    """

    def __init__(
        self,
        folder: Path | None = None,
        router: str = "router",
        node: str = "",
        clock: Callable[[], float] = time.time,
        count_lost: Callable[[int], None] | None = None,
    ) -> None:
        self.router = router
        self.node = node
        self._count_lost = count_lost
        self._counted_lost = 0
        self._lost_at = 0.0  # the last of them, in seconds since 1970
        self.lost = 0  # requests that were handed over faster than the disk took them
        self._clock = clock
        self._book = MinuteBook(DurationSketch)
        self._count_tenants: Callable[[], int] = lambda: 0
        self._handed_over: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._is_closing = False
        self.keeps = False
        self._lines: dict[RecordKind, list[bytes]] = {kind: [] for kind in RecordKind}
        self._files: dict[RecordKind, RecordFile] = {}
        self._thread: threading.Thread | None = None
        if folder is not None:
            none = RecordBounds(0.0, 1)  # until `configure`
            extra = event(EventKind.HEALTH, "router", router=router, node=node)
            self._files = {kind: RecordFile(folder, kind.value, router, none, extra) for kind in self._lines}
            self._sweeper = Sweeper(folder, {(RecordKind.MINUTES,): MINUTE_BOUNDS})
            self._files[RecordKind.MINUTES].bounds = MINUTE_BOUNDS

    def configure(self, bounds: RecordBounds, named_tenants: int, count_tenants: Callable[[], int]) -> None:
        """Apply changed settings; called once before the first request.

        Args:
            bounds: nothing is kept if they are of no time.
            count_tenants: how many there are.
        """
        self.keeps = bounds.keep_s > 0
        self._count_tenants = count_tenants
        self._book.tenants.limit = named_tenants
        self._book.tenants.known = count_tenants()
        if not self._files:
            return
        self._sweeper.bounds[RecordKind.REQUESTS, RecordKind.FAILURES] = bounds
        for kind in (RecordKind.REQUESTS, RecordKind.FAILURES):
            self._files[kind].bounds = bounds
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
            self._thread.start()

    def arrived(self, model: str, request_class: str, tenant: str) -> None:
        """Count a request whose body was read and understood."""
        at = self._clock()
        self._hand_over(lambda: self._counting(at).arrived(model, request_class, tenant, at))

    def ended(self, receipt: Receipt, own: Mapping[str, Any]) -> None:
        """Keep the record of a request that has just ended, and count it."""
        now = self._clock()
        ended = EndedRequest(receipt, now - receipt.total_s, now, own)
        self._hand_over(lambda: self._write_ended(ended))

    def waiting(self, groups: Iterable[Group]) -> None:
        """Note the requests that wait now; each has its tenant itself."""
        at = self._clock()
        self._hand_over(lambda: self._counting(at).waiting(groups, at))

    async def flush(self, since: float = 0.0) -> int | None:
        """Write what has been handed over until now, and what was counted. Returns how many records this router has
        lost; None: not all is written in time.

        Args:
            since: seconds since 1970; 0 is returned if it has lost none since then, or none that would still be kept.
        """
        if self._thread is None:
            return 0
        written = threading.Event()
        self._handed_over.append(lambda: self._flush(written))
        self._hurry.set()
        self._wake.set()
        if not await asyncio.to_thread(written.wait, FLUSH_S):
            return None
        oldest = self._clock() - self._files[RecordKind.REQUESTS].bounds.keep_s
        return self.lost_lines if self._lost_at >= max(since, oldest) else 0

    async def close(self) -> None:
        """Write all that has been handed over, once the last request has ended."""
        if self._thread is None:
            return
        self._is_closing = True
        self._hurry.set()
        self._wake.set()
        await asyncio.to_thread(self._thread.join, 2 * FLUSH_S)
        if self._thread.is_alive():
            logger.warning("Router %s ends before the disk has taken its last records, which are lost", self.router)

    def _hand_over(self, work: Callable[[], None]) -> None:
        if self._thread is None or not self.keeps:
            return
        if len(self._handed_over) >= MAX_HANDED_OVER:
            self.lost += 1
            return
        self._handed_over.append(work)
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            if self._wake.wait(MINUTE_S - self._clock() % MINUTE_S if self._book.has_counts else None):
                self._hurry.wait(GATHER_S)
            self._wake.clear()
            self._hurry.clear()
            is_last = self._is_closing
            try:
                self._work()
                if is_last:
                    self._end_minute()
                self._write_lines()
                self._sweeper.sweep()
            except Exception:
                logger.exception("Router %s lost a record of a request. Report this traceback", self.router)
        for file in self._files.values():
            file.close()

    def _work(self) -> None:
        while self._handed_over:
            self._handed_over.popleft()()
        if self._book.is_over(self._clock()):
            self._end_minute()

    def _write_ended(self, ended: EndedRequest) -> None:
        receipt = ended.receipt
        own = {"router": self.router, "node": self.node, **ended.own}
        line = msgspec.json.encode(record_fields(receipt, ended.at, own))
        kind = RecordKind.FAILURES if receipt.outcome in FAILED else RecordKind.REQUESTS
        self._lines[kind].append(line)
        self._counting(ended.ended_at).ended(receipt, ended.ended_at)

    def _counting(self, at: float) -> MinuteBook:
        """The book, for what happened at this time."""
        if self._book.is_over(at):
            self._end_minute()
        return self._book

    def _end_minute(self) -> None:
        if not self._book.has_counts:
            return
        self._book.tenants.known = self._count_tenants()
        counted = self._book.take(self._clock())
        self._lines[RecordKind.MINUTES].append(msgspec.json.encode({"router": self.router, **counted}))

    def _flush(self, written: threading.Event) -> None:
        self._end_minute()
        self._write_lines()
        written.set()

    def _write_lines(self) -> None:
        for kind, lines in self._lines.items():
            if lines:
                self._files[kind].write(lines)
                self._lines[kind] = []
        lost = self.lost_lines
        if lost > self._counted_lost:
            self._lost_at = self._clock()
        if self._count_lost is not None:
            self._count_lost(lost - self._counted_lost)
        self._counted_lost = lost

    @property
    def lost_lines(self) -> int:
        """Records that are lost: no disk took them."""
        return self.lost + sum(file.lost for file in self._files.values())
