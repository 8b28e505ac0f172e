"""The log files of one node: whose each is, its last lines, its new lines, and those of a request, a time or a level.

Serve writes a file for each replica, for its controller and for HAProxy's manager. Ray writes the standard error of
each worker process to a file; an engine's own output is there (vLLM's errors, of its child processes, too). `mark_log`
puts the replica's id there.

Invariant: at most `MAX_BYTES` of a file are read at a time, and a line is never given in parts.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from serve_app.names import APPLICATION, BATCH_WORKER, ROUTER
from serve_app.system.log_times import LEVELS, LogRecord, head_of, records_of

PROMPT_MARK = " has the prompt: "  # in each line with a prompt, see `serve_app.http.prompt_log`
MAX_BYTES = 16 * 2**20  # of one file: some hundred thousand lines; Ray's own bound on a Serve log is 100 MiB
HEAD_BYTES = 4096  # Ray's and our marks are the first lines of a worker's file
REPLICA_MARK = ":replica:"
FIRST_BYTES = 256 * 1024  # of a file's end, read first where only what is newer than a time is wanted
QUOTA = "quota"
CONTROLLER = "controller"
PROXY = "proxy"
ROUTERS = "router"
WORKERS = "batch"
DEPLOYER = "deployment"
LOG_SOURCES = (ROUTERS, WORKERS, CONTROLLER, PROXY, QUOTA, DEPLOYER)  # beside the engines' deployments
_SERVE_FILE = re.compile(rf"replica_{APPLICATION}_(?P<deployment>.+)_(?P<replica>[a-z0-9]+)\.log(\.\d+)?")
_OTHER_FILE = re.compile(r"(?P<source>controller|proxy)_.*\.log(\.\d+)?")
_ACTOR_SOURCES = {"GpuMemoryQuota": QUOTA, "Deployer": DEPLOYER}  # by the actor's class
_NAMES = rf"ServeReplica:{APPLICATION}:(?P<deployment>.+)|(?P<actor>{'|'.join(_ACTOR_SOURCES)})"
_ACTOR = re.compile(rf"^:actor_name:(?:{_NAMES})$", re.M)
_MARKED = re.compile(rf"^{REPLICA_MARK}(?P<replica>\w+)$", re.M)
_MARK_LINE = re.compile(r":(job_id|actor_name|task_name|replica):")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines are wanted. Empty: no restriction.

    Args:
        source: a deployment, or `router`, `batch`, `controller`, `quota`, `proxy`, `deployment`.
        replica: the beginning of a replica's id.
        request: a request's id, without what an answer's body puts before it.
        level: the lowest level of a record. What has none (a process's own output) is wanted, too.
        since: seconds since 1970; what is older, or has no time and is in a file that is older, is not wanted.
    """

    source: str = ""
    replica: str = ""
    request: str = ""
    level: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LogPart:
    """Lines of one file, in order. `times`: of the record of each line, in seconds since 1970; None: it has none."""

    source: str
    replica: str
    path: str
    lines: tuple[str, ...]
    times: tuple[float | None, ...] = ()


