"""The Python handle needs neither the fast path nor an instance of ours: an ordinary Ray and Serve will do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.requires import requires

RUN_S = 180  # a Ray of its own starts, answers and ends in 20 s on an idle machine


@pytest.mark.long
def test_the_handle_works_on_an_ordinary_serve() -> None:
    requires("linux")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="sp-", dir="/tmp")  # short: Ray's socket paths have 107 bytes at most
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_APP_"))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.plain_handle", str(port), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {
        "client": [True, True],
        "plain": True,
        "another deployment": [True, True, True],
        "errors": [[True, 404, "model_not_found"], [True, 404, "model_not_found"]],
        "after leaving": 0.0,
    }
