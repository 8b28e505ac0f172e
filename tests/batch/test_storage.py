"""What every storage of files promises: one suite for the owner's folder and for a URL of fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from serve_app.batch import FileStorage, bucket_files, storage_at
from serve_app.batch.bucket_files import ABANDONED_S, FsspecFiles
from serve_app.batch.owned_files import FOLDER, OwnedFiles
from serve_app.batch.pieces import PIECE_BYTES
from serve_app.errors import BodyTooLarge, ConfigError, NotFound, StorageAway, StorageFull
from serve_app.names import STORE_FILE
from tests.batch.storages import chunks, failing, owned
from tests.requires import requires

LARGE = 2**40
MEMORY = "memory://bucket/batches"


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture(params=["owned", "fsspec"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, memory: Any) -> FileStorage:
    return owned(str(tmp_path)) if request.param == "owned" else FsspecFiles(MEMORY)


@pytest.fixture
def left(storage: FileStorage, tmp_path: Path, memory: Any) -> Callable[[], list[str]]:
    """The uploads that are still there."""

    def names() -> list[str]:
        if isinstance(storage, FsspecFiles):
            return [path for path in memory.store if "/uploads/" in path]
        return os.listdir(tmp_path / "uploads")

    return names


async def gone(left: Callable[[], list[str]]) -> None:
    """Wait until no upload is left; they are removed in the background."""
    async with asyncio.timeout(20):
        while left():  # noqa: ASYNC110 - another thread removes them, and tells nobody
            await asyncio.sleep(0.01)  # bound: the 20 s above


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 7])
@pytest.mark.parametrize("step", [1000, PIECE_BYTES, 3 * PIECE_BYTES])
def test_a_file_is_read_as_it_was_written(
    storage: FileStorage, left: Callable[[], list[str]], size: int, step: int
) -> None:
    data = os.urandom(size)

    async def run() -> None:
        parts = [data[start : start + step] for start in range(0, size, step)]
        assert await storage.write("f", chunks(*parts), size) == size
        assert await storage.size("f") == size
        assert await storage.read("f", 0, size + 10) == data
        assert await storage.read("f", size // 2, 10) == data[size // 2 : size // 2 + 10]
        assert await storage.read("f", size, 10) == await storage.read("f", size + 5, 10) == b""
        assert left() == []

    asyncio.run(run())


def test_a_file_above_its_bound_is_refused_and_not_kept(storage: FileStorage, left: Callable[[], list[str]]) -> None:
    async def run() -> None:
        with pytest.raises(BodyTooLarge):
            await storage.write("f", chunks(b"x" * PIECE_BYTES, b"y"), PIECE_BYTES)
        with pytest.raises(NotFound):
            await storage.size("f")
        await gone(left)

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("the client's form is wrong"), asyncio.CancelledError()])
def test_what_fails_half_way_leaves_the_file_as_it_was(
    storage: FileStorage, left: Callable[[], list[str]], error: BaseException
) -> None:
    async def run() -> None:
        await storage.write("f", chunks(b"old"), LARGE)
        with pytest.raises(type(error)):
            await storage.write("f", failing([b"x" * PIECE_BYTES] * 2, error), LARGE)
        assert await storage.read("f", 0, 10) == b"old"
        await gone(left)

    asyncio.run(run())


def test_a_cancelled_write_leaves_nothing(storage: FileStorage, left: Callable[[], list[str]]) -> None:
    async def run() -> None:
        began = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * PIECE_BYTES
                began.set()

        task = asyncio.ensure_future(storage.write("f", endless(), LARGE))
        await began.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with pytest.raises(NotFound):
            await storage.read("f", 0, 1)
        await gone(left)

    asyncio.run(run())


def test_a_file_is_replaced_and_deleted_as_often_as_asked(storage: FileStorage) -> None:
    async def run() -> None:
        for data in (b"one", b"three", b"three"):
            await storage.write("f", chunks(data), LARGE)
        assert await storage.read("f", 0, 10) == b"three"
        for _ in range(2):
            await storage.delete("f")
        for missing in (storage.read("f", 0, 10), storage.size("f")):
            with pytest.raises(NotFound) as raised:
                await missing
            assert raised.value.code == "file_not_found"

    asyncio.run(run())


def test_the_default_folder_is_beside_the_stores_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "state" / "store.sqlite"))
    asyncio.run(owned(None).write("f", chunks(b"abc"), LARGE))
    assert (tmp_path / "state" / FOLDER / "f").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("url", "kind"),
    [(None, OwnedFiles), ("file:///var/files", OwnedFiles), ("file:///a%20b", OwnedFiles), (MEMORY, FsspecFiles)],
)
def test_a_url_says_where_files_are(url: str | None, kind: type) -> None:
    assert type(storage_at(url)) is kind


@pytest.mark.parametrize("url", ["file://host/files", "file:files", "nothing://bucket"])
def test_a_url_that_cannot_be_used_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        storage_at(url)
    assert raised.value.param == "batch.files_url"


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(bucket_files.fsspec.core, "url_to_fs", lacks)
    with pytest.raises(ConfigError, match=r"serve-app\[s3\]"):
        storage_at("s3://bucket/batches")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), StorageFull),
        (PermissionError(13, "Permission denied"), StorageAway),
        (RuntimeError("a client's own error"), StorageAway),
    ],
)
@pytest.mark.parametrize("method", ["open", "mv"])
def test_a_bucket_that_refuses_is_reported_and_nothing_is_kept(
    memory: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], method: str
) -> None:
    async def run() -> None:
        storage = FsspecFiles(MEMORY)
        await storage.write("f", chunks(b"old"), LARGE)

        def refuse(*_: Any, **__: Any) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(type(memory), method, refuse)
            with pytest.raises(expected):
                await storage.write("f", chunks(b"new"), LARGE)
        assert await storage.read("f", 0, 10) == b"old"
        await gone(lambda: [path for path in memory.store if "/uploads/" in path])

    asyncio.run(run())


def test_a_bucket_that_does_not_answer_is_away(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(bucket_files, "BUCKET_CALL_S", 0.05)
    monkeypatch.setattr(type(memory), "info", lambda *_, **__: answer.wait(20))
    try:
        with pytest.raises(StorageAway, match="has not answered"):
            asyncio.run(FsspecFiles(MEMORY).size("f"))
    finally:
        answer.set()


def test_an_abandoned_upload_to_a_bucket_is_removed(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory.open(f"{MEMORY}/uploads/f.dead", "wb") as file:
        file.write(b"half")
    storage = FsspecFiles(MEMORY)
    asyncio.run(storage.write("f", chunks(b"abc"), LARGE))
    assert memory.exists(f"{MEMORY}/uploads/f.dead")
    monkeypatch.setattr(bucket_files, "ABANDONED_S", -ABANDONED_S)
    asyncio.run(storage.write("g", chunks(b"abc"), LARGE))
    assert not memory.exists(f"{MEMORY}/uploads/f.dead")
    assert memory.exists(f"{MEMORY}/f")


RSS_OF_100_MB = """
import asyncio, re, sys
from pathlib import Path
from tests.batch.storages import owned

def peak_kib():  # of this process alone: what getrusage says begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

async def run():
    files = owned(sys.argv[1])
    async def parts(count):
        for _ in range(count):
            yield bytes(65_536)
    async def both(count):
        size = await files.write("f", parts(count), 2**40)
        for offset in range(0, size, 2**20):
            assert len(await files.read("f", offset, 2**20)) == min(2**20, size - offset)
    await both(64)  # 4 MiB: threads and pools are there
    before = peak_kib()
    await both(1600)
    print(peak_kib() - before)

asyncio.run(run())
"""


def test_writing_and_reading_100_mb_keeps_memory_flat(tmp_path: Path) -> None:
    requires("linux")
    command = [sys.executable, "-c", RSS_OF_100_MB, str(tmp_path)]
    grown_kib = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert (tmp_path / "f").stat().st_size == 1600 * 65_536
    assert grown_kib < 8 * 1024, f"{grown_kib} KiB more than for 4 MiB"
