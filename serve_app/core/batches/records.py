"""Batches, their files, their rows and results, as values; they cross process boundaries. Times are seconds since 1970
UTC. The words are those of OpenAI's Files and Batches API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class BatchStatus(StrEnum):
    """Where a batch is on its way: validating, in progress, finalizing, completed; the others leave it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing changes any more."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file.

    Args:
        size: in bytes; None: it is not complete.
    """

    file_id: str
    tenant: str
    key_id: str
    filename: str
    purpose: str
    size: int | None
    created_at: float
    expires_at: float | None
    deleted_at: float | None = None


@dataclass(frozen=True, slots=True)
class RowError:
    """What is wrong with a batch or with a line of its input."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch.

    Args:
        key_id: its rows run as this key.
        completion_window: as it was asked for; `expires_at` is its end.
        errors: why it failed.
        total, completed, failed: rows.
    """

    batch_id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: float
    expires_at: float
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[RowError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class NewRow:
    """A line of the input file, which stays there.

    Args:
        number: of the line, from 1.
        offset, length: bytes in the file.
        prefix: the same for rows whose prompts begin alike; they run together.
    """

    number: int
    offset: int
    length: int
    custom_id: str
    model: str
    prefix: int


@dataclass(frozen=True, slots=True)
class ClaimedRow:
    """A row as a worker gets it. `attempts`: runs before that failed."""

    batch_id: str
    number: int
    offset: int
    length: int
    custom_id: str
    model: str
    attempts: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row. `line`: the complete line of the output file, or of the error file if `is_failed`."""

    batch_id: str
    number: int
    is_failed: bool
    line: str


@dataclass(frozen=True, slots=True)
class BatchWork:
    """A batch that is not over. `waiting`: its rows that a worker may claim, by model; `running`: leased ones."""

    batch: BatchRecord
    waiting: Mapping[str, int]
    running: int
