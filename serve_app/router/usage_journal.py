"""A router's journal of use on the disk of its node, where it outlives the router: `core.usage.journal` with files.

Invariant: a journal belongs to one process, which holds its lock until it ends, however it ends. It is on the disk
before the batch that it begins with is sent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import logging
import os
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("ray.serve")

SUFFIX = ".journal"
DRAFT_SUFFIX = ".draft"
ASIDE_SUFFIX = ".unreported"
KEPT_S = 86400.0  # the store knows for a week which batches it has; older journals could count twice
MODE = 0o600  # it has the names of keys and tenants


class UsageJournal:
    """Args:
    folder: of this node and cluster; it is made if it is not there. None: nothing is written.
    source: the router's name.
    """

    def __init__(self, folder: Path | None, source: str) -> None:
        self._folder, self._name = folder, urllib.parse.quote(source, safe="")
        self._file: io.FileIO | None = None
        self._is_failing = False

    def restart(self, state: bytes) -> None:
        """Begin anew with a line."""
        if self._folder is None:
            return
        draft = self._folder / f"{self._name}{DRAFT_SUFFIX}"
        with self._logged():
            self._folder.mkdir(parents=True, exist_ok=True)
            begun = io.FileIO(draft, "w", opener=_private)
            try:
                fcntl.flock(begun, fcntl.LOCK_EX)
                _write(begun, state)
                draft.replace(draft.with_suffix(SUFFIX))
            except OSError:
                begun.close()
                raise
            self.leave()
            self._file = begun

    def write(self, line: bytes) -> None:
        """Add a line. A process that is killed at once afterwards has written it."""
        if self._file is not None and not self._is_failing:  # after half a line no other can be read
            with self._logged():
                _write(self._file, line)

    @contextlib.contextmanager
    def left_behind(self) -> Iterator[dict[Path, bytes]]:
        """The journals of processes that have ended, locked for the caller, who removes the ones that the store has."""
        with contextlib.ExitStack() as locks:
            found = {}
            for file in [] if self._folder is None else sorted(self._folder.glob(f"*{SUFFIX}")):
                with contextlib.suppress(FileNotFoundError, BlockingIOError):  # another router's, or it is alive
                    opened = locks.enter_context(file.open("rb"))
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(opened.fileno()).st_ino == file.stat().st_ino:  # not replaced before it was locked
                        found[file] = opened.read()
            yield found

    def close(self) -> None:
        """Remove it: the store has everything."""
        if self._folder is not None:
            with self._logged():
                remove(self._folder / f"{self._name}{SUFFIX}")
        self.leave()

    def leave(self) -> None:
        """Leave it to the other routers of the node."""
        if self._file is not None:
            self._file.close()
        self._file = None

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        """A full disk fails no request. What it costs is the last second of a router that is killed."""
        try:
            yield
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.error(
                    "Journal %s cannot be written; a kill would lose its usage. Free or repair the disk: %s",
                    self._name,
                    error,
                )
            self._is_failing = True


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, MODE)


def _write(file: io.FileIO, line: bytes) -> None:
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, "the disk is full")


def remove(file: Path) -> None:
    """Remove a journal, and what a death while it was begun has left."""
    file.unlink(missing_ok=True)
    file.with_suffix(DRAFT_SUFFIX).unlink(missing_ok=True)


def set_aside(file: Path) -> None:
    """Leave a journal that cannot be reported for a person to look at."""
    file.rename(file.with_suffix(ASIDE_SUFFIX))


def is_too_old(file: Path) -> bool:
    """Whether the store may have forgotten what it has of this journal."""
    return time.time() - file.stat().st_mtime > KEPT_S
