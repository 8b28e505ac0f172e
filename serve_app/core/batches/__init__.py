"""Batches: their files, rows and results; how many of their rows run now, and whose are next.

Decides: how many rows of a model may be in flight, and which batch's rows come next.
In: figures of the models' queues, starts and ends of rows. Out: numbers of rows.
Never: reads a clock, a file or a store.
"""

from serve_app.core.batches.pace import ModelFigures, ModelPace, Pauses, WaitingRows, share_rows
from serve_app.core.batches.records import (
    ENDED,
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowError,
    RowResult,
)

__all__ = [
    "ENDED",
    "BatchRecord",
    "BatchStatus",
    "BatchWork",
    "ClaimedRow",
    "FileRecord",
    "ModelFigures",
    "ModelPace",
    "NewRow",
    "Pauses",
    "RowError",
    "RowResult",
    "WaitingRows",
    "share_rows",
]
