"""The rows that one worker holds: claims them, sends as many as the pace allows, and hands their results on.

Invariant: a row that was claimed here ends in exactly one of: its result is stored, the store has it back, or its lease
ends with this process. A row is held until the store has answered; one that is held is not started a second time.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from serve_app.batch.calls import bounded, is_away, loop_time
from serve_app.batch.model_paces import RowSender
from serve_app.batch.result_writer import ResultWriter, Return, RowKey
from serve_app.batch.row_run import Ended, RowRun
from serve_app.core.batches import (
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    Pauses,
    WaitingRows,
    share_rows,
)
from serve_app.core.times import ROW_CLAIM_S, ROW_LEASE_S, ROW_RENEW_S
from serve_app.store import BatchStore

logger = logging.getLogger("ray.serve")

CLAIM_RETRY_S = 1.0
AHEAD_S = 1.0  # of ends: rows claimed before they may start, so that two claims a second feed any rate
ATTEMPT_DELAYS_S = (0.0, 1.0, 4.0)  # before a row's first, second and third attempt: an engine restarts in between
IDLE_LOOK_S = 0.5  # between looks without an event: pauses end, figures grow old
UNKNOWN_ROWS = 500  # of one look for rows that a lost claim may have
MAX_HELD_BYTES = 128 * 2**20  # bodies and answers of rows in flight, and results that are not stored yet
MAX_DELAYED_ROWS = 1000  # that wait for their next attempt; with more, nothing works and nothing more is claimed


@dataclass(slots=True, eq=False)
class HeldRow:
    """A row that this worker has claimed. `worker`: the name it was claimed by."""

    row: ClaimedRow
    batch: BatchRecord
    worker: str
    task: asyncio.Task[Ended] | None = None
    is_ending: bool = False  # a result or the row's return waits for the store


@dataclass(slots=True)
class ModelRows:
    """The rows of one model."""

    ready: deque[HeldRow] = field(default_factory=deque)
    delayed: int = 0
    held_by_tenant: Counter[str] = field(default_factory=Counter)


class RowFeed:
    """Claims, sends and ends rows.

    Args:
        name: of this worker; no other worker has ever had it.
        weights: of tenants.
        wall: seconds since 1970 UTC.
    """

    def __init__(
        self,
        name: str,
        store: BatchStore,
        run: RowRun,
        sender: RowSender,
        *,
        weights: Mapping[str, float],
        wall: Callable[[], float],
    ) -> None:
        self.writer = ResultWriter(store, self._on_stored)
        self.held: dict[RowKey, HeldRow] = {}
        self.on_idle: Callable[[], None] = lambda: None  # the last row that was held has left
        self._name = name
        self._store = store
        self._run = run
        self._sender = sender
        self._weights = weights
        self._wall = wall
        self._failed_claims = 0
        self._lost_claims: dict[str, str] = {}  # batches, by the name of a claim without an answer
        self._models: dict[str, ModelRows] = defaultdict(ModelRows)
        self._batches: dict[str, BatchRecord] = {}
        self._waiting: dict[tuple[str, str], int] = {}  # rows to claim, by batch and model
        self._pauses = Pauses()
        self._wake = asyncio.Event()
        self._sender.on_change = self._wake.set
        self._is_closing = False

    @property
    def in_flight(self) -> int:
        return self._sender.in_flight.total()

    def on_work(self, work: Iterable[BatchWork]) -> None:
        """The batches as they are now. Rows of a batch that no longer runs are given back; those in flight are stopped,
        except those of a batch that is cancelled."""
        now = self._wall()
        known = {one.batch.batch_id: one for one in work}
        running = {
            batch_id: one
            for batch_id, one in known.items()
            if one.batch.status is BatchStatus.IN_PROGRESS and one.batch.expires_at > now
        }
        self._batches = {batch_id: one.batch for batch_id, one in running.items()}
        self._waiting = {
            (batch_id, model): rows for batch_id, one in running.items() for model, rows in one.waiting.items()
        }
        for held in list(self.held.values()):
            batch_id = held.row.batch_id
            if batch_id in running or held.is_ending:
                continue
            is_cancelled = batch_id in known and known[batch_id].batch.status is BatchStatus.CANCELLING
            if held.task is None:
                self._give_back(held)
            elif not is_cancelled:
                held.task.cancel()
        self._wake.set()

    async def run(self) -> None:
        """Claim and start rows until cancelled."""
        while True:
            self._start_ready()
            if not self._is_closing and not await self._claim():
                await asyncio.sleep(CLAIM_RETRY_S)
            self._start_ready()
            try:
                async with asyncio.timeout(IDLE_LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            finally:
                self._wake.clear()

    async def renew(self) -> None:
        """Renew the leases of all rows held. Raises what the store raises."""
        for name, rows in Counter(held.worker for held in self.held.values()).items():
            renewed = await bounded(self._store.renew(name, ROW_LEASE_S), ROW_RENEW_S)
            if renewed > rows and name in self._lost_claims:
                await self._return_unknown(name, self._lost_claims[name])
        names = {held.worker for held in self.held.values()}
        self._lost_claims = {name: batch_id for name, batch_id in self._lost_claims.items() if name in names}

    async def _return_unknown(self, name: str, batch_id: str) -> None:
        """Give back the rows of a claim without an answer: `renew` renews them with the rows held under that name."""
        after = 0
        while rows := await bounded(self._store.unfinished(batch_id, after, UNKNOWN_ROWS)):
            keys = [(batch_id, row.number) for row in rows if (batch_id, row.number) not in self.held]
            await bounded(self._store.release_rows(name, keys, count_attempt=False))
            after = rows[-1].number

    async def close(self, bound_s: float) -> None:
        """Start no more rows, let those in flight end for `bound_s`, give back the rest."""
        self._is_closing = True
        for held in list(self.held.values()):
            if held.task is None and not held.is_ending:
                self._give_back(held)
        tasks = {held.task for held in self.held.values() if held.task is not None}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=bound_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    # claims

    async def _claim(self) -> bool:
        """Whether the store could be asked."""
        for model in sorted({model for (_, model), rows in self._waiting.items() if rows > 0}):
            rows = self._models[model]
            for batch_id, limit in self._next_claims(model, rows).items():
                if not await self._claim_of(self._batches[batch_id], model, rows, limit):
                    return False
                if self._is_closing:
                    return True
        return True

    def _next_claims(self, model: str, rows: ModelRows) -> dict[str, int]:
        """How many rows of which batch to claim now."""
        now = loop_time()
        ahead = min(math.ceil(self._sender.ends_per_s(model) * AHEAD_S), self._sender.max_in_flight)
        need = self._sender.may_start(model) - len(rows.ready)
        if (need <= 0 and len(rows.ready) > ahead // 2) or rows.delayed >= MAX_DELAYED_ROWS:
            return {}
        waiting = [
            WaitingRows(batch_id, self._batches[batch_id].tenant, self._batches[batch_id].created_at, count)
            for (batch_id, of_model), count in self._waiting.items()
            if of_model == model and not self._pauses.is_paused(self._batches[batch_id].payer, model, now)
        ]
        return share_rows(need + ahead, waiting, rows.held_by_tenant, self._weights)

    async def _claim_of(self, batch: BatchRecord, model: str, rows: ModelRows, limit: int) -> bool:
        # a claim without an answer may have rows: the next one has another name, so that this one has no new rows
        name = f"{self._name}:{self._failed_claims}"
        at = (batch.batch_id, model)
        try:
            claim = self._store.claim_rows(name, batch.batch_id, model, limit, ROW_LEASE_S)
            claimed = await bounded(claim, ROW_CLAIM_S)
        except Exception as error:
            self._lost_claims[name] = batch.batch_id
            self._failed_claims += 1
            if not is_away(error):
                logger.exception("Rows of batch %s cannot be claimed and wait. Report this traceback", batch.batch_id)
            else:
                cause = str(error) or type(error).__name__
                logger.warning("Rows of batch %s cannot be claimed and wait for the store: %s", batch.batch_id, cause)
            return False
        left = max(0, self._waiting.get(at, 0) - len(claimed)) if len(claimed) >= limit else 0
        if at in self._waiting:
            self._waiting[at] = left
        for row in claimed:
            self._hold(HeldRow(row, batch, name), rows)
        self._start_ready()
        return True

    def _hold(self, held: HeldRow, rows: ModelRows) -> None:
        key = held.row.batch_id, held.row.number
        if key in self.held:  # its lease had ended here: it goes on under the new one
            self.held[key].worker = held.worker
            if self.held[key].is_ending:  # what waits to go back has the former name
                self.writer.give_back(Return(held.worker, key, count_attempt=False))
            return
        self.held[key] = held
        rows.held_by_tenant[held.batch.tenant] += 1
        delay_s = ATTEMPT_DELAYS_S[min(held.row.attempts, len(ATTEMPT_DELAYS_S) - 1)]
        if self._is_closing or held.row.batch_id not in self._batches:
            self._give_back(held)
        elif delay_s:
            rows.delayed += 1
            asyncio.get_running_loop().call_later(delay_s, self._after_delay, held, rows)
        else:
            rows.ready.append(held)

    def _after_delay(self, held: HeldRow, rows: ModelRows) -> None:
        rows.delayed -= 1
        if not held.is_ending:
            rows.ready.append(held)
            self._wake.set()

    # rows in flight

    def _start_ready(self) -> None:
        for model, rows in self._models.items():
            places = self._sender.may_start(model)
            while rows.ready and (places or rows.ready[0].is_ending) and self._can_start(rows.ready[0]):
                held = rows.ready.popleft()
                if not held.is_ending:
                    places -= 1
                    self._start(held)
            waits = rows.ready and self._can_start(rows.ready[0])
            self._sender.wait(model, len(rows.ready) if waits else 0)

    def _start(self, held: HeldRow) -> None:
        self._sender.on_start(held.row.model)
        self._run.begin(held.row)
        held.task = asyncio.create_task(self._run.run(held.batch, held.row), name=f"row-{held.row.number}")
        # not in the task: one that is cancelled before its first step runs nothing
        held.task.add_done_callback(partial(self._on_done, held))

    def _can_start(self, held: HeldRow) -> bool:
        return not self._is_closing and (held.is_ending or self._has_room(held.row))

    def _has_room(self, row: ClaimedRow) -> bool:
        needed = self.writer.held_bytes + self._run.bytes_with(row)
        return needed <= MAX_HELD_BYTES or not (self.in_flight or self.writer.held_bytes)

    def _on_done(self, held: HeldRow, task: asyncio.Task[Ended]) -> None:
        self._run.end(held.row)
        self._sender.prepare_s = self._run.read_s
        self._sender.on_end(held.row.model)
        if task.cancelled():
            ended = Ended()
        elif (error := task.exception()) is not None:
            logger.error(
                "Row %d of batch %s failed inside the batch worker and runs again. Report this traceback",
                held.row.number,
                held.row.batch_id,
                exc_info=error,
            )
            ended = Ended(count_attempt=True)
        else:
            ended = task.result()
        self._on_end(held, ended)

    def _on_end(self, held: HeldRow, ended: Ended) -> None:
        """Hand a result on, or give the row back."""
        if ended.result is not None:
            held.is_ending = True
            self._models[held.row.model].held_by_tenant[held.batch.tenant] -= 1
            self.writer.add(ended.result)
        else:
            self._give_back(held, count_attempt=ended.count_attempt)
            if ended.pause_s:
                self._pause(held.batch.payer, held.row.model, ended.pause_s)
        self._start_ready()
        self._wake.set()

    def _pause(self, key: str, model: str, pause_s: float) -> None:
        """Send no rows of a key and a model for a time; other workers may have those that were ready. Other keys of its
        tenant have limits of their own."""
        self._pauses.pause(key, model, loop_time() + pause_s)
        for held in list(self._models[model].ready):
            if held.batch.payer == key and not held.is_ending:
                self._give_back(held)

    def _give_back(self, held: HeldRow, *, count_attempt: bool = False) -> None:
        held.is_ending = True
        key = held.row.batch_id, held.row.number
        self._models[held.row.model].held_by_tenant[held.batch.tenant] -= 1
        at = held.row.batch_id, held.row.model
        if at in self._waiting:
            self._waiting[at] += 1
        self.writer.give_back(Return(held.worker, key, count_attempt))

    def _on_stored(self, key: RowKey) -> None:
        self.held.pop(key, None)
        if not self.held:
            self.on_idle()
