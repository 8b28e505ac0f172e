"""When a log line was written and at which level, in the forms of Serve, Ray, vLLM and our own.

A record is a line with a level, and often a time, and the lines below it (a traceback). Times without a zone are of
this machine's: only the machine that wrote a file can read its times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

CONTINUED_LINES = 50  # of a traceback below the line that begins a record
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}  # as `logging` has them
_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}  # of Ray's C++ processes
_WORD = rf"(?P<level>{'|'.join(LEVELS)})"
_TIME = r"(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{3}))?"
_HEADS = (
    re.compile(rf"{_WORD} {_TIME}\b"),  # Serve
    re.compile(rf"{_TIME}\s+{_WORD}\b"),  # Ray's Python processes
    re.compile(rf"\[{_TIME} (?P<letter>[{''.join(_LETTERS)}]) "),  # Ray's C++ processes
    re.compile(rf"(?:\([^)]{{,60}}\) )?{_WORD} (?P<day>\d\d-\d\d \d\d:\d\d:\d\d) "),  # vLLM, whose times have no year
    re.compile(rf"{_WORD}\b"),
)
_JSON_TIMES = ("time", "asctime")
_JSON_LEVELS = ("level", "levelname")
_AHEAD = timedelta(days=1)  # a day of the year that is further ahead is one of last year


class LogHead(NamedTuple):
    """The beginning of a record. `time`: in seconds since 1970, or None. `level`: a name of LEVELS, or empty."""

    time: float | None
    level: str


NO_HEAD = LogHead(None, "")


def head_of(line: str, now: datetime) -> LogHead | None:
    """The head of the record that a line begins; None: it goes on with the one before. `now`: without a zone."""
    if line.startswith('{"'):
        return _json_head(line)
    for form in _HEADS:
        if found := form.match(line):
            fields = found.groupdict()
            level = fields.get("level") or _LETTERS[fields["letter"]]
            return LogHead(_seconds(fields, now), level)
    return None


def _seconds(fields: dict[str, str | None], now: datetime) -> float | None:
    day = fields.get("day")
    text = fields.get("time") if day is None else f"{now.year}-{day}"
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
        if day is not None and time > now + _AHEAD:
            time = time.replace(year=now.year - 1)
    except ValueError:  # the 30th of February
        return None
    return time.timestamp() + int(fields.get("part") or 0) / 1000


def _json_head(line: str) -> LogHead | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    level = next((str(found[name]).upper() for name in _JSON_LEVELS if name in found), "")
    text = next((str(found[name]) for name in _JSON_TIMES if name in found), None)
    if level not in LEVELS and text is None:
        return None
    try:
        time = None if text is None else datetime.fromisoformat(text.replace(",", ".")).timestamp()
    except ValueError:
        time = None
    return LogHead(time, level)


class LogRecord(NamedTuple):
    """A record and its lines. `head.time`: its own or, if it has none, that of the record before."""

    head: LogHead
    lines: tuple[str, ...]


def records_of(lines: Sequence[str], now: datetime) -> Iterator[LogRecord]:
    """The lines as records. What stands before the first head, and beyond CONTINUED_LINES, is a record of one line."""
    head = NO_HEAD
    below: list[str] = []
    is_whole = False  # whether `below` begins with a head
    time: float | None = None
    for line in lines:
        found = head_of(line, now)
        if found is None and is_whole and len(below) <= CONTINUED_LINES:
            below.append(line)
            continue
        if below:
            yield LogRecord(head, tuple(below))
        is_whole = found is not None
        time = time if found is None or found.time is None else found.time
        head = LogHead(time, "" if found is None else found.level)
        below = [line]
    if below:
        yield LogRecord(head, tuple(below))
