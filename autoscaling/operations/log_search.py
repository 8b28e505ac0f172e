"""Which log lines are asked for, and the lines of many files in order of time. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from serve_app.core.receipts import OBJECT_PREFIXES
from serve_app.errors import BadRequest
from serve_app.names import deployment_of
from serve_app.system import LOG_SOURCES, LogFilter, LogPart

MIN_ID_CHARS = 8  # of a request's id; a shorter text is in many lines


class LogLevel(enum.StrEnum):
    """The levels of log records, the lowest first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a file. `time`: of its record, in seconds since 1970; None: neither it nor a line before has one."""

    time: float | None
    source: str
    replica: str
    path: str
    line: str


def wanted_lines(
    source: str = "", replica: str = "", request: str = "", level: LogLevel | None = None, since: float = 0.0
) -> LogFilter:
    """The filter for a model's name or one of `LOG_SOURCES`, the beginning of a replica's id, any id of a request, the
    lowest level, and the earliest time in seconds since 1970.

    Raises:
        BadRequest: a request's id that is too short to name one.
    """
    for prefix in OBJECT_PREFIXES:
        request = request.removeprefix(prefix)
    if request and len(request) < MIN_ID_CHARS:
        raise BadRequest(f"--request {request}: give the whole id", param="request")
    known = not source or source in LOG_SOURCES
    name = source if known else deployment_of(source)
    return LogFilter(name, replica, request, "" if level is None else level.name, since)


def in_order(parts: Iterable[LogPart], last: int | None = None) -> list[LogLine]:
    """The lines by their time, those of one file in their order. `last`: so many at most, the newest."""
    found: list[tuple[float, LogLine]] = []
    for part in parts:
        time: float | None = None
        for index, line in enumerate(part.lines):
            time = (part.times[index] if index < len(part.times) else None) or time
            found.append((time or 0.0, LogLine(time, part.source, part.replica, part.path, line)))
    found.sort(key=lambda entry: entry[0])  # stable: a record stays together
    lines = [line for _, line in found]
    return lines if last is None else lines[-last:]
