"""Processes of an instance and what they listen on, read from /proc.

Every process of an instance carries `SERVE_APP_INSTANCE=<mark>` in the environment it was started with, so children of
children are found whoever their parent is by now.

Invariant: a signal goes only to a process whose environment holds exactly the mark, checked on a pidfd that cannot be
recycled in between.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from serve_app.names import MARK

POLL_S = 0.05  # how often the end of processes is looked for
KILL_S = 10.0  # SIGKILL takes effect at once; a process in uninterruptible disk sleep may take seconds
PROC = Path("/proc")
TCP_LISTEN = "0A"  # the kernel's state number in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket. `address` is numeric; an IPv4 address mapped into IPv6 is given as IPv4."""

    address: str
    port: int
    pid: int
    process: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def pids() -> list[int]:
    """Every process id of this /proc, ascending."""
    return sorted(int(name) for name in os.listdir(PROC) if name.isdigit())


def name_of(pid: int) -> str:
    """The process's own short name, "?" once it is gone."""
    try:
        return (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return "?"


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid this names a process for good. None: gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def carries(pid: int, mark: str) -> bool:
    """Whether the process was started with this mark. False as well for one that is gone or not ours to read."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in environment.split(b"\0")


def marked(mark: str, *, spare: Collection[int] = ()) -> list[int]:
    """Living processes that carry the mark, but those in `spare`."""
    return [pid for pid in pids() if pid not in spare and carries(pid, mark)]


def signal_marked(pid: int, mark: str, number: signal.Signals) -> bool:
    """Signal the process if it still carries the mark. Returns whether a signal was sent."""
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return False
        raise
    try:
        if not carries(pid, mark):
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone(mark: str, timeout_s: float, *, spare: Collection[int] = ()) -> list[int]:
    """Wait until no process carries the mark; returns those that are left after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark, spare=spare)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def end_marked(mark: str, grace_s: float, *, spare: Collection[int] = ()) -> list[int]:
    """End every process that carries the mark: SIGTERM, after `grace_s` SIGKILL, until none is left.

    Returns the processes that were found at first. With `grace_s` 0 they are killed at once.
    """
    found = marked(mark, spare=spare)
    if grace_s > 0:
        for pid in found:
            signal_marked(pid, mark, signal.SIGTERM)
        wait_gone(mark, grace_s, spare=spare)
    deadline = time.monotonic() + KILL_S
    # again and again: a process may start another one between our look and its own end
    while (left := marked(mark, spare=spare)) and time.monotonic() < deadline:
        for pid in left:
            signal_marked(pid, mark, signal.SIGKILL)
        time.sleep(POLL_S)
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for pid in pids():
        try:
            stat = (PROC / str(pid) / "stat").read_text()
        except OSError:
            continue  # ended since the listing
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
    return parents


def with_descendants(roots: Iterable[int]) -> list[int]:
    """The processes and all their living descendants, ascending."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return sorted(found)


def _address(text: str) -> str:
    """The kernel's hexadecimal socket address: 32-bit words in host (little-endian) order."""
    raw = bytes.fromhex(text)
    raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _listening_sockets() -> dict[str, tuple[str, int]]:
    """Inode -> (address, port) of every listening TCP socket in this network namespace."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "self" / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # a machine without IPv6
        for line in lines:
            fields = line.split()
            if fields[3] == TCP_LISTEN:
                address, _, port = fields[1].partition(":")
                found[fields[9]] = (_address(address), int(port, 16))
    return found


def _socket_inodes(pid: int) -> list[str]:
    folder = PROC / str(pid) / "fd"
    inodes = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        try:
            target = os.readlink(folder / name)
        except OSError:
            continue  # closed since the listing
        if target.startswith("socket:["):
            inodes.append(target[8:-1])
    return inodes


def listening_ports(root_pids: Iterable[int]) -> list[Listener]:
    """Every TCP socket on which these processes or their descendants listen, by port.

    A socket shared by several processes is listed once, with the lowest process id.
    """
    listeners: dict[str, Listener] = {}
    sockets = _listening_sockets()
    for pid in with_descendants(root_pids):
        for inode in _socket_inodes(pid):
            if inode in sockets and inode not in listeners:
                address, port = sockets[inode]
                listeners[inode] = Listener(address, port, pid, name_of(pid))
    return sorted(listeners.values(), key=lambda one: (one.port, one.address))
