"""A worker of the batch lane: validates new batches, runs their rows, writes their files, and ends them.

Invariant: everything here may be killed at any moment and done again by this worker or another one: what is decided is
in the store, and a call of the store repeated changes nothing. While the store, the files or the routers are away, the
worker waits and goes on; nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from serve_app.batch.calls import RETRY_S, bounded, is_away, loop_time, until_answered
from serve_app.batch.files import FileStorage
from serve_app.batch.interfaces import ModelCheck, RowRunner
from serve_app.batch.model_paces import ModelPaces
from serve_app.batch.result_files import Finalization
from serve_app.batch.row_feed import RowFeed
from serve_app.batch.row_run import RowRun
from serve_app.batch.validation import Validation
from serve_app.core.batches import BatchRecord, BatchStatus, BatchWork, RowError
from serve_app.core.times import ROW_LEASE_S, ROW_RENEW_S
from serve_app.errors import BatchConflict
from serve_app.store import BatchStore

logger = logging.getLogger("ray.serve")

Change = Callable[[BatchRecord], Awaitable[None]]

# A look takes a fifth of the time at most. One for 3,000 batches took half a second of the store's process, and each
# change asks for the next: without a rest the changes themselves got one call of it in a second.
LOOK_REST = 4.0
WORK_EVERY_S = 1.0  # between looks for new batches: what a batch waits at most before it is validated
SWEEP_EVERY_S = 60.0  # files live for days
SWEEP_FILES = 100
SWEEP_RECORDS = 500  # of files and of batches, in one transaction: SQLite's other writers wait for milliseconds
CANCEL_WAIT_S = 600.0  # as OpenAI: rows in flight of a cancelled batch may end for ten minutes
CHANGES_AT_ONCE = 4  # batches that are validated or ended at the same time: each has some MB in memory
CHANGE_RETRY_S = 10.0  # after an error of ours, then twice as long each time
CHANGE_ATTEMPTS = 10  # then the batch fails: 85 minutes, in which an operator can mend what all batches fail by
MAX_REASON_CHARS = 300  # of an error in the record of a batch
CLOSE_S = 10.0  # for rows in flight at a normal end; those that run on are joined by the next worker
CLOSE_STORE_S = 5.0  # for their results, after that


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What can be configured.

    Args:
        files_keep_s: how long output and error files are kept.
        records_keep_s: how long the records of deleted files and of ended batches are kept.
        weights: of tenants; 1.0 where one is missing.
    """

    max_rows: int
    files_keep_s: float
    records_keep_s: float
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failures:
    """The changes of a batch in one status that failed, and when the next one may begin."""

    status: BatchStatus
    count: int
    not_before: float


