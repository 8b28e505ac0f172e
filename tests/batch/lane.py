"""A batch lane in virtual time: one store, files, a router, and workers that are killed and started."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.batch.model_paces import ModelPaces
from serve_app.batch.worker import BatchWorker, WorkerOptions
from serve_app.core.batches import ENDED, BatchRecord, BatchStatus, FileRecord
from serve_app.store.batch_store import sent_by
from serve_app.store.sql import SqlStore
from tests.fakes.batch_store import BatchTables, FakeBatchStore, FakeFiles, FakeRouter
from tests.fakes.databases import with_tables
from tests.fakes.virtual_time import run_in_virtual_time, time_passes

BEGIN = 1_700_000_000.0  # of the wall clock
ENDPOINT = "/v1/chat/completions"
WINDOW_S = 86400.0
OF_WORKER: contextvars.ContextVar[int] = contextvars.ContextVar("of_worker")

Row = Mapping[str, Any]


def scenario(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_in_virtual_time(play(), bound_s=100 * 86400.0)


def wall() -> float:
    return BEGIN + asyncio.get_running_loop().time()


class Lane:
    """Args: slots: of each model; folder: of a real SQLite file, instead of tables in memory; the rest as
    `ModelPaces` or `WorkerOptions` has it."""

    def __init__(
        self, slots: Mapping[str, int] | None = None, *, seed: int = 1, folder: Path | None = None, **options: Any
    ) -> None:
        self.random = random.Random(seed)
        self.tables: Any = BatchTables(wall)
        if folder is not None:
            file = with_tables(folder / f"{seed}-{uuid.uuid4().hex}.sqlite")
            self.tables = SqlStore(f"sqlite:///{file}", wall).batches
            self._reached = sent_by(self._call)
        else:
            self._reached = self.tables
        self.files = FakeFiles()
        self.router = FakeRouter(slots or {"small": 8})
        self.pace = {name: options.pop(name, usual) for name, usual in {"max_in_flight": 64, "workers": 1}.items()}
        kept: dict[str, Any] = {"files_keep_s": 1000.0, "records_keep_s": 1e6}
        self.options = WorkerOptions(**{"max_rows": 1000} | kept | options)
        self.workers: dict[int, tuple[BatchWorker, FakeBatchStore]] = {}
        self.started = 0
        self.tasks: dict[int, set[asyncio.Task[Any]]] = defaultdict(set)
        asyncio.get_running_loop().set_task_factory(self._new_task)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.tables, method.removeprefix("batches."))(*arguments, **named)

    def _new_task(self, loop: Any, coroutine: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        """A task, remembered as one of its worker's process."""
        task = asyncio.Task(coroutine, loop=loop, context=context)
        number = OF_WORKER.get(0) if context is None else context.get(OF_WORKER, 0)
        self.tasks[number or 0].add(task)
        task.add_done_callback(self.tasks[number or 0].discard)
        return task

    def start(self, **named: Any) -> int:
        """Start a worker; its number."""
        self.started += 1
        number = self.started
        store = FakeBatchStore(self._reached, self.random)
        context = contextvars.copy_context()
        context.run(OF_WORKER.set, number)

        def begin() -> BatchWorker:
            paces = ModelPaces(self.router, **self.pace)
            worker = BatchWorker(store, self.files, self.router, paces, self.options, wall=wall, **named)
            worker.start()
            return worker

        self.workers[number] = context.run(begin), store
        return number

    async def kill(self, number: int) -> None:
        """End a worker as SIGKILL does: nothing of it counts any more."""
        _, store = self.workers.pop(number)
        store.is_dead = True
        tasks = set(self.tasks[number])
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        for worker, _ in self.workers.values():
            await worker.close(30.0)
        self.workers.clear()

    async def end(self) -> None:
        await self.close()
        await self.router.close()

    def submit(self, rows: Sequence[Row], *, name: str = "a", window_s: float = WINDOW_S, **fields: Any) -> str:
        """Add a batch of bodies; its id. Row `n` has the custom_id `NAME-n`."""
        bodies = [{"model": "small", "name": f"{name}-{n}"} | dict(row) for n, row in enumerate(rows)]
        lines = [
            json.dumps({"custom_id": body["name"], "method": "POST", "url": ENDPOINT, "body": body}) for body in bodies
        ]
        return self.submit_text("\n".join(lines), name=name, window_s=window_s, **fields)

    def submit_text(self, text: str, *, name: str = "a", window_s: float = WINDOW_S, **fields: Any) -> str:
        file_id = f"file-{name}"
        batch_id = f"batch_{name}"
        self.files.files[file_id] = text.encode()
        self.tables.add_file(FileRecord(file_id, "team", "key", "in.jsonl", "batch", len(text), wall(), None))
        given = {
            "batch_id": batch_id,
            "tenant": "team",
            "key_id": "key",
            "endpoint": ENDPOINT,
            "input_file_id": file_id,
            "completion_window": "24h",
            "status": BatchStatus.VALIDATING,
            "created_at": wall(),
            "expires_at": wall() + window_s,
            "metadata": {},
        }
        self.tables.create_batch(BatchRecord(**given | fields))
        return batch_id

    def batch(self, batch_id: str) -> BatchRecord:
        record: BatchRecord = self.tables.batch(batch_id, None)
        return record

    async def ended(self, *batch_ids: str, bound_s: float = 2 * WINDOW_S) -> list[BatchRecord]:
        """Wait until the batches are in a last status."""
        async with asyncio.timeout(bound_s):
            while not all(self.batch(batch_id).status in ENDED for batch_id in batch_ids):
                await time_passes(0.5)
        return [self.batch(batch_id) for batch_id in batch_ids]

    def rows_left(self, batch_id: str) -> bool:
        """Whether the store still has rows of a batch, with or without a result."""
        results = [self.tables.results(batch_id, failed=failed, after=0, limit=1) for failed in (False, True)]
        return bool(self.tables.unfinished(batch_id, 0, 1) or results[0] or results[1])

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [] if file_id is None else [json.loads(line) for line in self.files.files[file_id].splitlines()]

    def assert_complete(self, batch: BatchRecord, rows: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """No row is missing, none is there twice, both files are in order, counts are right, no row is left. Returns
        the lines of the output and the error file."""
        output = self.lines(batch.output_file_id)
        errors = self.lines(batch.error_file_id)
        prefix = batch.batch_id.removeprefix("batch_")
        numbers = [[int(line["custom_id"].removeprefix(f"{prefix}-")) for line in lines] for lines in (output, errors)]
        assert numbers == [sorted(numbers[0]), sorted(numbers[1])]
        assert sorted(numbers[0] + numbers[1]) == list(range(rows))
        assert (batch.total, batch.completed, batch.failed) == (rows, len(output), len(errors))
        assert len({line["id"] for line in output + errors}) == rows
        assert not self.rows_left(batch.batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                assert self.tables.file(file_id, None).size == len(self.files.files[file_id])
        for line in output:
            assert line["response"]["body"]["name"] == line["custom_id"]
        return output, errors
