"""The log files of one node: whose each is, its last lines, its new lines, and the lines about a request.

Serve writes a file for each replica, for its controller and for HAProxy's manager. Ray writes the standard error of
each worker process to a file; an engine's own output is there (vLLM's errors, of its child processes, too). `mark_log`
puts the replica's id there.

Invariant: at most `MAX_BYTES` of a file are read at a time, and a line is never given in parts.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.names import APPLICATION, BATCH_WORKER, ROUTER

MAX_BYTES = 16 * 2**20  # of one file: some hundred thousand lines; Ray's own bound on a Serve log is 100 MiB
HEAD_BYTES = 4096  # Ray's and our marks are the first lines of a worker's file
REPLICA_MARK = ":replica:"
CONTINUED_LINES = 50  # of a traceback below the line that names the request
QUOTA = "quota"
CONTROLLER = "controller"
PROXY = "proxy"
ROUTERS = "router"
WORKERS = "batch"
LOG_SOURCES = (ROUTERS, WORKERS, CONTROLLER, PROXY, QUOTA)  # beside the engines' deployments
_SERVE_FILE = re.compile(rf"replica_{APPLICATION}_(?P<deployment>.+)_(?P<replica>[a-z0-9]+)\.log(\.\d+)?")
_OTHER_FILE = re.compile(r"(?P<source>controller|proxy)_.*\.log(\.\d+)?")
_ACTOR = re.compile(rf"^:actor_name:(?:ServeReplica:{APPLICATION}:(?P<deployment>.+)|(?P<quota>GpuMemoryQuota))$", re.M)
_MARKED = re.compile(rf"^{REPLICA_MARK}(?P<replica>\w+)$", re.M)
_MARK_LINE = re.compile(r":(job_id|actor_name|task_name|replica):")
# The first line of a record: Serve's begins with the level, one of Ray's (the quota actor's) with the time; or JSON.
_RECORD = re.compile(r"([-\d]+ [\d:,.]+\s+)?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|\{\"time\": ")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which lines are wanted. Empty: no restriction.

    Args:
        source: a deployment, or `router`, `batch`, `controller`, `quota`, `proxy`.
        replica: the beginning of a replica's id.
        request: a request's id, without what an answer's body puts before it.
    """

    source: str = ""
    replica: str = ""
    request: str = ""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Lines of one file, in order."""

    source: str
    replica: str
    path: str
    lines: tuple[str, ...]


@dataclass(slots=True)
class LogReader:
    """Reads the logs folder of one node (Ray's, with Serve's in it)."""

    folder: str
    wanted: LogFilter
    _offsets: dict[tuple[int, int], int] = field(default_factory=dict)  # by device and inode: a rotated file keeps them

    def last(self, lines: int) -> list[LogPart]:
        """The last `lines` wanted lines of each file, the file that was written last at the end."""
        return [dataclasses.replace(part, lines=part.lines[-lines:]) for part in self._parts() if part.lines]

    def new(self) -> list[LogPart]:
        """The wanted lines that were written since the last call of this or `last`."""
        return [part for part in self._parts() if part.lines]

    def _parts(self) -> Iterator[LogPart]:
        for path, source, replica in self._files():
            text = self._read(path)
            lines = [_printable(line) for line in text.split("\n")[:-1] if not _MARK_LINE.match(line)]
            if self.wanted.request:
                lines = list(_about(self.wanted.request, lines))
            yield LogPart(source, replica, str(path), tuple(lines))

    def _files(self) -> list[tuple[Path, str, str]]:
        """Each wanted file with its source and its replica, if it has one."""
        folder = Path(self.folder)
        found = []
        for path in [*folder.glob("serve/*.log*"), *folder.glob("worker-*.err"), *folder.glob("worker-*.out")]:
            owner = _owner(path)
            if owner is not None and self._is_wanted(*owner):
                found.append((path, *owner))
        return sorted(found, key=lambda file: (_modified(file[0]), file[0]))

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
                begin = max(known, size - MAX_BYTES)
                file.seek(begin)
                data = file.read(MAX_BYTES)
        except OSError:  # removed since it was listed
            return ""
        whole = data.rfind(b"\n") + 1
        self._offsets[identity] = begin + whole
        skipped = data.find(b"\n") + 1 if begin > known else 0
        return data[skipped:whole].decode(errors="replace")


def _printable(line: str) -> str:
    """The line with its control characters escaped: a log may hold what a client sent."""
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
    return (QUOTA if actor["quota"] else _source(actor["deployment"])), replica


def _source(deployment: str) -> str:
    return {ROUTER: ROUTERS, BATCH_WORKER: WORKERS}.get(deployment, deployment)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _about(request: str, lines: Sequence[str]) -> Iterator[str]:
    """The lines that name the request, each with the lines of its record below it (a traceback)."""
    left = 0
    for line in lines:
        if request in line:
            left = CONTINUED_LINES
            yield line
        elif left and not _RECORD.match(line):
            left -= 1
            yield line
        else:
            left = 0
