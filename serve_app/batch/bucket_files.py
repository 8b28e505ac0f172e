"""Files at a URL of fsspec, such as a bucket of S3 or GCS. Every process goes there itself.

Invariant: a file is complete or not there: it is written below `uploads`, and moved when all of it is there. In a
bucket that is a copy by its server. Calls of fsspec block, and run in threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import threading
from collections.abc import AsyncIterable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import fsspec

from serve_app.batch.pieces import in_pieces
from serve_app.core.times import BUCKET_CALL_S
from serve_app.errors import ConfigError, NotFound, ServeAppError, StorageAway, StorageFull

logger = logging.getLogger("ray.serve")

THREADS = 8  # calls of one process at once
BLOCK_BYTES = 8 * 2**20  # of one part of an upload; S3 takes 5 MiB at least, and 10,000 of them
UPLOADS = "uploads"
ABANDONED_S = 3600.0  # an upload is moved within seconds once all of it is there
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


class FsspecFiles:
    """`FileStorage` over a file system of fsspec.

    Raises:
        ConfigError: there is no such kind of URL, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            # a listing of names that was kept would hide what other processes write
            self._system, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{error}; for s3:// install serve-app[s3], for gs:// serve-app[gcs]", param="batch.files_url"
            ) from None
        self._root = self._root.rstrip("/")
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")

    async def write(self, name: str, chunks: AsyncIterable[bytes], max_bytes: int) -> int:
        upload = _BucketUpload(self._system, f"{self._root}/{UPLOADS}/{name}.{secrets.token_hex(8)}")
        size = 0
        try:
            await self._run(self._make_place)
            await self._run(upload.begin)
            async with aclosing(in_pieces(chunks, max_bytes)) as pieces:
                async for piece in pieces:
                    await self._run(partial(upload.write, piece))
                    size += len(piece)
            await self._run(partial(upload.finish, self._path(name)))
        except BaseException:
            self._threads.submit(upload.discard)  # not waited for: a bucket that is away keeps its thread for long
            raise
        return size

    async def read(self, name: str, offset: int, length: int) -> bytes:
        return await self._run(lambda: self._read(name, offset, length))

    async def size(self, name: str) -> int:
        return await self._run(lambda: self._size(name))

    async def delete(self, name: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(self._path(name))

        await self._run(remove)

    async def _run(self, work: Callable[[], T]) -> T:
        def checked() -> T:
            with _own_errors():
                return work()

        try:
            async with asyncio.timeout(BUCKET_CALL_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, checked)
        except TimeoutError:
            raise StorageAway(
                f"the storage of files has not answered within {BUCKET_CALL_S:g} s", retry_after_s=5.0
            ) from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_place(self) -> None:
        self._remove_abandoned()
        self._system.makedirs(f"{self._root}/{UPLOADS}", exist_ok=True)

    def _size(self, name: str) -> int:
        try:
            return int(self._system.info(self._path(name))["size"])
        except FileNotFoundError:
            raise NotFound(f"there is no file {name}", code="file_not_found") from None

    def _read(self, name: str, offset: int, length: int) -> bytes:
        try:
            return bytes(self._system.cat_file(self._path(name), start=offset, end=offset + length))
        except Exception:
            if offset >= self._size(name):  # an error in some buckets
                return b""
            raise

    def _remove_abandoned(self) -> None:
        """Remove the uploads that nobody goes on with."""
        try:
            found = self._system.ls(f"{self._root}/{UPLOADS}", detail=False)
        except FileNotFoundError:
            return
        for path in found:
            with contextlib.suppress(FileNotFoundError, NotImplementedError):  # moved meanwhile; some have no times
                changed = self._system.modified(path)
                if changed.tzinfo is None:
                    changed = changed.replace(tzinfo=UTC)
                if (datetime.now(UTC) - changed).total_seconds() > ABANDONED_S:
                    logger.warning(
                        "Upload %s got no data for over %.0f s and is removed; send the file again", path, ABANDONED_S
                    )
                    self._system.rm_file(path)


class _BucketUpload:
    """One file while it is written. `discard` can come while another call runs: its caller was cancelled."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path
        self._file: Any = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self._file = self._system.open(self._path, "wb", block_size=BLOCK_BYTES)

    def write(self, piece: bytes) -> None:
        with self._lock:
            self._file.write(piece)

    def finish(self, target: str) -> None:
        with self._lock:
            self._file.close()
            self._system.mv(self._path, target)

    def discard(self) -> None:
        """Closing a file of fsspec ends its upload, and lets it be removed like every other."""
        try:
            with self._lock, _own_errors(), contextlib.suppress(FileNotFoundError):
                if self._file is not None:
                    self._file.close()
                    self._system.rm_file(self._path)
        except ServeAppError as error:
            logger.info(
                "Upload %s failed and could not be removed; it is removed in %.0f s: %s", self._path, ABANDONED_S, error
            )


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises StorageFull and StorageAway for what the file system refuses; each kind has exceptions of its own."""
    try:
        yield
    except ServeAppError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        logger.warning("File storage failed with %s; the upload or the read ends: %s", type(error).__name__, error)
        if isinstance(error, OSError) and error.errno in FULL:
            raise StorageFull(f"the storage of files is full: {reason}; nothing of the file was kept") from error
        raise StorageAway(f"the storage of files cannot be used: {reason}", retry_after_s=5.0) from error
