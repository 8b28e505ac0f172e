"""Reads the request logs, histories and events of one node, in a process of its own: a week of records are megabytes.

Invariant: a file is read from its end, and no further back than a question wants.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from autoscaling.operations.event_filter import EventFilter, EventHead
from serve_app.core.records import HistoryQuestion, HistorySum, RecordFilter, RecordHead, RecordKind
from serve_app.system import EVENTS, DurationSketch, newest_lines, segments

LATE_S = 5.0  # how much later than its neighbour an event of one process can be written


class _Head(msgspec.Struct):
    """The fields of a record that a question looks at."""

    at: float
    total_s: float
    request_id: str
    tenant: str
    model: str
    request_class: str
    outcome: str
    client_id: str | None = None
    asked_model: str | None = None

    def head(self) -> RecordHead:
        return RecordHead(*(getattr(self, name) for name in RecordHead._fields))


_HEAD = msgspec.json.Decoder(_Head)
_EVENT_HEAD = msgspec.json.Decoder(EventHead)
_ANY = msgspec.json.Decoder()


class NodeRecords:
    """The records in a folder. None: there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder if folder is not None and folder.is_dir() else None

    @property
    def place(self) -> str:
        """What names the folder, for nodes of one machine that share it; empty: there is none."""
        if self._folder is None:
            return ""
        found = self._folder.stat()
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {found.st_dev} {found.st_ino}"

    def requests(self, wanted: RecordFilter) -> list[dict[str, Any]]:
        """The records that answer a question, in its order."""
        if self._folder is None:
            return []
        first: list[tuple[tuple[float, str], bytes]] = []
        for head, line in self._newest(wanted):
            if len(first) == wanted.limit and not wanted.is_slow and head.ended_at < first[0][0][0]:
                break  # it has arrived before it ended, and so have all behind it
            if not wanted.has(head):
                continue
            entry = (wanted.order(head), line)
            if len(first) < wanted.limit:
                heapq.heappush(first, entry)
            elif entry > first[0]:
                heapq.heapreplace(first, entry)
        return [_ANY.decode(line) for _, line in sorted(first, reverse=True)]

    def history(self, question: HistoryQuestion) -> dict[str, Any]:
        """The rows of a history, in plain form."""
        found = HistorySum(question, DurationSketch)
        for paths in self._segments(RecordKind.MINUTES, question.since):
            for line in newest_lines(paths):
                counted = _decoded(_ANY, line)
                if counted is None:
                    continue
                if counted["minute"] * 60 + 60 <= question.since:
                    break
                found.add_minute(counted, counted["router"])
        return found.plain()

    def events(self, wanted: EventFilter) -> list[dict[str, Any]]:
        """The events that are wanted, the newest first."""
        found: list[tuple[float, int, bytes]] = []
        for paths in self._segments(EVENTS, wanted.since):
            taken = 0
            for line in newest_lines(paths):
                event = _decoded(_EVENT_HEAD, line)
                if event is None:
                    continue
                if event.at < wanted.since - LATE_S or taken == wanted.limit:
                    break
                if wanted.has(event):
                    taken += 1
                    found.append((event.at, -len(found), line))
        return [_ANY.decode(line) for _, _, line in heapq.nlargest(wanted.limit, found)]

    def _newest(self, wanted: RecordFilter) -> Iterator[tuple[RecordHead, bytes]]:
        """The records of all routers by their ends, from the last one back to what ended before `since`."""
        both = (RecordKind.FAILURES, RecordKind.REQUESTS)
        kinds = both[:1] if wanted.is_failed else both
        streams = [self._stream(paths, wanted) for kind in kinds for paths in self._segments(kind, wanted.since)]
        return heapq.merge(*streams, key=lambda entry: -entry[0].ended_at)

    def _stream(self, paths: list[Path], wanted: RecordFilter) -> Iterator[tuple[RecordHead, bytes]]:
        for line in newest_lines(paths, wanted.may_be_in):
            found = _decoded(_HEAD, line)
            if found is None:
                continue
            head = found.head()
            if head.ended_at < wanted.since:
                return
            yield head, line

    def _segments(self, kind: str, since: float) -> list[list[Path]]:
        return [] if self._folder is None else list(segments(self._folder, kind, since).values())


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    """What a line has; None: a part of one, which a machine that lost its power has left."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
