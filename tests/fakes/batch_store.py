"""The store of batches in memory, files in memory, and a router with slots, for tests of the worker in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.batch.interfaces import RowAnswer
from serve_app.core.batches import (
    ENDED,
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    ModelFigures,
    NewRow,
    RowResult,
)
from serve_app.errors import NotFound, StoreAway, Unavailable
from tests.fakes.virtual_time import time_passes


@dataclass(slots=True)
class StoredRow:
    row: NewRow
    worker: str | None = None
    leased_until: float = 0.0
    attempts: int = 0
    result: RowResult | None = None


class BatchTables:
    """What the database holds, with every call as one transaction."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.files_: dict[str, FileRecord] = {}
        self.removed_at: dict[str, float] = {}  # by file
        self.batches: dict[str, BatchRecord] = {}
        self.rows: dict[str, dict[int, StoredRow]] = defaultdict(dict)
        self.claims: Counter[tuple[str, int]] = Counter()
        self.leases: dict[str, tuple[str, float]] = {}  # worker and end, by batch

    def add_file(self, record: FileRecord) -> FileRecord:
        return self.files_.setdefault(record.file_id, record)

    def finish_file(self, file_id: str, size: int, max_tenant_bytes: int | None = None) -> FileRecord:
        self.files_[file_id] = replace(self.file(file_id, None), size=size)
        return self.files_[file_id]

    def file(self, file_id: str, tenant: str | None) -> FileRecord:
        record = self.files_[file_id]
        if record.deleted_at is not None or tenant not in (None, record.tenant):
            raise KeyError(file_id)
        return record

    def files_to_remove(self, now: float, limit: int) -> list[FileRecord]:
        inputs = {one.input_file_id for one in self.batches.values() if one.status not in ENDED}
        over = [
            one
            for one in self.files_.values()
            if (one.deleted_at is not None or (one.expires_at or now + 1) <= now) and one.file_id not in inputs
        ]
        return [one for one in over if one.file_id not in self.removed_at][:limit]

    def delete_file(self, file_id: str, tenant: str, now: float) -> FileRecord:
        self.files_[file_id] = replace(self.file(file_id, tenant), deleted_at=now)
        return self.files_[file_id]

    def content_removed(self, file_id: str, now: float) -> None:
        self.removed_at.setdefault(file_id, now)

    def forget_records(self, before: float, limit: int) -> int:
        files = [file_id for file_id, at in self.removed_at.items() if at <= before][:limit]
        for file_id in files:
            del self.files_[file_id], self.removed_at[file_id]
        ended = [one for one in self.batches.values() if one.status in ENDED]
        over = [one.batch_id for one in ended if (one.completed_at or one.failed_at or before + 1) <= before][:limit]
        for batch_id in over:
            del self.batches[batch_id]
        return len(files) + len(over)

    def create_batch(self, record: BatchRecord, **request: bytes | None) -> BatchRecord:
        return self.batches.setdefault(record.batch_id, record)

    def batch(self, batch_id: str, tenant: str | None) -> BatchRecord:
        return self.batches[batch_id]

    def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> None:
        if self.batches[batch_id].status is BatchStatus.VALIDATING:
            for row in rows:
                self.rows[batch_id].setdefault(row.number, StoredRow(row))

    def change_batch(self, batch_id: str, *, if_status: Sequence[BatchStatus], **fields: Any) -> BatchRecord | None:
        batch = self.batches[batch_id]
        if batch.status not in if_status:
            return batch if replace(batch, **fields) == batch else None
        self.batches[batch_id] = replace(batch, **fields)
        if "status" in fields:
            self.leases.pop(batch_id, None)
        return self.batches[batch_id]

    def lease_batch(self, batch_id: str, status: BatchStatus, worker: str, lease_s: float) -> bool:
        owner, until = self.leases.get(batch_id, (worker, 0.0))
        if self.batches[batch_id].status is not status or (owner != worker and until > self._wall()):
            return False
        self.leases[batch_id] = worker, self._wall() + lease_s
        return True

    def work(self) -> list[BatchWork]:
        found = []
        for batch in self.batches.values():
            if batch.status not in ENDED:
                open_rows = [row for row in self.rows[batch.batch_id].values() if row.result is None]
                waiting = Counter(row.row.model for row in open_rows if row.leased_until <= self._wall())
                running = sum(1 for row in open_rows if row.leased_until > self._wall())
                found.append(BatchWork(batch, waiting, running))
        return found

    def claim_rows(self, worker: str, batch_id: str, model: str, limit: int, lease_s: float) -> list[ClaimedRow]:
        if self.batches[batch_id].status is not BatchStatus.IN_PROGRESS:
            return []
        now = self._wall()
        free = [
            row
            for row in self.rows[batch_id].values()
            if row.row.model == model and row.result is None and row.leased_until <= now
        ]
        claimed = sorted(free, key=lambda row: (row.row.prefix, row.row.number))[:limit]
        for row in claimed:
            row.worker = worker
            row.leased_until = now + lease_s
            self.claims[batch_id, row.row.number] += 1
        return [_claimed(batch_id, row) for row in claimed]

    def renew(self, worker: str, lease_s: float) -> int:
        of_worker = [row for rows in self.rows.values() for row in rows.values() if row.worker == worker]
        now = self._wall()
        renewed = [row for row in of_worker if row.result is None and row.leased_until > now]
        for row in renewed:
            row.leased_until = now + lease_s
        return len(renewed)

    def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> None:
        for batch_id, number in rows:
            row = self.rows[batch_id].get(number)
            if row is not None and row.worker == worker and row.result is None:
                row.worker = None
                row.leased_until = 0.0
                row.attempts += count_attempt

    def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]:
        written = []
        for result in results:
            row = self.rows[result.batch_id].get(result.number)
            if row is None or row.result is not None:
                continue
            row.result = result
            row.leased_until = 0.0
            batch = self.batches[result.batch_id]
            counts = {"failed": batch.failed + 1} if result.is_failed else {"completed": batch.completed + 1}
            self.batches[result.batch_id] = replace(batch, **counts)
            written.append((result.batch_id, result.number))
        return written

    def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]:
        found = [
            row.result
            for number, row in sorted(self.rows[batch_id].items())
            if number > after and row.result is not None and row.result.is_failed == failed
        ]
        return found[:limit]

    def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]:
        rows = sorted(self.rows[batch_id].items())
        return [_claimed(batch_id, row) for number, row in rows if number > after and row.result is None][:limit]

    def forget_rows(self, batch_id: str) -> None:
        self.rows.pop(batch_id, None)