class BatchWorker:
    """One worker; `start`, and `close` at a normal end.

    Args:
        paces: followed while this worker runs.
        models: see `Validation`.
        wall: seconds since 1970 UTC, as the store's.
    """

    def __init__(
        self,
        store: BatchStore,
        files: FileStorage,
        runner: RowRunner,
        paces: ModelPaces,
        options: WorkerOptions,
        *,
        models: ModelCheck | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._paces = paces
        self._models = models
        self._options = options
        self._wall = wall
        self.name = f"worker-{uuid.uuid4().hex}"
        self.feed = RowFeed(
            self.name,
            store,
            RowRun(files, runner, wall),
            paces.sender(),
            weights=options.weights,
            wall=wall,
        )
        self._kick = asyncio.Event()  # look for work now
        self.feed.on_idle = self._kick.set
        self._wanted: dict[str, deque[tuple[BatchRecord, Change]]] = {}  # by tenant, the oldest batch first
        self._changes: dict[str, asyncio.Task[None]] = {}  # validations and ends, by batch
        self._leased: dict[str, BatchRecord] = {}  # those of them that are not at another worker
        self._changing: Counter[str] = Counter()  # how many of each tenant
        self._touched: set[str] = set()  # since the last look began: it may have read what they were before
        self._failures: dict[str, Failures] = {}  # of the changes of a batch, since its last status
        self._loops: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        steps: dict[str, tuple[Callable[[], Awaitable[None]], float]] = {
            "work": (self._look, WORK_EVERY_S),
            "leases": (self._renew, ROW_RENEW_S),
            "files": (self._sweep, SWEEP_EVERY_S),
        }
        self._loops = {
            name: asyncio.create_task(self._repeat(name, step, every_s), name=f"batch-{name}")
            for name, (step, every_s) in steps.items()
        }
        self._loops["paces"] = asyncio.create_task(self._paces.run(), name="batch-paces")
        self._loops["rows"] = asyncio.create_task(self.feed.run(), name="batch-rows")
        self._loops["results"] = asyncio.create_task(self.feed.writer.run(), name="batch-results")

    async def close(self, bound_s: float = CLOSE_S) -> None:
        """Claim nothing more, let rows in flight end for `bound_s`, store their results, give back all others."""
        deciding = [self._loops.pop(name) for name in ("work", "paces", "files") if name in self._loops]
        self._wanted = {}
        for task in [*deciding, *self._changes.values()]:
            task.cancel()
        await self.feed.close(bound_s)
        try:
            await self.feed.writer.wait_empty(CLOSE_STORE_S)
        except TimeoutError:
            logger.warning(
                "Batch worker %s ends while the store does not answer; %d rows run again",
                self.name,
                len(self.feed.held),
            )
        tasks = [*deciding, *self._loops.values(), *self._changes.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._loops = {}

    async def _repeat(self, name: str, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Take a step again and again; one that fails is repeated soon."""
        failures = 0
        while True:
            began = loop_time()
            try:
                await step()
                failures = 0
                wait_s = every_s
            except Exception as error:
                failures += 1
                wait_s = min(every_s, RETRY_S * 2.0 ** min(failures, 10))
                if not is_away(error):
                    logger.exception(
                        "Batch worker: the step %r failed and will be retried in %.1f s. Report this traceback",
                        name,
                        wait_s,
                    )
                elif failures == 1:
                    cause = str(error) or type(error).__name__
                    logger.warning(
                        "Batch worker: the step %r failed and will be retried in %.1f s: %s", name, wait_s, cause
                    )
            if name != "work":
                await asyncio.sleep(wait_s)
                continue
            await asyncio.sleep(LOOK_REST * (loop_time() - began))
            try:
                async with asyncio.timeout(wait_s):
                    await self._kick.wait()
            except TimeoutError:
                continue
            finally:
                self._kick.clear()

    async def _look(self) -> None:
        """Read which batches there are; begin what each of them needs."""
        self._touched = set(self._changes)
        work = await bounded(self._store.work())
        self.feed.on_work(work)
        now = loop_time()
        self._wanted = {}
        for item in work:
            batch = item.batch
            if batch.batch_id in self._touched or now < self._not_before(batch):
                continue
            change = self._next_change(item)
            if change is not None:
                self._wanted.setdefault(batch.tenant, deque()).append((batch, change))
        known = {one.batch.batch_id for one in work}
        self._failures = {batch_id: found for batch_id, found in self._failures.items() if batch_id in known}
        self._begin_changes()

    def _begin_changes(self) -> None:
        """Of the tenant first that has the fewest under way: nobody waits for another one's thousand batches."""
        while self._wanted and len(self._changes) < CHANGES_AT_ONCE:
            tenant = min(self._wanted, key=self._changing.__getitem__)
            batch, change = self._wanted[tenant].popleft()
            if not self._wanted[tenant]:
                del self._wanted[tenant]
            self._changing[tenant] += 1
            self._touched.add(batch.batch_id)
            task = asyncio.create_task(self._change(batch, change), name=f"{batch.status}-{batch.batch_id}")
            self._changes[batch.batch_id] = task

    def _next_change(self, work: BatchWork) -> Change | None:
        """What brings a batch on; None: its rows, or nothing now."""
        batch = work.batch
        now = self._wall()
        if batch.status is BatchStatus.VALIDATING:
            return self._expire_early if batch.expires_at <= now else self._validate
        if batch.status is BatchStatus.IN_PROGRESS:
            is_done = batch.completed + batch.failed >= batch.total
            return self._finalize if is_done or batch.expires_at <= now else None
        if batch.status is BatchStatus.CANCELLING:
            is_over = now >= (batch.cancelling_at or batch.created_at) + CANCEL_WAIT_S
            return self._end if not work.running or is_over else None
        return self._end

    async def _change(self, batch: BatchRecord, change: Change) -> None:
        try:
            if await until_answered(lambda: self._lease(batch), f"leasing batch {batch.batch_id}"):
                self._leased[batch.batch_id] = batch
                await change(batch)
        except Exception as error:  # noqa: BLE001  logged there
            await self._on_failure(batch, error)
        finally:
            del self._changes[batch.batch_id]
            self._changing[batch.tenant] -= 1
            self._begin_changes()
            if self._leased.pop(batch.batch_id, None) is not None:
                self._kick.set()

    def _not_before(self, batch: BatchRecord) -> float:
        """When its next change may begin; at once in a new status, such as that of a cancel."""
        failures = self._failures.get(batch.batch_id)
        return -math.inf if failures is None or failures.status is not batch.status else failures.not_before

    async def _on_failure(self, batch: BatchRecord, error: Exception) -> None:
        """A change has failed by no fault of the store or the files: try it again, a bounded number of times."""
        before = self._failures.get(batch.batch_id)
        count = 1 if before is None or before.status is not batch.status else before.count + 1
        wait_s = CHANGE_RETRY_S * 2.0 ** (count - 1)
        self._failures[batch.batch_id] = Failures(batch.status, min(count, CHANGE_ATTEMPTS), loop_time() + wait_s)
        if count < CHANGE_ATTEMPTS:
            logger.exception(
                "Batch %s could not leave the status %s and will be retried in %d s. Report this traceback",
                batch.batch_id,
                batch.status,
                wait_s,
            )
            return
        logger.exception(
            "Batch %s could not leave the status %s in %d attempts and fails. Report this traceback",
            batch.batch_id,
            batch.status,
            count,
        )
        reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS]
        message = f"this batch could not leave the status {batch.status} in {count} attempts, the last one: {reason}"
        errors = (RowError("internal_error", message),)
        try:
            if await self._set(batch, status=BatchStatus.FAILED, failed_at=self._wall(), errors=errors) is not None:
                await until_answered(
                    lambda: self._store.forget_rows(batch.batch_id),
                    f"deleting the rows of failed batch {batch.batch_id}",
                )
        except Exception:
            logger.exception(
                "Batch %s could not be set to failed and stays %s. Report this traceback", batch.batch_id, batch.status
            )

    def _lease(self, batch: BatchRecord) -> Awaitable[bool]:
        """Whether this worker may bring a batch on; two at once would do the same work twice."""
        return self._store.lease_batch(batch.batch_id, batch.status, self.name, ROW_LEASE_S)

    async def _renew(self) -> None:
        """Renew the leases of rows and batches; a batch that another worker has meanwhile is left to it."""
        await self.feed.renew()
        for batch_id, batch in list(self._leased.items()):
            if not await bounded(self._lease(batch), ROW_RENEW_S) and self._leased.get(batch_id) is batch:
                self._changes[batch_id].cancel()

    async def _validate(self, batch: BatchRecord) -> None:
        options = self._options
        await Validation(batch, self._store, self._files, self._models, options.max_rows, self._wall).run()

    async def _expire_early(self, batch: BatchRecord) -> None:
        """Its window is over before it is validated: it has no results."""
        await until_answered(
            lambda: self._store.forget_rows(batch.batch_id), f"deleting the rows of expired batch {batch.batch_id}"
        )
        await self._set(batch, status=BatchStatus.EXPIRED, expired_at=self._wall())

    async def _finalize(self, batch: BatchRecord) -> None:
        """All rows have results, or the window is over."""
        now = self._wall()
        is_done = batch.completed + batch.failed >= batch.total
        await self._set(
            batch, status=BatchStatus.FINALIZING, finalizing_at=now, **({} if is_done else {"expired_at": now})
        )

    async def _set(self, batch: BatchRecord, **fields: object) -> BatchRecord | None:
        return await until_answered(
            lambda: self._store.change_batch(batch.batch_id, if_status=[batch.status], **fields),
            f"storing the status of batch {batch.batch_id}",
        )

    async def _end(self, batch: BatchRecord) -> None:
        await Finalization(batch, self._store, self._files, self._options.files_keep_s, self._wall).run()

    async def _sweep(self) -> None:
        """Remove files whose time is over, what is left of deleted ones, and old records."""
        now = self._wall()
        for record in await bounded(self._store.files_to_remove(now, SWEEP_FILES)):
            if record.deleted_at is None:
                try:
                    await bounded(self._store.delete_file(record.file_id, record.tenant, now))
                except (KeyError, BatchConflict):  # another worker, its owner, or a new batch was first
                    continue
            await bounded(self._files.delete(record.file_id))
            await bounded(self._store.content_removed(record.file_id, now))
        await bounded(self._store.forget_records(now - self._options.records_keep_s, SWEEP_RECORDS))
