"""Finds and ends the processes of an instance, and lists their listening ports.

Every process of an instance carries `SERVE_APP_INSTANCE=<mark>` in its initial environment, so all descendants are
found, even if their parents have ended.

Invariant: a signal goes only to a process whose environment holds exactly the mark; psutil refuses to signal a process
id that was reused meanwhile.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from serve_app.errors import Unavailable
from serve_app.names import MARK

POLL_S = 0.05  # the polling period for the end of processes
LOG_TAIL_LINES = 20  # of Ray's start log, in the error
CHILDREN_OF_THIS_THREAD = Path("/proc/thread-self/children")
KILL_S = 10.0  # SIGKILL acts at once; a process in uninterruptible disk sleep may take seconds
START_ATTEMPTS = 3  # of Ray, see TRANSIENT_ERRORS
# Errors of Ray after which another try can succeed: a port was taken before Ray bound it; or the agent was not up in
# the 15 s of Ray 2.60's raylet (no setting), which a cold disk or a loaded machine can exceed; the next try is warm.
TRANSIENT_ERRORS = ("in use", "Failed to bind", "timed out during startup")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP address. `address` is numeric; an IPv4 address mapped into IPv6 is given as IPv4."""

    address: str
    port: int
    pid: int
    process: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid this identifies a process. None: it is gone.

    Not psutil's `create_time`, which changes with the machine's clock, while other processes store this value.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs.

    By the kernel's lists of the children of each thread, which take 0.1 ms; psutil reads every process of the machine,
    and does so here where the kernel has no such lists. A child may be missing in a call during which another child of
    the same thread ends.
    """
    if not CHILDREN_OF_THIS_THREAD.exists():
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    found: list[int] = []
    waiting = [pid]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    """Empty if the process has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        # the first thread is read last: it gets the children of a thread that ends meanwhile
        for thread in reversed(os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                found += map(int, children.read().split())
    return found


def this_process() -> tuple[int, int]:
    """The pid of this process and its start in ticks."""
    pid = os.getpid()
    ticks = start_ticks(pid)
    assert ticks is not None
    return pid, ticks


def ask_to_end(pid: int, ticks: int | None, timeout_s: float) -> None:
    """Send SIGTERM to the process with this pid and start, and wait at most `timeout_s` for its end."""
    if ticks is None or start_ticks(pid) != ticks:
        return
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        psutil.Process(pid).terminate()
    deadline = time.monotonic() + timeout_s
    while start_ticks(pid) == ticks and time.monotonic() < deadline:
        time.sleep(POLL_S)


def spawn(module: str, *arguments: str, log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a Python module, with its output in the log, in a session of its own: it outlives the launcher's terminal
    and gets no Ctrl-C.

    Args:
        options: of `subprocess.Popen`.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )


def await_start(process: subprocess.Popen[bytes], ready: Callable[[], T | None], log: Path, timeout_s: float) -> T:
    """Poll `ready`, which checks that Ray is up, and return its first result that is not None.

    Raises:
        Unavailable: the process has ended, or the time is over; the message has the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while (found := ready()) is None:
        late = time.monotonic() > deadline
        if late or process.poll() is not None:
            within = f" within {timeout_s:.0f} s" if late else ""
            end = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise Unavailable(f"Ray did not start{within}:\n{end}", code="cluster_failed")
        time.sleep(POLL_S)
    return found


def is_transient(text: str) -> bool:
    """Whether Ray, which has failed to start, can succeed at another try. `text`: what it has printed."""
    return any(words in text for words in TRANSIENT_ERRORS)


def may_start_again(attempts: int, text: str) -> bool:
    """Whether it gets another try after so many."""
    return attempts < START_ATTEMPTS and is_transient(text)


def _carriers(mark: str, spare: Collection[int]) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone since the listing, or not readable by this user
            if process.pid not in spare and process.environ().get(MARK) == mark:
                yield process


def marked(mark: str, *, spare: Collection[int] = ()) -> list[int]:
    """Living processes that carry the mark, except those in `spare`; ascending."""
    return [process.pid for process in _carriers(mark, spare)]


def _signal(mark: str, number: signal.Signals) -> bool:
    """Signal every process that carries the mark, except this one. Returns whether there was any."""
    found = False
    for process in _carriers(mark, (os.getpid(),)):
        found = True
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return found


def wait_gone(mark: str, timeout_s: float, *, spare: Collection[int] = ()) -> list[int]:
    """Wait until no process carries the mark; returns the processes left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark, spare=spare)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def end_marked(mark: str, grace_s: float) -> None:
    """End every process that carries the mark, except this one: SIGTERM, after `grace_s` SIGKILL, until none is left.
    With `grace_s` 0 they are killed at once."""
    if grace_s > 0:
        _signal(mark, signal.SIGTERM)
        wait_gone(mark, grace_s, spare=(os.getpid(),))
    deadline = time.monotonic() + KILL_S
    # repeated: a process may start another one between the listing and its own end
    while _signal(mark, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def listening_ports(root_pids: Iterable[int]) -> list[Listener]:
    """Every TCP address on which these processes or their descendants listen, by port.

    An address shared by several processes is listed once, with the lowest process id.
    """
    family: set[psutil.Process] = set()
    for pid in root_pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            family |= {psutil.Process(pid), *psutil.Process(pid).children(recursive=True)}
    listeners: dict[tuple[str, int], Listener] = {}
    for process in sorted(family, key=lambda member: member.pid):
        with contextlib.suppress(psutil.Error):
            for entry in process.net_connections("tcp"):
                if entry.status == psutil.CONN_LISTEN and entry.laddr:
                    found = Listener(_numeric(entry.laddr.ip), entry.laddr.port, process.pid, process.name())
                    listeners.setdefault((found.address, found.port), found)
    return sorted(listeners.values(), key=lambda listener: (listener.port, listener.address))


def holder_of(port: int) -> Listener | None:
    """The process that listens on the port, if visible to this user."""
    for entry in psutil.net_connections("tcp"):
        if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr.port == port and entry.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return Listener(_numeric(entry.laddr.ip), port, entry.pid, psutil.Process(entry.pid).name())
    return None


def _numeric(address: str) -> str:
    return str(getattr(ipaddress.ip_address(address), "ipv4_mapped", None) or address)
