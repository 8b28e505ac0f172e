"""Processes that end with who started them."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.common.child import ends_with_us

SOON_S = 60.0
LOOKS = "import os; print(os.getpid())"
# Starts a child that tells its pid and sleeps, and ends without a word to it.
PARENT = """
import signal, subprocess, sys
from benchmarks.common.child import ends_with_us
child = subprocess.Popen([*ends_with_us(signal.Signals(int(sys.argv[1]))), "sleep", "600"], stdout=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_gets_its_signal_when_the_one_that_started_it_dies(end: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(int(end))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.communicate(timeout=SOON_S)
    assert psutil.wait_procs([child], SOON_S)[1] == []


def test_a_command_keeps_the_id_that_its_starter_knows() -> None:
    with subprocess.Popen([*ends_with_us(), sys.executable, "-c", LOOKS], stdout=subprocess.PIPE, text=True) as process:
        reported, _ = process.communicate(timeout=SOON_S)
    assert int(reported.split()[0]) == process.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_of_another_user_has_nothing_of_root() -> None:
    nobody = pwd.getpwnam("nobody")
    command = [*ends_with_us(user="nobody"), "sh", "-c", "id -u; id -g; id -G"]
    reported = subprocess.run(command, capture_output=True, text=True, check=True, timeout=SOON_S).stdout.split()
    assert reported == [str(nobody.pw_uid), str(nobody.pw_gid), str(nobody.pw_gid)]


def test_a_command_that_is_not_there_is_an_error_that_names_it() -> None:
    done = subprocess.run([*ends_with_us(), "no-such-command"], capture_output=True, text=True, timeout=SOON_S)
    assert done.returncode != 0
    assert "FileNotFoundError" in done.stderr
