"""Files in a folder of this machine.

Invariant: a file is complete and on the disk, or not there: an upload goes to a file of its own below `uploads`, which
is synced, renamed, and the folder synced. Whatever fails leaves the file of that name as it was. Each call may be
repeated; two uploads of one name do not meet, and the later `finish` stays.

An upload whose client died is removed when another one begins, or a file is deleted, an hour after its last piece.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from serve_app.errors import NotFound, StorageAway, StorageFull

logger = logging.getLogger("ray.serve")

FILE_MODE = 0o600
FOLDER_MODE = 0o700
UPLOADS = "uploads"
ABANDONED_S = 3600.0  # since the last piece; a client goes on within seconds, a worker's next page comes in minutes
SYNC_BYTES = 16 * 2**20  # what the last sync has to write at most: a slow disk takes a second for it
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class LocalFiles:
    """Blocking calls. Each raises StorageFull, and StorageAway for whatever else the folder refuses.

    Args:
        now: seconds since 1970, of the clock of the disk.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._uploads = folder / UPLOADS
        self._now = now
        with _own_errors():
            self._make_folders()

    def write_at(self, name: str, upload: str, offset: int, data: bytes) -> None:
        """Write a piece of an upload; the one at 0 begins it."""
        path = self._upload(name, upload)
        if not offset:
            self.remove_abandoned()
        try:
            with _own_errors():
                if not offset:
                    self._make_folders()
                begin = 0 if offset else os.O_CREAT
                with _opened(path, os.O_WRONLY | begin) as descriptor:
                    _write_all(descriptor, offset, data)
                    if offset // SYNC_BYTES != (offset + len(data)) // SYNC_BYTES:
                        os.fdatasync(descriptor)
        except StorageFull:
            self.discard(name, upload)
            raise

    def finish(self, name: str, upload: str, size: int) -> None:
        """Make an upload of `size` bytes the file of this name."""
        source = self._upload(name, upload)
        target = self._file(name)
        try:
            with _own_errors():
                try:
                    with _opened(source, os.O_RDWR) as descriptor:
                        written = os.fstat(descriptor).st_size
                        os.fsync(descriptor)
                except FileNotFoundError:
                    if not target.exists() or target.stat().st_size != size:
                        raise
                    return  # the answer of an earlier call was lost
                if written != size:
                    raise OSError(errno.EIO, f"{written} bytes of {size} were written")
                source.replace(target)
                _sync(self._folder)
        except (StorageFull, StorageAway):
            self.discard(name, upload)
            raise

    def discard(self, name: str, upload: str) -> None:
        """Give an upload up."""
        with _own_errors():
            self._upload(name, upload).unlink(missing_ok=True)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Fewer bytes only at the end. Raises NotFound."""
        with _own_errors(), self._found(name), self._file(name).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def size(self, name: str) -> int:
        """Raises NotFound."""
        with _own_errors(), self._found(name):
            return self._file(name).stat().st_size

    def delete(self, name: str) -> None:
        self.remove_abandoned()
        with _own_errors():
            path = self._file(name)
            if path.exists():
                path.unlink(missing_ok=True)
                _sync(self._folder)

    def remove_abandoned(self) -> None:
        """Remove the uploads that nobody goes on with."""
        with contextlib.suppress(OSError):  # this serves the call that comes next, which names what is wrong
            for entry in list(os.scandir(self._uploads)):
                if self._now() - entry.stat().st_mtime > ABANDONED_S:
                    logger.warning(
                        "Upload %s got no data for over %.0f s and is removed; send the file again",
                        entry.name,
                        ABANDONED_S,
                    )
                    Path(entry).unlink(missing_ok=True)

    def _make_folders(self) -> None:
        if not self._uploads.is_dir():
            for folder in (self._folder, self._uploads):  # one there already keeps its mode
                folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            _sync(self._folder)
            _sync(self._folder.parent)

    def _file(self, name: str) -> Path:
        return self._folder / _checked(name)

    def _upload(self, name: str, upload: str) -> Path:
        return self._uploads / f"{_checked(name)}.{_checked(upload)}"

    @contextlib.contextmanager
    def _found(self, name: str) -> Iterator[None]:
        """Raises NotFound for a file that is missing, unless the whole folder is: its disk is not mounted."""
        try:
            yield
        except FileNotFoundError:
            if not self._uploads.is_dir():
                raise
            raise NotFound(f"there is no file {name}", code="file_not_found") from None


def _checked(name: str) -> str:
    """Raises ValueError: the name could lead out of the folder."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"not the name of a file: {name[:128]!r}")
    return name


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises StorageFull and StorageAway for what the operating system refuses."""
    try:
        yield
    except OSError as error:
        # with the path, which is no client's business
        logger.warning("File storage failed; the upload or the read ends: %s", error)
        reason = error.strerror or type(error).__name__
        if error.errno in FULL:
            raise StorageFull(f"the disk of the files is full: {reason}; nothing of the file was kept") from None
        raise StorageAway(f"the folder of the files cannot be used: {reason}", retry_after_s=5.0) from None


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, offset: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


def _sync(folder: Path) -> None:
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