@dataclass(slots=True)
class LogReader:
    """Reads the logs folder of one node (Ray's, with Serve's in it)."""

    folder: str
    wanted: LogFilter
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)  # by device and inode: a rotated file keeps them

    def last(self, lines: int) -> list[LogPart]:
        """The last `lines` wanted lines of each file, the file that was written last at the end."""
        return [
            dataclasses.replace(part, lines=part.lines[-lines:], times=part.times[-lines:])
            for part in self._parts()
            if part.lines
        ]

    def new(self) -> list[LogPart]:
        """The wanted lines that were written since the last call of this or `last`."""
        return [part for part in self._parts() if part.lines]

    def _parts(self) -> Iterator[LogPart]:
        for path, source, replica in self._files():
            text = self._read(path)
            lines = [_printable(line) for line in text.split("\n")[:-1] if not _MARK_LINE.match(line)]
            records = [one for one in records_of(lines, datetime.now()) if self._has(one)]
            kept = [(line, record.head.time) for record in records for line in record.lines]
            yield LogPart(source, replica, str(path), tuple(line for line, _ in kept), tuple(time for _, time in kept))

    def _has(self, record: LogRecord) -> bool:
        """Whether a record is wanted."""
        wanted = self.wanted
        time = record.head.time
        return (
            (time is None or time >= wanted.since)
            and LEVELS.get(record.head.level, LEVELS["CRITICAL"]) >= LEVELS.get(wanted.level, 0)
            and (not wanted.request or any(wanted.request in line for line in record.lines))
        )

    def _files(self) -> list[tuple[Path, str, str]]:
        """Each wanted file with its source and its replica, if it has one."""
        folder = Path(self.folder)
        found = []
        for path in [*folder.glob("serve/*.log*"), *folder.glob("worker-*.err"), *folder.glob("worker-*.out")]:
            owner = _owner(path)
            if owner is not None and self._is_wanted(*owner) and _modified(path) >= self.wanted.since:
                found.append((path, *owner))
        return sorted(found, key=lambda file: (_modified(file[0]), file[0]))

    def _newest(self, file: BinaryIO, known: int, size: int) -> tuple[int, bytes]:
        """The end of a file from `known` on, as far back as is wanted, and where it begins."""
        length = FIRST_BYTES if self.wanted.since else MAX_BYTES
        while True:
            length = min(length, MAX_BYTES)
            begin = max(known, size - length)
            file.seek(begin)
            data = file.read(length)
            if begin == known or length == MAX_BYTES or _is_older(data, self.wanted.since):
                return begin, data
            length *= 4

    def _is_wanted(self, source: str, replica: str) -> bool:
        of_source = not self.wanted.source or source == self.wanted.source
        # of a request's lines, those of routers and engines
        of_request = not self.wanted.request or source not in (CONTROLLER, PROXY)
        return of_source and of_request and (not self.wanted.replica or replica.startswith(self.wanted.replica))

    def _read(self, path: Path) -> str:
        """The whole lines since the last reading."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                size = found.st_size
                known = self._offsets.get(identity, 0)  # where a line begins
                if size < known:  # another file with the inode of one that is gone
                    known = 0
                begin, data = self._newest(file, known, size)
        except OSError:  # removed since it was listed
            return ""
        whole = data.rfind(b"\n") + 1
        self._offsets[identity] = begin + whole
        skipped = data.find(b"\n") + 1 if begin > known else 0
        return data[skipped:whole].decode(errors="replace")


def _is_older(data: bytes, since: float) -> bool:
    """Whether a part of a file begins with something that is older, by the first time in it."""
    for line in data[:HEAD_BYTES].decode(errors="replace").split("\n")[1:]:
        head = head_of(line, datetime.now())
        if head is not None and head.time is not None:
            return head.time < since
    return False


def _printable(line: str) -> str:
    """The line with its control characters escaped: a log may hold what a client sent."""
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() or one == "\t" else one.encode("unicode_escape").decode() for one in line)


def mark_log(replica: str) -> None:
    """Write the replica's id into the file that has this process's standard error."""
    os.write(2, f"{REPLICA_MARK}{replica}\n".encode())


def _owner(path: Path) -> tuple[str, str] | None:
    """Source and replica of a file; None: it is none of ours."""
    if found := _SERVE_FILE.fullmatch(path.name):
        return _source(found["deployment"]), found["replica"]
    if found := _OTHER_FILE.fullmatch(path.name):
        return found["source"], ""
    if not path.name.startswith("worker-"):
        return None
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    actor = _ACTOR.search(head)
    marked = _MARKED.search(head)
    if actor is None:
        return None
    replica = "" if marked is None else marked["replica"]
    return _ACTOR_SOURCES.get(actor["actor"]) or _source(actor["deployment"]), replica


def _source(deployment: str) -> str:
    return {ROUTER: ROUTERS, BATCH_WORKER: WORKERS}.get(deployment, deployment)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
