"""Files in a folder: complete or not there, private, and clear about a disk that refuses."""

from __future__ import annotations

import errno
import os
import resource
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.batch import local_files
from serve_app.batch.local_files import ABANDONED_S, UPLOADS, LocalFiles
from serve_app.errors import NotFound, ServeAppError, StorageAway, StorageFull
from tests.effort import examples


def written(files: LocalFiles, name: str, data: bytes, upload: str = "u1") -> None:
    files.write_at(name, upload, 0, data)
    files.finish(name, upload, len(data))


def uploads(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / UPLOADS).iterdir())


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*")) if path.is_dir()}


def test_a_file_is_not_there_before_it_is_complete(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files")
    files.write_at("f", "u1", 0, b"abc")
    with pytest.raises(NotFound):
        files.read("f", 0, 3)
    files.write_at("f", "u1", 3, b"def")
    files.finish("f", "u1", 6)
    assert files.read("f", 0, 100) == b"abcdef"
    assert (files.read("f", 4, 1), files.read("f", 6, 5), files.read("f", 60, 5)) == (b"e", b"", b"")
    assert files.size("f") == 6
    assert uploads(tmp_path / "files") == []


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "files"
    files = LocalFiles(folder)
    written(files, "f", b"abc")
    assert modes(folder) == {0o700}
    assert stat.S_IMODE((folder / "f").stat().st_mode) == 0o600


@settings(max_examples=examples(30))  # each syncs files
@given(st.binary(max_size=200), st.lists(st.integers(0, 3), max_size=30))
def test_pieces_that_are_repeated_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, repeats: list[int]
) -> None:
    files = LocalFiles(tmp_path_factory.mktemp("files"))
    pieces = [(offset, data[offset : offset + 10]) for offset in range(0, len(data), 10)] or [(0, b"")]
    for number, (offset, piece) in enumerate(pieces):
        for back in repeats[number : number + 1] or [0]:
            for earlier, again in pieces[max(0, number - back) : number]:
                files.write_at("f", "u1", earlier, again)
        files.write_at("f", "u1", offset, piece)
    for _ in range(2):
        files.finish("f", "u1", len(data))
    assert files.read("f", 0, 1000) == data


def test_a_file_is_replaced_as_a_whole_and_two_uploads_do_not_meet(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    written(files, "f", b"old")
    files.write_at("f", "u1", 0, b"first")
    files.write_at("f", "u2", 0, b"second")
    assert files.read("f", 0, 10) == b"old"
    files.finish("f", "u2", 6)
    files.finish("f", "u1", 5)
    assert files.read("f", 0, 10) == b"first"


def test_an_upload_that_lacks_bytes_is_no_file(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write_at("f", "u1", 0, b"abc")
    with pytest.raises(StorageAway, match="3 bytes of 4"):
        files.finish("f", "u1", 4)
    with pytest.raises(NotFound):
        files.size("f")
    assert uploads(tmp_path) == []


def test_an_upload_that_is_gone_is_reported(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write_at("f", "u1", 0, b"abc")
    for _ in range(2):
        files.discard("f", "u1")
    with pytest.raises(StorageAway):
        files.write_at("f", "u1", 3, b"def")
    with pytest.raises(StorageAway):
        files.finish("f", "u1", 3)


def test_deleting_is_for_good_and_may_be_repeated(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    written(files, "f", b"abc")
    for _ in range(2):
        files.delete("f")
    with pytest.raises(NotFound):
        files.read("f", 0, 1)


@pytest.mark.parametrize("name", ["", "../f", "a/b", ".", "f.u1", "a\0", "x" * 129, "f\n"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    files = LocalFiles(tmp_path)
    calls: list[tuple[Any, ...]] = [(files.read, name, 0, 1), (files.delete, name), (files.write_at, name, "u", 0, b"")]
    calls += [(files.write_at, "f", name, 0, b""), (files.finish, "f", name, 0)]
    for call, *arguments in calls:
        with pytest.raises(ValueError, match="not the name"):
            call(*arguments)


@pytest.mark.parametrize("occasion", ["write", "delete"])
def test_an_abandoned_upload_is_removed_and_a_live_one_stays(tmp_path: Path, occasion: str) -> None:
    files = LocalFiles(tmp_path)
    for name, age_s in (("dead", ABANDONED_S + 60), ("live", ABANDONED_S - 60)):
        files.write_at(name, "u1", 0, b"abc")
        when = time.time() - age_s
        os.utime(tmp_path / UPLOADS / f"{name}.u1", (when, when))
    if occasion == "write":
        written(files, "new", b"")
    else:
        files.delete("nothing")
    assert uploads(tmp_path) == ["live.u1"]


@pytest.mark.parametrize(
    ("code", "expected", "status"),
    [
        (errno.ENOSPC, StorageFull, 507),
        (errno.EDQUOT, StorageFull, 507),
        (errno.EROFS, StorageAway, 503),
        (errno.EACCES, StorageAway, 503),
        (errno.EIO, StorageAway, 503),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwrite", "fsync"])
def test_a_disk_that_refuses_is_reported_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, expected: type[ServeAppError], status: int
) -> None:
    files = LocalFiles(tmp_path)
    written(files, "f", b"old")
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> int:
            raise OSError(code, os.strerror(code))

        patch.setattr(local_files.os, call, refuse)
        with pytest.raises(expected) as raised:
            written(files, "f", b"new file", "u2")
    assert raised.value.status == status
    assert os.strerror(code) in raised.value.message
    assert str(tmp_path) not in raised.value.message
    assert files.read("f", 0, 10) == b"old"
    files.discard("f", "u2")
    assert uploads(tmp_path) == []


def test_a_disk_that_fills_up_within_a_piece_keeps_nothing_of_it(tmp_path: Path) -> None:
    """The limit of a process on the size of a file acts like a full disk: a part is written, then nothing."""
    files = LocalFiles(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(StorageFull):
            written(files, "f", b"more than five bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert uploads(tmp_path) == []
    written(files, "f", b"more than five bytes")
    assert files.size("f") == 20


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageAway, match="Not a directory"):
        LocalFiles(tmp_path / "file" / "files")


def test_a_folder_that_has_vanished_is_no_missing_file(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "files")
    written(files, "f", b"abc")
    (tmp_path / "files").rename(tmp_path / "elsewhere")
    for call in (lambda: files.read("f", 0, 1), lambda: files.size("f")):
        with pytest.raises(StorageAway):
            call()
    written(files, "g", b"abc")  # a new one is made
    assert files.size("g") == 3


def test_an_owner_that_restarts_goes_on_with_an_upload(tmp_path: Path) -> None:
    LocalFiles(tmp_path).write_at("f", "u1", 0, b"new")
    files = LocalFiles(tmp_path)
    with pytest.raises(NotFound):
        files.size("f")
    files.write_at("f", "u1", 3, b" file")
    LocalFiles(tmp_path).finish("f", "u1", 8)
    files.finish("f", "u1", 8)
    assert files.read("f", 0, 10) == b"new file"
