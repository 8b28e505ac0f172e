"""Files of JSON lines on a node: each kind of record of each process in segments, bounded in age and in bytes.

    FOLDER/KIND.SOURCE.NUMBER.jsonl     lines in the order of what happened; `SOURCE`: the process

A segment that is full is followed by the next one. Where all are too large together, the oldest of the kind that is
worth least are removed first.

Invariant: each segment belongs to one process, which holds its lock while it writes; what is removed is written by
nobody. A line is there whole or not at all: a part that a full disk has left is cut off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.names import RECORDS_FOLDER

logger = logging.getLogger("ray.serve")

SUFFIX = ".jsonl"
MODE = 0o600  # records have the names of keys and tenants
SEGMENTS = 16  # of the bound in bytes: so much of the oldest records goes at once
MAX_SEGMENT_BYTES = 8 * 2**20
BLOCK_BYTES = 256 * 1024  # read at once from the end of a file
SWEEP_S = 60.0  # between two looks for what is too old or too large


@dataclass(frozen=True, slots=True)
class RecordBounds:
    """What is kept on a node, of the kinds together. `max_bytes`: of all processes of the node."""

    keep_s: float
    max_bytes: int

    @property
    def segment_bytes(self) -> int:
        return min(MAX_SEGMENT_BYTES, max(1, self.max_bytes // SEGMENTS))


def records_folder(ray_session: Path) -> Path:
    """The folder of this node's records: of the instance or the machine, else in the folder of Ray's session."""
    return Path(os.environ.get(RECORDS_FOLDER) or ray_session / "serve_app_records")


class RecordFile:
    """The segments of one kind that this process writes. Not for several threads at once.

    Args:
        extra: of the log records that say that a disk takes no lines, and that it takes them again.
    """

    def __init__(
        self, folder: Path, kind: str, source: str, bounds: RecordBounds, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self.bounds = bounds
        self.lost = 0  # lines that a disk did not take
        self._extra = extra
        self._folder = folder
        self._source = urllib.parse.quote(source, safe="").replace(".", "%2E")
        self._fd: int | None = None
        self._size = 0
        self._is_failing = False

    def write(self, lines: Sequence[bytes]) -> None:
        """Add lines, each without its end. A disk that takes none loses them, and the next ones are tried again."""
        try:
            self.append(lines)
        except OSError as error:
            self.lost += len(lines)
            if not self._is_failing:
                logger.warning(
                    "File of %s cannot be written, and records are lost until it can: %s",
                    *(self.kind, error),
                    extra=self._extra,
                )
            self._is_failing = True
            return
        if self._is_failing:
            logger.info("File of %s is written again; %d records are lost", self.kind, self.lost, extra=self._extra)
        self._is_failing = False

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines, all of them or none. Raises OSError: the disk takes none."""
        if self._fd is None or self._size >= self.bounds.segment_bytes:
            self._begin_segment()
        self._append(b"".join(line + b"\n" for line in lines))

    def close(self) -> None:
        """End the present segment."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    def _begin_segment(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        earlier = self._folder.glob(f"{self.kind}.{self._source}.*{SUFFIX}")
        number = 1 + max((int(path.name.split(".")[2]) for path in earlier), default=0)
        path = self._folder / f"{self.kind}.{self._source}.{number:06d}{SUFFIX}"
        begun = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, MODE)
        fcntl.flock(begun, fcntl.LOCK_EX)
        self.close()
        self._fd = begun
        self._size = 0


def sweep(folder: Path, kinds: Sequence[str], bounds: RecordBounds, now: float) -> list[Path]:
    """Remove what is too old, and what is too much of the kinds together, the oldest of the first kind first. Returns
    what was removed. `now`: seconds since 1970."""
    removed = []
    left: dict[str, list[tuple[float, Path, int]]] = {}
    for kind in kinds:
        for path in sorted(folder.glob(f"{kind}.*{SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
                found = path.stat()
                if found.st_mtime < now - bounds.keep_s and _remove(path):
                    removed.append(path)
                else:
                    left.setdefault(kind, []).append((found.st_mtime, path, found.st_size))
    total = sum(size for files in left.values() for _, _, size in files)
    for kind in kinds:
        for _, path, size in sorted(left.get(kind, ())):
            if total <= bounds.max_bytes:
                return removed
            if _remove(path):
                removed.append(path)
                total -= size
    return removed


def _remove(path: Path) -> bool:
    """Remove a segment, unless its process still writes it. Returns whether it is gone."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(opened)


def segments(folder: Path, kind: str, since: float = 0.0) -> dict[str, list[Path]]:
    """The segments of a kind that were written since then, by source, the newest first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"{kind}.*{SUFFIX}"), reverse=True):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            if path.stat().st_mtime >= since:
                found.setdefault(path.name.split(".")[1], []).append(path)
    return found


def newest_lines(paths: Sequence[Path], has: Callable[[bytes], bool] = bool) -> Iterator[bytes]:
    """The lines of files, from the last one of the first file back. `has`: whether a block of a file may have a line
    that is wanted."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            rest = b""  # the end of a line whose beginning is in the block before
            while end:
                begin = max(0, end - BLOCK_BYTES)
                file.seek(begin)
                block = file.read(end - begin) + rest
                end = begin
                first, found, whole = (b"", b"\n", block) if not begin else block.partition(b"\n")
                if not found:
                    rest = block
                    continue
                rest = first + b"\n" if first or begin else b""
                if has(whole):
                    yield from (line for line in reversed(whole.split(b"\n")) if line)


class Sweeper:
    """Sweeps a folder now and then.

    Args:
        bounds: by the kinds that have them together, the one that is worth least first.
        clock: seconds since 1970.
    """

    def __init__(
        self, folder: Path, bounds: Mapping[tuple[str, ...], RecordBounds], clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._due = 0.0
        self.bounds = dict(bounds)

    def sweep(self) -> None:
        """Sweep, if it is time to."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + SWEEP_S
        try:
            for kinds, bounds in self.bounds.items():
                sweep(self._folder, kinds, bounds, now)
        except OSError as error:
            logger.warning("File of records in %s cannot be removed, and the disk fills up: %s", self._folder, error)
