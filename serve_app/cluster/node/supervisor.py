"""The process that keeps the node of a machine: it starts Ray, cleans up behind it, and starts a head again.

    node.sh start ──▶ keeper (a session of its own) ──▶ ray start ──▶ raylet, GCS, monitor: the keeper's children

`ray start` ends when the node is up. What it leaves behind becomes the keeper's (it is a subreaper), so the keeper sees
each process's exit status, and by it tells a crash from a `ray stop`. Any of Ray's processes that crashes counts as the
node's crash, as it does for `ray start --block`.

Who starts what again: a worker's node is started by the autoscaler on the head (over SSH, as at first), so the keeper
of a worker only cleans up and ends. Nobody else starts a head again, so its keeper does, and deploys the application.

Invariant: when the node has ended, for whatever reason, no process with its mark is left before anything is started
again: no engine that holds GPU memory, no agent of Ray's, no HAProxy on the port of the endpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil

from serve_app.cluster.node.node_record import Folder, Node
from serve_app.errors import ServeAppError
from serve_app.names import MARK
from serve_app.system import StandIn, client_environment, end_marked, start_ticks, usable

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOK_S = 0.5  # how soon the end of a process is noticed
STOP_GRACE_S = 10.0  # engines free their memory within seconds of a SIGTERM
LEFTOVER_GRACE_S = 2.0  # what is left after a crash answers nobody any more
# What Ray itself counts as an end in order (`ray start --block`): SIGTERM's faces, and 0.
IN_ORDER = frozenset({0, signal.SIGTERM, -signal.SIGTERM, 128 + signal.SIGTERM})
RESTART_DELAYS_S = (1.0, 5.0, 15.0, 60.0)  # before the first, second, ... restart of a head; then always the last
STABLE_S = 600.0  # a head that was up for so long starts at the first delay again


# What `ray start` leaves running. Other orphans become the keeper's children too: the launcher's SSH connections do.
PROGRAMS = ("raylet", "gcs_server", "monitor.py", "log_monitor.py", "dashboard.py")


class End(enum.Enum):
    """How a node ended."""

    TOLD = "told to stop"
    IN_ORDER = "Ray was stopped"
    CRASH = "crashed"
    NO_START = "did not start"


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} keeper: {text}", flush=True)


class Keeper:
    """Keeps one node until it is told to stop or the node ends for good."""

    def __init__(self, folder: Folder, node: Node) -> None:
        self._folder = folder
        self._node = node
        self._told = threading.Event()

    def stop(self) -> None:
        """End the node, soon; may be called from a signal handler."""
        self._told.set()

    def run(self) -> int:
        """Returns 0 for a node that ended in order, 1 for one that crashed or never started."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._update(keeper_pid=os.getpid(), keeper_ticks=start_ticks(os.getpid()))
        failures = 0
        while True:
            started = time.monotonic()
            end = self._once()
            end_marked(self._node.mark, STOP_GRACE_S if end is End.TOLD else LEFTOVER_GRACE_S, spare=(os.getpid(),))
            self._reap()
            failures = 0 if time.monotonic() - started > STABLE_S else failures + 1
            first_start_failed = end is End.NO_START and self._node.state == "starting"
            if end in (End.TOLD, End.IN_ORDER) or first_start_failed or not self._node.head:
                break
            delay_s = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S)) - 1]
            say(f"the node {end.value}; starting it again in {delay_s:.0f} s")
            self._update(state="restarting", restarts=self._node.restarts + 1)
            if self._told.wait(delay_s):
                break
        say(f"the node has ended: {end.value}")
        shutil.rmtree(self._node.run_dir, ignore_errors=True)
        if first_start_failed:
            self._update(state="failed")
        else:
            self._folder.forget(self._node.mark)
        return 0 if end in (End.TOLD, End.IN_ORDER) else 1

    def _once(self) -> End:
        """The node from its start to its end."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *self._node.arguments]
        start = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while start.poll() is None:
            if self._told.wait(LOOK_S):
                start.kill()
                start.wait()
                return End.TOLD
        if start.returncode != 0:
            return End.NO_START
        vital = children()
        again = self._node.restarts > 0
        self._update(state="up")
        say(f"up, with {', '.join(sorted(vital.values()))}")
        if again:
            self._deploy_again()
        return self._watch(vital)

    def _watch(self, vital: dict[int, str]) -> End:
        stand_in = StandIn(Path(self._node.run_dir))
        while not self._told.wait(LOOK_S):
            stand_in.look()
            for pid, status in self._reap().items():
                if pid in vital:
                    say(f"{vital[pid]} (process {pid}) ended with status {status}")
                    return End.IN_ORDER if status in IN_ORDER else End.CRASH
        return End.TOLD

    def _deploy_again(self) -> None:
        """What a restarted GCS without Redis has forgotten. Its outcome is in the log; it is no reason to end."""
        config = self._folder.application()
        if config is None:
            return
        token_file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        command = [sys.executable, "-m", "serve_app.cli", "deploy", "--config", config]
        say(f"deploying {config}")
        # not waited for: its end is reaped like everybody's, and it carries the mark
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=without_serve(usable(os.environ))
            | client_environment(self._node.address, token_file)
            | {MARK: self._node.mark, "TEMP": self._node.run_dir},  # it may be ended before it has cleaned up
        )

    @staticmethod
    def _reap() -> dict[int, int]:
        """The exit statuses of all that have ended, negative for a signal."""
        ended: dict[int, int] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            ended[pid] = os.waitstatus_to_exitcode(status)

    def _update(self, **changes: object) -> None:
        self._node = dataclasses.replace(self._node, **changes)  # type: ignore[arg-type]
        self._folder.write(self._node)


def without_serve(environment: dict[str, str]) -> dict[str, str]:
    """Without the node's tuning of Serve, which no driver may have."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_SERVE_")}


def children() -> dict[int, str]:
    """Which of PROGRAMS live as children of this process."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since the listing
            programs = [name for word in child.cmdline() if (name := Path(word).name) in PROGRAMS]
            if programs:
                found[child.pid] = programs[0]
    return found


def main() -> int:
    folder = Folder(Path(sys.argv[1]))
    node = folder.node()
    if node is None:
        raise SystemExit(f"{folder.path} has no node to keep")
    keeper = Keeper(folder, node)

    def on_signal(number: int, frame: FrameType | None) -> None:
        keeper.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher's terminal has gone
    try:
        return keeper.run()
    except ServeAppError as error:
        say(error.message)
        return 1


if __name__ == "__main__":
    sys.exit(main())
