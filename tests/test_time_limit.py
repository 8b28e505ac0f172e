"""A test that waits for ever, in a pytest of its own: it fails, and the next one runs. And what a test interrupts can
be interrupted, whoever started the tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.interruptible import interruptible
from tests.requires import ROOT, requires

requires("linux")

RUN_S = 180.0  # bound of a pytest of its own: some twelve seconds on an idle machine
STUCK_S = 2.0
ENDLESS = """
import asyncio, subprocess, threading

import pytest

def test_a_process(request):
    with subprocess.Popen(["sleep", "600"]) as child:  # leaving the block waits, too
        request.addfinalizer(child.kill)
        child.wait()

def test_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_an_event_loop():
    asyncio.run(asyncio.Event().wait())

def test_one_that_waits_again():
    try:
        threading.Event().wait()
    except BaseException:
        threading.Event().wait()

@pytest.fixture
def made(tmp_path_factory):
    yield
    (tmp_path_factory.getbasetemp() / "taken down").touch()

@pytest.fixture
def never(made):
    threading.Event().wait()

def test_a_set_up(never):
    pass

def test_after_them():
    pass
"""
SLEEP = [sys.executable, "-S", "-c", "import sys, time; print(flush=True); time.sleep(600)"]
IGNORING = ["env", "--ignore-signal=INT"]  # as the caller of `make test &` in a script


def test_tests_that_wait_for_ever_fail_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(ENDLESS)
    options = ["-p", "tests.time_limit", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={STUCK_S:g}"]
    options += ["--basetemp", str(tmp_path / "made")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *options, str(tmp_path / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert "4 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("waits for something that does not come") >= 5
    assert (tmp_path / "made" / "taken down").exists()


def test_what_is_interrupted_ends_even_where_the_tests_were_started_with_sigint_ignored() -> None:
    for command, ends in (([*IGNORING, *interruptible(SLEEP)], True), ([*IGNORING, *SLEEP], False)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()  # Python has decided by then what SIGINT does
            process.send_signal(signal.SIGINT)
            if not ends:
                process.kill()
            assert process.wait(RUN_S) == (-signal.SIGINT if ends else -signal.SIGKILL)
