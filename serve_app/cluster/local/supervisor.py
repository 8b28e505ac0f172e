"""The process between the owner and Ray: it starts the node and ends all processes when the owner is gone.

    owner (CLI, pytest, a benchmark) ──pipe──▶ supervisor ──▶ ray start --block ──▶ raylet, Serve, engines, HAProxy

Invariant: when the owner's end of the pipe closes, by a stop or by SIGKILL of the owner, the supervisor ends every
other process with the mark, and then itself.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serve_app.names import MARK
from serve_app.system import Certificate, FallbackHaproxy, Tls, begin_log, end_marked

logger = logging.getLogger("serve_app")

NODE_STOP_S = 10.0  # `ray start` ends its processes within 3 s of SIGTERM; engines free their memory meanwhile
LEFTOVER_GRACE_S = 2.0  # for processes unknown to Ray, such as HAProxy, to end by themselves
WATCH_PERIOD_MS = 500  # how soon the end of the node or of HAProxy, or a new certificate, is noticed


def _wait_for_end(node: subprocess.Popen[bytes], stop_requested: threading.Event) -> None:
    """Returns when the owner is gone (its pipe is closed), a stop is requested, or the node has ended."""
    folder = Path(os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent
    stand_in = FallbackHaproxy(folder)
    certificate = Certificate(folder, Tls.of(os.environ))
    pipe = select.poll()
    pipe.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not stop_requested.is_set() and node.poll() is None:
        stand_in.check()
        certificate.check()
        if pipe.poll(WATCH_PERIOD_MS) and not os.read(sys.stdin.fileno(), 1024):
            return


def main(command: list[str]) -> int:
    """Run the command (`ray start ... --block`) until it ends or this process must end. Returns its exit status."""
    begin_log("supervisor")
    mark = os.environ[MARK]
    stop_requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which then closes the pipe
    node = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_for_end(node, stop_requested)
        if node.poll() is None:
            node.terminate()
            node.wait(NODE_STOP_S)
    except subprocess.TimeoutExpired:
        logger.warning("Ray did not end its node within %.0f s and is killed", NODE_STOP_S)
    finally:
        end_marked(mark, LEFTOVER_GRACE_S)
    return node.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
