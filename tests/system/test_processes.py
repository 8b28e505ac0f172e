"""Which processes have come from another one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serve_app.system import descendants, processes
from tests.requires import requires

requires("linux")

PARENT = "import subprocess\nchild = subprocess.Popen(['cat'])\nprint(child.pid, flush=True)\nchild.wait()"


@pytest.mark.parametrize("by", ["the kernel's lists", "psutil"])
def test_children_of_any_thread_and_their_children_are_found_until_they_have_ended(
    by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if by == "psutil":
        monkeypatch.setattr(processes, "CHILDREN_OF_THIS_THREAD", tmp_path / "none")
    started: list[subprocess.Popen[bytes]] = []
    begun = threading.Event()
    ended = threading.Event()

    def start() -> None:
        command = [sys.executable, "-S", "-c", PARENT]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        begun.set()
        ended.wait()

    thread = threading.Thread(target=start)
    thread.start()
    begun.wait()
    (child,) = started
    try:
        assert child.stdout is not None
        family = {child.pid, int(child.stdout.readline())}
        assert family <= set(descendants(os.getpid()))
        ended.set()
        thread.join()
        assert family <= set(descendants(os.getpid())), "they are another thread's now"
    finally:
        ended.set()
        child.communicate()
    assert not family & set(descendants(os.getpid()))
