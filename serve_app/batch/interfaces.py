"""What a worker needs of the rest of the system: the store, the files, a way to run a row, the queues' figures."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.core.batches import (
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    ModelFigures,
    NewRow,
    RowError,
    RowResult,
)


class BatchStore(Protocol):
    """Batches, rows and files in the database. Each call may be repeated; each raises StoreAway."""

    async def add_file(self, record: FileRecord) -> Any: ...
    async def finish_file(self, file_id: str, size: int) -> Any: ...
    async def file(self, file_id: str, tenant: str | None) -> FileRecord: ...
    async def expired_files(self, now: float, limit: int) -> list[FileRecord]: ...
    async def delete_file(self, file_id: str, tenant: str, now: float) -> Any: ...
    async def batch(self, batch_id: str, tenant: str | None) -> BatchRecord: ...
    async def add_rows(self, batch_id: str, rows: Sequence[NewRow]) -> Any: ...
    async def change_batch(
        self, batch_id: str, *, if_status: Sequence[BatchStatus], **fields: Any
    ) -> BatchRecord | None: ...
    async def work(self) -> list[BatchWork]: ...
    async def claim_rows(
        self, worker: str, batch_id: str, model: str, limit: int, lease_s: float
    ) -> list[ClaimedRow]: ...
    async def renew(self, worker: str, lease_s: float) -> int: ...
    async def release_rows(self, worker: str, rows: Sequence[tuple[str, int]], *, count_attempt: bool) -> Any: ...
    async def add_results(self, results: Sequence[RowResult]) -> list[tuple[str, int]]: ...
    async def results(self, batch_id: str, *, failed: bool, after: int, limit: int) -> list[RowResult]: ...
    async def unfinished(self, batch_id: str, after: int, limit: int) -> list[ClaimedRow]: ...
    async def forget_rows(self, batch_id: str) -> Any: ...


class Files(Protocol):
    """Where files lie; see `serve_app.batch.files.FileStorage`."""

    async def write(self, name: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int: ...
    async def read(self, name: str, offset: int, length: int) -> bytes: ...
    async def delete(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer of a router to one row."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    request_id: str = ""


class RowRunner(Protocol):
    """Runs a row at a router, as the key of its batch. Raises: no router answered."""

    async def run(self, batch: BatchRecord, path: str, body: bytes, key: str) -> RowAnswer: ...


class Figures(Protocol):
    """The figures of the models' queues, by model. Raises: they are not known now."""

    async def get(self) -> Mapping[str, ModelFigures]: ...


class ModelCheck(Protocol):
    """What forbids the key of a batch to use a model, or None; asked once a model and batch. Raises: it is not known
    now."""

    async def refusal(self, batch: BatchRecord, model: str) -> RowError | None: ...
