"""What is kept of requests after their end: a record of each, and counts of each minute.

Decides: which records answer a question, what a minute counts, and how minutes of many routers are added up.
In: receipts, durations, lines of files as plain values. Out: records and rows of a history as plain values.
Never: reads a file or a clock.
"""

from serve_app.core.records.book import MinuteBook
from serve_app.core.records.history import HistoryQuestion, HistorySum
from serve_app.core.records.minutes import MINUTE_S, Group, Grouping
from serve_app.core.records.requests import (
    FAILED,
    RecordFilter,
    RecordHead,
    RecordKind,
    first_records,
    full_record,
    head_of,
    record_fields,
)

__all__ = [
    "FAILED",
    "MINUTE_S",
    "Group",
    "Grouping",
    "HistoryQuestion",
    "HistorySum",
    "MinuteBook",
    "RecordFilter",
    "RecordHead",
    "RecordKind",
    "first_records",
    "full_record",
    "head_of",
    "record_fields",
]
