"""Batches, the files they read and write, their rows and results, as values. They cross process boundaries.

Times are seconds since 1970 UTC.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.core.messages import message
from serve_app.errors import BodyTooLarge


class BatchStatus(StrEnum):
    """OpenAI's."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


# A batch in one of these never changes again.
ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


# of files
INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


@message
@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Its content is elsewhere, under its id.

    Args:
        file_id: `file-` and 32 hexadecimal digits.
        key_id: of the key that made it.
        size: in bytes; None: its content is not complete.
        expires_at: None: never.
        deleted_at: None: it is there.
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


def check_stored(stored_bytes: int, added_bytes: int, max_bytes: int | None) -> None:
    """Whether a tenant may store more.

    Raises:
        BodyTooLarge: its files would have more than `max_bytes` together; None: any number.
    """
    if max_bytes is not None and stored_bytes + added_bytes > max_bytes:
        raise BodyTooLarge(
            f"the files of a tenant may have {max_bytes} bytes together (batch.max_bytes_per_tenant), and yours have "
            f"{stored_bytes} without this one: delete some first",
            param="file",
            code="storage_quota_exceeded",
        )


@message
@dataclass(frozen=True, slots=True)
class RowError:
    """What is wrong with a batch or one of its rows; `line` counts from 1, `param` names a field."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@message
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch, in OpenAI's words.

    Args:
        batch_id: `batch_` and 32 hexadecimal digits.
        key_id: of the key whose rights its rows have.
        completion_window: as it was asked for, such as 24h; it ends at `expires_at`.
        errors: why it is `failed`.
        total, completed, failed: rows. Every row with a result is in one of the last two.
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

    @property
    def payer(self) -> str:
        """Whose limits its rows are charged to: its key, and the tenant of that."""
        return f"{self.tenant}\0{self.key_id}"


@message
@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of a batch: a line of its input file.

    Args:
        number: of the line, from 1.
        offset, length: of the line in the file, in bytes.
        prefix: rows whose prompts begin alike have the same one; a signed number of 64 bits.
    """

    number: int
    offset: int
    length: int
    custom_id: str
    model: str
    prefix: int


@message
@dataclass(frozen=True, slots=True)
class ClaimedRow:
    """A row that a worker may run. `attempts`: that ended without a result before."""

    batch_id: str
    number: int
    offset: int
    length: int
    custom_id: str
    model: str
    attempts: int


@message
@dataclass(frozen=True, slots=True)
class RowResult:
    """The complete line of a row in the output file, or in the error file if it `is_failed`."""

    batch_id: str
    number: int
    is_failed: bool
    line: str


@message
@dataclass(frozen=True, slots=True)
class BatchWork:
    """A batch that has not ended. `waiting`: rows that can be claimed, by model; `running`: rows under a lease,
    `running_by_model` the same by model."""

    batch: BatchRecord
    waiting: Mapping[str, int]
    running: int
    running_by_model: Mapping[str, int] = field(default_factory=dict)


@message
@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of one model in the batches that have not ended."""

    waiting: int = 0
    running: int = 0
    completed: int = 0
    failed: int = 0
