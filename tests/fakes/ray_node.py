"""What stands in for `ray start --head --block` where a test is about processes, not about Ray.

    python ray_node.py RUN_DIR MODE

Modes: `run` writes the address and stays, beside a child in a session of its own (as HAProxy and engines are); `refuse`
says why it cannot start; `busy` fails for a port the first time, for time the second, and runs the third; `stubborn`
ignores SIGTERM, and so does its child; `silent` never gets as far as an address; `short` ends by itself a moment after
it has started.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS = "127.0.0.1:12345"
STAY_S = 600  # longer than any test
SHORT_S = 0.3
CHILD = f"import signal, time; signal.signal(signal.SIGTERM, signal.{{}}); time.sleep({STAY_S})"


def command(mode: str, folder: Path) -> Callable[..., list[str]]:
    """A replacement for `serve_app.cluster.local.node.ray_command`; `folder` remembers what happened before."""

    def build(run_dir: Path, block: Any, **options: Any) -> list[str]:
        return [sys.executable, __file__, str(run_dir), mode, str(folder)]

    return build


def main(run_dir: Path, mode: str, folder: Path) -> int:
    attempts = folder / "attempts"
    attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
    if mode == "refuse":
        print("the disk is full")
        return 1
    if mode == "busy" and attempts.read_text() == "x":
        print("OSError: Address already in use")
        return 1
    if mode == "busy" and attempts.read_text() == "xx":
        print("Exception: The current node timed out during startup.")
        return 1
    stubborn = mode == "stubborn"
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", CHILD.format("SIG_IGN" if stubborn else "SIG_DFL")], start_new_session=True)
    logs = run_dir / "ray" / "session_2026" / "logs"
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text("hello")
    if mode != "silent":
        (run_dir / "ray" / "ray_current_cluster").write_text(ADDRESS)
    time.sleep(SHORT_S if mode == "short" else STAY_S)  # a node that ends at once, or stays until it is ended
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
