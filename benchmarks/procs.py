"""Whose CPU time it was: the processes of one server, their roles, and what each role used between two moments (Linux).

Invariant: a process belongs to a server by descent from its root, or by carrying its instance name in its environment
(daemons leave the tree); CPU time is counted once, under one role.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
INSTANCE_VARIABLE = "SERVE_APP_INSTANCE"  # inherited by all that `serve-app up` starts

ENGINE_CORE = "EngineCore"
# Searched in this order in command line or process title; the first part found gives the role.
ROLE_MARKS: tuple[tuple[str, str], ...] = (
    ("VLLM::EngineCore", ENGINE_CORE),
    ("VLLM::Worker", ENGINE_CORE),  # ranks of a tensor-parallel engine run the model outside EngineCore's process
    ("vllm.entrypoints", "vLLM API server"),
    ("VLLM::APIServer", "vLLM API server"),
    ("serve_app.cli", "supervisor"),
    ("serve_app.local", "supervisor"),
    ("haproxy", "HAProxy"),
    ("ray::ServeController", "Serve controller"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "GCS"),
    ("ray::", "other Ray"),
    ("/ray/", "other Ray"),
    ("ray-dashboard", "other Ray"),
)
REPLICA_MARK = "ray::ServeReplica:"
OTHER = "other"
ENDED_STATES = ("Z", "X", "x")


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table. `cpu_ticks` is user plus system time; (pid, started_ticks) is unique."""

    pid: int
    state: str
    parent: int
    started_ticks: int
    cpu_ticks: int


def parse_stat(text: str) -> Process:
    """A `/proc/<pid>/stat` line. Its second field, a name in brackets, may itself hold blanks and brackets."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return Process(
        int(head.split(" ", 1)[0]), fields[0], int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12])
    )


def role_of(title: str) -> str:
    """The role of a process in a server, from its command line or the title it gave itself."""
    if title.startswith(REPLICA_MARK):
        deployment = title.removeprefix(REPLICA_MARK).split(":", 1)[-1].lower()
        return "router replica" if "router" in deployment else "engine replica"
    return next((role for mark, role in ROLE_MARKS if mark in title), OTHER)


def descendants(parents: Mapping[int, int], seeds: Iterable[int]) -> set[int]:
    """`seeds` and everything below them. `parents` maps a pid to its parent's."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [pid for pid in seeds if pid in parents]
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty when the process is gone or another user's."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def process(pid: int) -> Process | None:
    """One process as it is now; None when it is gone."""
    data = _read(pid, "stat")
    return parse_stat(data.decode(errors="replace")) if data else None


def alive(members: Iterable[Process]) -> set[int]:
    """The pids of those that still run: the same process, and no zombie (ended, its parent has not looked)."""
    found = set()
    for then in members:
        now = process(then.pid)
        if now is not None and now.started_ticks == then.started_ticks and now.state not in ENDED_STATES:
            found.add(now.pid)
    return found


def title_of(pid: int) -> str:
    """Command line, or the title the process gave itself."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def is_marked(environ: bytes, instance: str) -> bool:
    """Whether an environment, as `/proc` gives it, names the instance; `up` adds "-" and a token to the name."""
    prefix = f"{INSTANCE_VARIABLE}={instance}".encode()
    return any(line == prefix or line.startswith(prefix + b"-") for line in environ.split(b"\0"))


def family(root: int, instance: str | None = None) -> dict[int, Process]:
    """All processes of a server by pid: `root`, those marked with `instance`, and their descendants."""
    table = {p.pid: p for entry in PROC.iterdir() if entry.name.isdigit() and (p := process(int(entry.name)))}
    seeds = {root}
    if instance is not None:
        seeds |= {pid for pid in table if is_marked(_read(pid, "environ"), instance)}
    members = descendants({pid: p.parent for pid, p in table.items()}, seeds)
    members.discard(os.getpid())
    return {pid: table[pid] for pid in members}


class CpuMeter:
    """CPU time of one server by role between `begin` and `end`.

    Membership is looked up in the constructor and again in `end`, so that `begin` costs no more than the reads: a
    process born in between counts whole, one that dies in between is lost (and named in `lost`).
    """

    def __init__(self, root: int, instance: str | None) -> None:
        self._root, self._instance = root, instance
        self._members = family(root, instance)
        self.lost: list[str] = []

    def begin(self) -> None:
        self._at_begin = {(p.pid, p.started_ticks): p.cpu_ticks for pid in self._members if (p := process(pid))}

    def end(self) -> dict[str, float]:
        """CPU seconds by role since `begin`."""
        now = {pid: p for pid in self._members if (p := process(pid))}
        now = family(self._root, self._instance) | now  # the earlier reading is nearer to the edge
        used: dict[str, float] = {}
        for p in now.values():
            ticks = p.cpu_ticks - self._at_begin.pop((p.pid, p.started_ticks), 0)
            role = role_of(title_of(p.pid))
            used[role] = used.get(role, 0.0) + ticks / TICKS_PER_S
        self.lost = [str(pid) for pid, _ in self._at_begin]
        return used


def machine_busy_s() -> float:
    """CPU seconds that all processes of this machine have used since boot."""
    first = (PROC / "stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq = (int(x) for x in first[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S
