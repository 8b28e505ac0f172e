"""Events on a disk that takes none: what happened meanwhile is there afterwards."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from serve_app.system import EventKind, EventWriter, RecordBounds, RecordFile, event, events
from serve_app.system.events import EVENT_FIELD
from tests.waiting import wait_until

WRITTEN_S = 5.0  # of a thread that tries again at once
LARGE = RecordBounds(keep_s=1000.0, max_bytes=2**30)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the disk is full: its last value."""
    state = [False]
    write = os.write

    def limited(fd: int, data: bytes) -> int:
        if state[-1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", limited)
    return state


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("events.*")) for line in path.read_bytes().splitlines()]


def happened(number: int) -> dict[str, Any]:
    return {"at": float(number), "kind": "health", "subject": "chat", "level": "info", "message": str(number)}


def test_events_of_a_full_disk_are_written_in_order_once_there_is_room(
    tmp_path: Path, disk: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    writer = EventWriter(tmp_path, "router")
    writer.write(happened(1))
    writer.flush()
    disk.append(True)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for number in (2, 3):
            writer.write(happened(number))
            writer.flush()
    assert [one["message"] for one in written(tmp_path)] == ["1"]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    disk.append(False)
    wait_until(lambda: [one["message"] for one in written(tmp_path)], WRITTEN_S, "all", wanted=["1", "2", "3"])
    writer.write(happened(4))
    writer.flush()
    assert [one["message"] for one in written(tmp_path)] == ["1", "2", "3", "4"]
    assert writer.lost == 0


def test_no_more_events_wait_in_memory_than_are_worth_it(
    tmp_path: Path, disk: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 2)
    disk.append(True)
    writer = EventWriter(tmp_path, "router")
    for number in range(5):
        writer.write(happened(number))
        writer.flush()
    assert writer.lost == 3
    disk.append(False)
    writer.write(happened(5))
    writer.flush()
    assert [one["message"] for one in written(tmp_path)] == ["0", "1"], "what came first says what has happened"


def test_a_file_that_cannot_be_written_and_is_again_are_events_of_those_whose_records_they_are(
    tmp_path: Path, disk: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    extra = event(EventKind.HEALTH, "router", router="r1")
    file = RecordFile(tmp_path, "requests", "r1", LARGE, extra)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for is_full in (True, False):
            disk.append(is_full)
            file.write([b"{}"])
    reported = [(record.getMessage(), getattr(record, EVENT_FIELD)) for record in caplog.records]
    assert [named for _, named in reported] == [("health", "router", {"router": "r1"})] * 2
    assert "No space left on device" in reported[0][0]
    assert reported[1][0] == "File of requests is written again; 1 records are lost"
