"""Whose CPU time it was: the processes of one server, their roles, and what each role used between two moments (Linux).

`python -m benchmarks.common.processes INSTANCE [--seconds S]` shows what each process of a running instance uses, as a
table for a document: cores and wakes a second. Load beside it makes cores more, and leaves wakes as they are.

Invariant: a process belongs to a server by descent from its root, or by carrying its instance name in its environment
(daemons leave the tree); CPU time is counted once, under one role.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common.output import write_line

INSTANCE_VARIABLE = "SERVE_APP_INSTANCE"  # inherited by all that `serve-app up` starts

ENGINE_CORE = "EngineCore"
API_SERVER = "vLLM API server"
ENGINE_REPLICA = "engine replica"
ROUTER_REPLICA = "router replica"
HAPROXY = "HAProxy"
# Searched in this order in command line or process title; the first part found gives the role.
ROLE_MARKS: tuple[tuple[str, str], ...] = (
    ("VLLM::EngineCore", ENGINE_CORE),
    ("VLLM::Worker", ENGINE_CORE),  # ranks of a tensor-parallel engine run the model outside EngineCore's process
    ("ray::RayWorker", ENGINE_CORE),  # the same where Ray starts them
    ("vllm.entrypoints", API_SERVER),
    ("VLLM::APIServer", API_SERVER),
    ("serve_app.cli", "supervisor"),
    ("serve_app.cluster.local", "supervisor"),
    ("haproxy", HAPROXY),
    ("ray::ServeController", "Serve controller"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "GCS"),
    ("ray::", "other Ray"),
    ("/ray/", "other Ray"),
    ("ray-dashboard", "other Ray"),
)
REPLICA_MARK = "ray::ServeReplica:"
OTHER = "other"


def role_of(title: str) -> str:
    """The role of a process in a server, from its command line or the title it gave itself."""
    if title.startswith(REPLICA_MARK):
        deployment = title.removeprefix(REPLICA_MARK).split(":", 1)[-1].lower()
        return ROUTER_REPLICA if "router" in deployment else ENGINE_REPLICA
    return next((role for mark, role in ROLE_MARKS if mark in title), OTHER)


def alive(members: Iterable[psutil.Process]) -> set[int]:
    """The pids of those that still run: the same process, and no zombie (ended, its parent has not looked)."""
    found = set()
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def arguments_of(pid: int) -> list[str]:
    """Command line, or the title the process gave itself; empty when it is gone or another user's."""
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def title_of(pid: int) -> str:
    return " ".join(arguments_of(pid)).strip()


def titled(pids: Iterable[int], title: str) -> list[int]:
    """Those of the processes whose titles begin so."""
    return [pid for pid in pids if title_of(pid).startswith(title)]


def is_marked(process: psutil.Process, instance: str) -> bool:
    """Whether the environment of a process names the instance; `up` adds "-" and a token to the name."""
    try:
        found = process.environ().get(INSTANCE_VARIABLE, "")
    except psutil.Error:  # gone, or another user's
        return False
    return found == instance or found.startswith(f"{instance}-")


def family(root: int, instance: str | None = None) -> dict[int, psutil.Process]:
    """All processes of a server by pid: `root`, those marked with `instance`, and their descendants."""
    seeds = [process for process in psutil.process_iter() if instance is not None and is_marked(process, instance)]
    with contextlib.suppress(psutil.NoSuchProcess):
        seeds.append(psutil.Process(root))
    members = {seed.pid: seed for seed in seeds}
    for seed in seeds:
        with contextlib.suppress(psutil.NoSuchProcess):
            members |= {child.pid: child for child in seed.children(recursive=True)}
    members.pop(os.getpid(), None)
    return members


def cpu_s(process: psutil.Process) -> float | None:
    """User and system time of a process; None when it is gone."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return float(used.user + used.system)


class CpuMeter:
    """CPU time of one server by role between `begin` and `end`.

    Membership is looked up in the constructor and again in `end`, so that `begin` costs no more than the reads: a
    process born in between counts whole, one that dies in between is lost (and named in `lost`).
    """

    def __init__(self, root: int, instance: str | None) -> None:
        self._root = root
        self._instance = instance
        self._members = family(root, instance)
        self.lost: list[str] = []

    def begin(self) -> None:
        self._at_begin = {p: used for p in self._members.values() if (used := cpu_s(p)) is not None}

    def end(self) -> dict[str, float]:
        """CPU seconds by role since `begin`."""
        now = {p: used for p in self._members.values() if (used := cpu_s(p)) is not None}
        late = family(self._root, self._instance).values() - now.keys()  # the earlier reading is nearer to the edge
        now |= {p: used for p in late if (used := cpu_s(p)) is not None}
        by_role: dict[str, float] = {}
        for p, used in now.items():
            role = role_of(title_of(p.pid))
            by_role[role] = by_role.get(role, 0.0) + used - self._at_begin.pop(p, 0.0)
        self.lost = [str(p.pid) for p in self._at_begin]
        return by_role


def machine_busy_s() -> float:
    """CPU seconds that all processes of this machine have used since boot."""
    now = psutil.cpu_times()
    return float(now.user + now.nice + now.system + now.irq + now.softirq)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process used. `wakes_per_s`: voluntary context switches of its threads, a second."""

    name: str
    cores: float
    wakes_per_s: float


def name_of(title: str) -> str:
    """A short name of a process: its actor, its Serve deployment, its Python module, or its program."""
    if title.startswith("ray::"):
        return title.split(":")[-1].split(".")[0]
    program, *arguments = title.split() or [""]
    module = next((one for one in arguments if not one.startswith("-")), program)
    return Path(module if "python" in Path(program).name else program).name


def wakes(pid: int) -> int:
    """Voluntary context switches of the threads that a process has now."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)
            count += int(found[1]) if found else 0
    return count


def uses(root: int, instance: str | None, span_s: float) -> list[ProcessUse]:
    """What each process of a server used in the next `span_s`, the most first; without those born or ended in it."""
    at_begin = [(process, cpu_s(process), wakes(process.pid)) for process in family(root, instance).values()]
    began = time.monotonic()
    time.sleep(span_s)
    took_s = time.monotonic() - began
    found = []
    for process, used_s, woken in at_begin:
        now_s = cpu_s(process)
        if used_s is not None and now_s is not None:
            wakes_per_s = (wakes(process.pid) - woken) / took_s
            found.append(ProcessUse(name_of(title_of(process.pid)), (now_s - used_s) / took_s, wakes_per_s))
    return sorted(found, key=lambda use: use.cores, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.common.processes", description=__doc__)
    parser.add_argument("instance", help="the name given to `serve-app up`, or its default")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    found = uses(os.getpid(), options.instance, options.seconds)
    write_line("| process | cores | wakes/s |\n| --- | --- | --- |")
    for use in [*found, ProcessUse("all", sum(use.cores for use in found), sum(use.wakes_per_s for use in found))]:
        write_line(f"| {use.name} | {use.cores:.4f} | {use.wakes_per_s:.0f} |")


if __name__ == "__main__":
    main()
