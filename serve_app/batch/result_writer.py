"""Stores the results of rows in groups, and gives back the rows that have none yet.

Invariant: a result, and the return of a row, leaves memory only when the store has answered; `on_stored` is called
then, once for each. `held_bytes` are the bytes of the results that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.batch.calls import until_answered
from serve_app.batch.result_lines import refused_result
from serve_app.core.batches import RowResult
from serve_app.store import BatchStore

logger = logging.getLogger("ray.serve")

GROUP_S = 0.05  # a commit takes milliseconds on a disk: twenty a second leave it to others
GROUP_ROWS = 100
GROUP_BYTES = 4 * 2**20  # of one call: the store's actor and the database hold them whole

RowKey = tuple[str, int]  # batch, number


@dataclass(frozen=True, slots=True)
class Return:
    """A row that goes back to the store without a result."""

    worker: str  # the name that it was claimed by
    key: RowKey
    count_attempt: bool


class ResultWriter:
    """One task, `run`, makes all calls.

    Args:
        on_stored: a row is no longer held here.
    """

    def __init__(self, store: BatchStore, on_stored: Callable[[RowKey], None]) -> None:
        self.held_bytes = 0
        self._store = store
        self._on_stored = on_stored
        self._results: deque[RowResult] = deque()
        self._returns: list[Return] = []
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def add(self, result: RowResult) -> None:
        self.held_bytes += len(result.line)
        self._results.append(result)
        if len(self._results) >= GROUP_ROWS or self.held_bytes >= GROUP_BYTES:
            self._full.set()
        self._woken()

    def give_back(self, row: Return) -> None:
        self._returns.append(row)
        self._woken()

    def _woken(self) -> None:
        self._empty.clear()
        self._wake.set()

    async def wait_empty(self, bound_s: float) -> None:
        """Raises TimeoutError: the store has not answered for everything within `bound_s`."""
        self._full.set()
        async with asyncio.timeout(bound_s):
            await self._empty.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wake.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GROUP_S):
                    await self._full.wait()
            self._full.clear()
            self._wake.clear()
            while self._results or self._returns:
                await self._store_group()
                await self._return_rows()
            self._empty.set()

    async def _store_group(self) -> None:
        group = list[RowResult]()
        size = 0
        while self._results and len(group) < GROUP_ROWS and (not group or size < GROUP_BYTES):
            group.append(self._results.popleft())
            size += len(group[-1].line)
        if group:
            await self._store_all(group)

    async def _store_all(self, group: list[RowResult]) -> None:
        """Store a group. If the store refuses it, each result alone, and instead of a refused one an error."""
        try:
            await until_answered(lambda: self._store.add_results(group), f"storing {len(group)} results")
        except Exception:
            logger.info("Store refused a group of %d results; each is stored alone now", len(group), exc_info=True)
            for result in group:
                await self._store_one(result)
        for result in group:
            self.held_bytes -= len(result.line)
            self._on_stored((result.batch_id, result.number))

    async def _store_one(self, result: RowResult) -> None:
        for form in (result, refused_result(result)):
            try:
                await until_answered(
                    functools.partial(self._store.add_results, [form]), f"storing a result of batch {result.batch_id}"
                )
            except Exception:
                logger.exception(
                    "Store refused the result of row %d of batch %s, which gets an error. Report this traceback",
                    result.number,
                    result.batch_id,
                )
            else:
                return

    async def _return_rows(self) -> None:
        returns, self._returns = self._returns, []
        for count_attempt in (False, True):
            for worker in {one.worker for one in returns}:
                keys = [one.key for one in returns if one.worker == worker and one.count_attempt == count_attempt]
                if keys:
                    await self._return_group(worker, keys, count_attempt)
                for key in keys:
                    self._on_stored(key)

    async def _return_group(self, worker: str, keys: list[RowKey], count_attempt: bool) -> None:
        try:
            await until_answered(
                lambda: self._store.release_rows(worker, keys, count_attempt=count_attempt),
                f"giving back {len(keys)} rows of {worker}",
            )
        except Exception:  # their lease ends by itself
            logger.exception(
                "Store refused %d rows that worker %s gave back; they run after their lease. Report this traceback",
                len(keys),
                worker,
            )
