"""Batches: their files, rows and results; how many of their rows run now, and whose are next; entries of streams.

Decides: whether a line of an input file is a row, how many rows of a model may be in flight, which batch's rows come
next, and what becomes of an entry of a stream.
In: lines, entries; figures of the models' queues, starts and ends of rows. Out: rows or what is wrong with a line;
numbers of rows.
Never: reads a clock, a file or a store.
"""

from serve_app.core.batches import intake
from serve_app.core.batches.pace import ModelFigures, ModelPace, Pauses, WaitingRows, share_rows
from serve_app.core.batches.records import (
    ENDED,
    INPUT_PURPOSE,
    OUTPUT_PURPOSE,
    BatchRecord,
    BatchStatus,
    BatchWork,
    ClaimedRow,
    FileRecord,
    NewRow,
    RowCounts,
    RowError,
    RowResult,
    check_stored,
)
from serve_app.core.batches.rows import ENDPOINTS, BadRow, Line, LineSplitter, RowCheck, read_row

__all__ = [
    "ENDED",
    "ENDPOINTS",
    "INPUT_PURPOSE",
    "OUTPUT_PURPOSE",
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
    "RowCounts",
    "RowError",
    "RowResult",
    "WaitingRows",
    "check_stored",
    "intake",
    "read_row",
    "share_rows",
]
