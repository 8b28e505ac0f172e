"""Batches: their files, rows and results; what a row is, how many rows run now, and whose are next.

Decides: whether a line of an input file is a row, how many rows of a model may be in flight, and which batch's rows
come next.
In: lines, figures of the models' queues, starts and ends of rows. Out: requests of rows, numbers of rows.
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
from serve_app.core.batches.rows import ENDPOINTS, BadRow, Line, LineSplitter, RowCheck, RowRequest, read_row

__all__ = [
    "ENDED",
    "ENDPOINTS",
    "BadRow",
    "BatchRecord",
    "BatchStatus",
    "BatchWork",
    "ClaimedRow",
    "FileRecord",
    "Line",
    "LineSplitter",
    "ModelFigures",
    "ModelPace",
    "NewRow",
    "Pauses",
    "RowCheck",
    "RowError",
    "RowRequest",
    "RowResult",
    "WaitingRows",
    "read_row",
    "share_rows",
]