def _claimed(batch_id: str, row: StoredRow) -> ClaimedRow:
    new = row.row
    return ClaimedRow(batch_id, new.number, new.offset, new.length, new.custom_id, new.model, row.attempts)


class FakeBatchStore:
    """The tables as one process reaches them: each call takes its time before and after it counts. `is_away`: it fails,
    half of the times after it counted. `loses_claims`: claims count, and fail. `is_dead`: the process has ended, and no
    call of it counts any more."""

    def __init__(self, tables: Any, source: random.Random, latency_s: float = 0.005) -> None:
        self.is_away = self.is_dead = self.loses_claims = False
        self._tables = tables
        self._random = source
        self._latency_s = latency_s

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            await self._way()
            if self.is_away and self._random.random() < 0.5:
                raise StoreAway("the store is away")
            answer = getattr(self._tables, method)(*arguments, **named)
            if inspect.isawaitable(answer):
                answer = await answer
            if self.is_away or (method == "claim_rows" and self.loses_claims):
                raise StoreAway("the store is away")
            await self._way()
            return answer

        return call

    async def _way(self) -> None:
        await time_passes(self._random.expovariate(1 / self._latency_s))
        if self.is_dead:
            await asyncio.get_running_loop().create_future()


class FakeFiles:
    """Files in memory, complete or not there. `largest`: bytes of the largest piece that was written. `reads`: by name,
    offset and length."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.is_away = False
        self.largest = 0
        self.latency_s = 0.001
        self.reads: Counter[tuple[str, int, int]] = Counter()
        self.writes: Counter[str] = Counter()

    async def write(self, name: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        self.writes[name] += 1
        content = b""
        async for chunk in chunks:
            await time_passes(self.latency_s)
            self.largest = max(self.largest, len(chunk))
            content += chunk
        self._check()
        self.files[name] = content
        return len(content)

    async def read(self, name: str, offset: int, length: int) -> bytes:
        self.reads[name, offset, length] += 1
        await time_passes(self.latency_s)
        self._check()
        if name not in self.files:
            raise NotFound(f"no file {name}")
        return self.files[name][offset : offset + length]

    async def size(self, name: str) -> int:
        return len(self.files[name])

    async def delete(self, name: str) -> None:
        self._check()
        self.files.pop(name, None)

    def _check(self) -> None:
        if self.is_away:
            raise StoreAway("the files are away")


class FakeRouter:
    """Runs rows in the slots of their models, and joins repeats of a key. A row says in its body what happens to it:
    `seconds`, `answers` (statuses one after another; the last one stays), `bytes` of its answer, its error `code`."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self.busy: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.max_busy: Counter[str] = Counter()
        self.max_waiting: Counter[str] = Counter()
        self.started: list[tuple[str, str]] = []  # tenant and custom_id of each run, in order
        self.runs: Counter[str] = Counter()  # by custom_id
        self.retry_after_s: float | None = 2.0
        self.refused_at: list[float] = []
        self.is_away = False
        self._running: dict[str, asyncio.Task[RowAnswer]] = {}
        self._freed = asyncio.Event()

    async def run(self, batch: BatchRecord, path: str, body: bytes, key: str) -> RowAnswer:
        if self.is_away:
            raise Unavailable("no router")
        if key not in self._running:
            name = json.loads(body)["name"]
            call = self._answer(batch.tenant, json.loads(body), name)
            # it goes on when its caller dies
            self._running[key] = asyncio.get_running_loop().create_task(call, context=contextvars.Context())
        answer = await asyncio.shield(self._running[key])
        if answer.status >= 500 or answer.status == 429:  # no such answer is kept
            self._running.pop(key, None)
        return answer

    def set_slots(self, model: str, slots: int) -> None:
        self.slots[model] = slots
        self._freed.set()

    async def close(self) -> None:
        """Stop the runs that no worker waits for any more."""
        left = [task for task in self._running.values() if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def get(self) -> Mapping[str, ModelFigures]:
        await time_passes(0.005)
        if self.is_away:
            raise Unavailable("no router")
        return {
            model: ModelFigures(slots, self.busy[model], self.waiting[model], self.waiting[model])
            for model, slots in self.slots.items()
        }

    async def _answer(self, tenant: str, body: dict[str, Any], name: str) -> RowAnswer:
        answers = body.get("answers", [200])
        status = answers[min(self.runs[name], len(answers) - 1)]
        self.runs[name] += 1
        if status in (429, 503):
            self.refused_at.append(asyncio.get_running_loop().time())
            return RowAnswer(status, b'{"error":{"code":"later"}}', self.retry_after_s)
        model = body["model"]
        self.waiting[model] += 1
        self.max_waiting[model] = max(self.max_waiting[model], self.waiting[model])
        try:
            while self.busy[model] >= self.slots.get(model, 1):
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.waiting[model] -= 1
        self.busy[model] += 1
        self.max_busy[model] = max(self.max_busy[model], self.busy[model])
        self.started.append((tenant, name))
        try:
            await time_passes(body.get("seconds", 0.2))
        finally:
            self.busy[model] -= 1
            self._freed.set()
        reported: dict[str, Any] = {"name": name, "text": "x" * body.get("bytes", 10)}
        if "code" in body:
            reported = {"error": {"code": body["code"]}}
        return RowAnswer(status, json.dumps(reported).encode())
