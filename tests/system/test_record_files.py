"""Files of records: whole lines, newest first, bounded in age and bytes, whatever the disk does."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.names import RECORDS_FOLDER
from serve_app.system import RecordBounds, RecordFile, Sweeper, newest_lines, records_folder, segments
from serve_app.system import record_files as files

LARGE = RecordBounds(keep_s=100.0, max_bytes=2**30)


def lines_in(folder: Path, kind: str) -> list[bytes]:
    return [line for paths in segments(folder, kind).values() for line in newest_lines(paths)]


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(8, 200))
def test_lines_are_read_from_the_last_one_back_whatever_the_blocks(sizes: list[int], block: int) -> None:
    lines = [b"%d:" % number + b"x" * size for number, size in enumerate(sizes)]
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"records-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    path = folder / "requests.a.000001.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    before = files.BLOCK_BYTES
    files.BLOCK_BYTES = block
    try:
        assert list(newest_lines([path])) == lines[::-1]
    finally:
        files.BLOCK_BYTES = before
        path.unlink()
        folder.rmdir()


def test_a_full_segment_is_followed_by_the_next_one_and_all_are_read_in_order(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "requests", "router.1", RecordBounds(100.0, 16 * 100))
    for number in range(30):
        file.write([b"%02d" % number + b"x" * 18])
    assert len(list(tmp_path.iterdir())) > 3
    assert [line[:2] for line in lines_in(tmp_path, "requests")] == [b"%02d" % number for number in range(29, -1, -1)]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_a_process_that_begins_again_under_its_name_keeps_what_is_there(tmp_path: Path) -> None:
    for text in (b"a", b"b"):
        file = RecordFile(tmp_path, "requests", "router", LARGE)
        file.write([text])
        file.close()
    assert lines_in(tmp_path, "requests") == [b"b", b"a"]


def test_a_disk_that_is_full_loses_lines_and_no_part_of_one_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = [5, 0, 2]
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if not room:
            return write(fd, data)
        left = room.pop(0)
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:left])

    file = RecordFile(tmp_path, "requests", "router", LARGE)
    file.write([b"first"])
    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for number in range(3):
            file.write([b"lost %d" % number, b"lost, too"])
        file.write([b"again"])
    assert lines_in(tmp_path, "requests") == [b"again", b"first"]
    assert file.lost == 6
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "once, and its end"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that is always full, in place of a segment."""
    begin = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777: begin("/dev/full", os.O_WRONLY))
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: None)
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    return Path("/dev/full")


def test_a_device_without_room_fails_nobody(full_disk: Path, tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "requests", "router", LARGE)
    file.write([b"a"])
    file.write([b"b"])
    assert file.lost == 2


def filled(folder: Path, kind: str, source: str, size: int, age_s: float, *, closed: bool = True) -> RecordFile:
    file = RecordFile(folder, kind, source, LARGE)
    file.write([b"x" * (size - 1)])
    if closed:
        file.close()
    (path,) = (one for one in folder.iterdir() if one.name.startswith(f"{kind}.{source}."))
    os.utime(path, (1000.0 - age_s, 1000.0 - age_s))
    return file


def kept(folder: Path) -> set[str]:
    return {".".join(path.name.split(".")[:2]) for path in folder.iterdir()}


def test_what_is_too_old_is_removed(tmp_path: Path) -> None:
    for source, age_s in (("old", 101.0), ("new", 99.0)):
        filled(tmp_path, "requests", source, 10, age_s)
    files.sweep(tmp_path, ("requests", "failures"), LARGE, 1000.0)
    assert kept(tmp_path) == {"requests.new"}


def test_of_too_many_bytes_the_oldest_requests_go_first_and_failures_last(tmp_path: Path) -> None:
    for kind, source, age_s in (
        ("failures", "a", 90.0),
        ("failures", "b", 80.0),
        ("requests", "a", 50.0),
        ("requests", "b", 40.0),
    ):
        filled(tmp_path, kind, source, 100, age_s)
    for most, left in (
        (400, {"failures.a", "failures.b", "requests.a", "requests.b"}),
        (399, {"failures.a", "failures.b", "requests.b"}),
        (200, {"failures.a", "failures.b"}),
        (199, {"failures.b"}),
    ):
        files.sweep(tmp_path, ("requests", "failures"), RecordBounds(100.0, most), 1000.0)
        assert kept(tmp_path) == left


def test_a_segment_that_its_process_writes_stays(tmp_path: Path) -> None:
    writing = filled(tmp_path, "requests", "a", 100, 500.0, closed=False)
    files.sweep(tmp_path, ("requests",), RecordBounds(100.0, 1), 1000.0)
    assert kept(tmp_path) == {"requests.a"}
    writing.write([b"later"])
    assert lines_in(tmp_path, "requests")[0] == b"later"
    writing.close()
    files.sweep(tmp_path, ("requests",), RecordBounds(100.0, 1), 1000.0)
    assert kept(tmp_path) == set()


def test_a_sweeper_looks_once_a_minute(tmp_path: Path) -> None:
    now = [1000.0]
    sweeper = Sweeper(tmp_path, {("requests",): RecordBounds(100.0, 1)}, lambda: now[0])
    sweeper.sweep()
    filled(tmp_path, "requests", "a", 100, 0.0)
    sweeper.sweep()
    assert kept(tmp_path) == {"requests.a"}
    now[0] += files.SWEEP_S
    sweeper.sweep()
    assert kept(tmp_path) == set()


def test_the_folder_is_the_instance_s_else_in_ray_s_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORDS_FOLDER, raising=False)
    assert records_folder(tmp_path).parent == tmp_path
    monkeypatch.setenv(RECORDS_FOLDER, "/var/records")
    assert records_folder(tmp_path) == Path("/var/records")
