"""A program of ours on an ordinary Ray and Serve, in a process without anything of the tests' own environment."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from tests.waiting import patient

RUN_S = 180  # a Ray of its own starts, answers and ends in 15 to 20 s on an idle machine


def run_alone(module: str) -> Any:
    """Run `python -m module PORT FOLDER`, which has to succeed; what its last line holds, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="sp-", dir="/tmp")  # short: Ray's socket paths have 107 bytes at most
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, str(port), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=patient(RUN_S),
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
