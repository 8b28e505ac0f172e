"""The supervisor of a machine's node: it starts Ray, ends the processes that Ray leaves, and restarts a head.

    node.sh start ──▶ supervisor (a session of its own) ──▶ ray start ──▶ raylet, GCS, monitor: its children

`ray start` ends when the node is up. Its children become the supervisor's (it is a subreaper), so the supervisor sees
each exit status, which distinguishes a crash from a `ray stop`. A crash of any of Ray's processes counts as the node's
crash, as in `ray start --block`.

Restarts: the autoscaler on the head restarts a worker's node (over SSH, as at first), so the supervisor of a worker
only cleans up and ends. Nothing else restarts a head, so its supervisor does, and deploys the application. A first
start that exceeds Ray's own time is tried again until `start` gives up, since the autoscaler never retries it.

Invariant: when the node has ended, for any reason, no process with its mark is left before a restart: no engine that
holds GPU memory, no Ray agent, no HAProxy on the port of the endpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from serve_app.cluster.node.node_record import NodeFolder, NodeRecord
from serve_app.errors import ServeAppError
from serve_app.names import MARK
from serve_app.system import (
    Certificate,
    FallbackHaproxy,
    Tls,
    begin_log,
    end_marked,
    environment,
    is_transient,
    start_ticks,
)

logger = logging.getLogger("serve_app")

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOK_S = 0.5  # the polling period for ended processes
STOP_GRACE_S = 10.0  # engines free their memory within seconds of a SIGTERM
LEFTOVER_GRACE_S = 2.0  # processes left after a crash serve no requests
# Exit statuses that Ray itself counts as an end in order (`ray start --block`): those of SIGTERM, and 0.
IN_ORDER = frozenset({0, signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGTERM})
RESTART_DELAYS_S = (1.0, 5.0, 15.0, 60.0)  # before the first, second, ... restart of a head; after that always the last
STABLE_S = 600.0  # a head that was up for this long restarts with the first delay

# Processes that `ray start` leaves running. Other orphans, as the launcher's SSH connections, become children, too.
PROGRAMS = ("raylet", "gcs_server", "monitor.py", "log_monitor.py", "dashboard.py")


class NodeEnd(enum.Enum):
    """How a node ended."""

    STOP_REQUESTED = "was asked to stop"
    IN_ORDER = "was stopped by Ray"
    CRASH = "crashed"
    NO_START = "did not start"


@dataclass(slots=True)
class NodeSupervisor:
    """Supervises one node until `stop_requested` is set or the node ends for good."""

    folder: NodeFolder
    node: NodeRecord
    stop_requested: threading.Event
    printed: str = ""  # by the last `ray start` that failed

    def run(self) -> int:
        """Supervise the node; returns 0 if it ended in order, 1 if it crashed or never started."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._update(keeper_pid=os.getpid(), keeper_ticks=start_ticks(os.getpid()))
        failures = 0
        while True:
            started = time.monotonic()
            end = self._run_node()
            grace_s = STOP_GRACE_S if end is NodeEnd.STOP_REQUESTED else LEFTOVER_GRACE_S
            end_marked(self.node.mark, grace_s)
            reap()
            failures = 0 if time.monotonic() - started > STABLE_S else failures + 1
            in_order = end in (NodeEnd.STOP_REQUESTED, NodeEnd.IN_ORDER)
            first_start_failed = end is NodeEnd.NO_START and self.node.state == "starting"
            if first_start_failed and is_transient(self.printed):
                logger.warning(
                    "Node of %s did not start within the time that Ray has for it and is started again",
                    self.node.address,
                )
                continue
            if in_order or first_start_failed or not self.node.head:
                break
            delay_s = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1]
            logger.warning("Node %s and starts again in %.0f s; its replicas are lost", end.value, delay_s)
            self._update(state="restarting", restarts=self.node.restarts + 1)
            if self.stop_requested.wait(delay_s):
                break
        logger.info("Node %s and stays down", end.value)
        shutil.rmtree(self.node.run_dir, ignore_errors=True)
        if first_start_failed:
            self._update(state="failed")
        else:
            self.folder.forget(self.node.mark)
        return 0 if in_order else 1

    def _run_node(self) -> NodeEnd:
        """Start the node and wait for its end."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *self.node.arguments]
        logged = self.folder.log.stat().st_size
        start = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while start.poll() is None:
            if self.stop_requested.wait(LOOK_S):
                start.kill()
                start.wait()
                return NodeEnd.STOP_REQUESTED
        if start.returncode != 0:
            self.printed = self.folder.log.read_bytes()[logged:].decode(errors="replace")
            return NodeEnd.NO_START
        vital = children()
        self._update(state="up")
        logger.info("Node is up with %s", ", ".join(sorted(vital.values())))
        if self.node.restarts > 0:
            self._redeploy()
        folder = Path(self.node.run_dir)
        stand_in = FallbackHaproxy(folder)
        certificate = Certificate(folder, Tls.of(os.environ))
        while not self.stop_requested.wait(LOOK_S):
            stand_in.check()
            certificate.check()
            for pid, status in reap().items():
                if pid in vital:
                    logger.info("Process %d (%s) ended with status %d", pid, vital[pid], status)
                    return NodeEnd.IN_ORDER if status in IN_ORDER else NodeEnd.CRASH
        return NodeEnd.STOP_REQUESTED

    def _redeploy(self) -> None:
        """Deploy the application again: a restarted GCS without Redis has lost it. A failure is only logged."""
        config = self.folder.application()
        if config is None:
            return
        logger.info("Node deploys %s again", config)
        # not waited for: it is reaped like the other children, and carries the mark
        subprocess.Popen(
            [sys.executable, "-m", "serve_app.cli", "deploy", "--config", config],
            stdin=subprocess.DEVNULL,
            env=driver_environment(self.node.address, Path(os.environ["RAY_AUTH_TOKEN_PATH"]))
            | {MARK: self.node.mark, "TEMP": self.node.run_dir},  # it may be ended before it has cleaned up
        )

    def _update(self, **changes: object) -> None:
        self.node = dataclasses.replace(self.node, **changes)  # type: ignore[arg-type]
        self.folder.write(self.node)


def reap() -> dict[int, int]:
    """The exit statuses of all ended children, negative for a signal."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):  # no child is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def driver_environment(address: str, token_file: Path) -> dict[str, str]:
    """This process's environment for a driver of the cluster: without the node's RAY_SERVE_ variables, which no driver
    may have."""
    inherited = environment.usable(os.environ)
    usable = {name: value for name, value in inherited.items() if not name.startswith("RAY_SERVE_")}
    return usable | environment.client_environment(address, token_file)


def children() -> dict[int, str]:
    """The living children of this process that are one of PROGRAMS."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since the listing
            programs = [name for word in child.cmdline() if (name := Path(word).name) in PROGRAMS]
            if programs:
                found[child.pid] = programs[0]
    return found


def main() -> int:
    folder = NodeFolder(Path(sys.argv[1]))
    node = folder.node()
    if node is None:
        raise SystemExit(f"{folder.path} has no node to supervise")
    begin_log("supervisor")
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher's terminal has gone
    try:
        return NodeSupervisor(folder, node, stop_requested).run()
    except ServeAppError as error:
        logger.error("Supervisor ends: %s. Mend the cause and start the node again", error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
