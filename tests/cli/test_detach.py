"""`serve-app up --detach`: what it starts, when it returns, what is left. What runs in the background is a stand-in."""

from __future__ import annotations

import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer
from rich.console import Console

from serve_app.cli import detach
from serve_app.cli.commands import app
from serve_app.cli.up import LAST_LINE
from serve_app.cluster.local import InstanceState
from serve_app.errors import Unavailable
from tests.requires import requires
from tests.waiting import patient, wait_until

requires("linux")

SEEN_S = 30.0  # for a line to appear, or a process to end
SERVING = f"print('Loading', flush=True); print('Serving tiny', flush=True); print({LAST_LINE!r}, flush=True); "
STAY = "import signal, time; signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
UNTIL_INTERRUPTED = "try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('ended in order', flush=True)"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[InstanceState]:
    """Whatever runs with this folder in its environment is ended."""
    made = InstanceState("one", tmp_path)
    yield made
    for process in psutil.Process().children():
        if process.is_running() and str(tmp_path) in " ".join(process.cmdline()):
            process.kill()


def command(state: InstanceState, code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"{STAY}{code}", str(state.folder)]


def run(state: InstanceState, code: str) -> tuple[int, str]:
    text = io.StringIO()
    return detach.detach(command(state, code), state, Console(file=text, width=200)), text.getvalue()


def background(state: InstanceState) -> psutil.Process:
    (found,) = [one for one in psutil.Process().children() if one.cmdline()[-1:] == [str(state.folder)]]
    return found


def test_it_returns_once_it_serves_and_leaves_it_in_a_session_of_its_own(state: InstanceState) -> None:
    code, reported = run(state, SERVING + "\n" + UNTIL_INTERRUPTED)
    assert code == 0
    lines = reported.splitlines()
    assert lines[:2] == ["Loading", "Serving tiny"]
    assert LAST_LINE not in reported, "Ctrl-C ends nothing here"
    log = state.folder / detach.LOG
    assert lines[2:] == [f"It goes on in the background; `serve-app down` ends it. Its log: {log}"]
    process = background(state)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600, "it may hold a key"
    process.terminate()
    assert process.wait(patient(SEEN_S)) == 0
    assert log.read_text().splitlines()[-1] == "ended in order"


@pytest.mark.parametrize(("status", "returned"), [(2, 2), (130, 130), (0, 1)])
def test_one_that_ends_before_it_serves_is_its_errors_and_its_status(
    state: InstanceState, status: int, returned: int
) -> None:
    code, reported = run(state, f"print('error: port 8000 is taken', flush=True); raise SystemExit({status})")
    assert (code, reported) == (returned, "error: port 8000 is taken\n")


def test_ctrl_c_before_it_serves_ends_it_in_order(state: InstanceState) -> None:
    log = state.folder / detach.LOG
    ended = []

    def interrupt() -> None:
        wait_until(lambda: log.exists() and "Loading" in log.read_text(), SEEN_S, "it loads")
        ended.append(background(state))
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    code, reported = run(state, "print('Loading', flush=True)\n" + UNTIL_INTERRUPTED)
    other.join(patient(SEEN_S))
    assert code == 130
    assert reported.splitlines() == ["Loading", "ended in order"]
    assert not ended[0].is_running()


def test_an_instance_that_runs_is_not_started_twice(state: InstanceState) -> None:
    state.create()
    owner = InstanceState(state.name, state.folder.parent)
    owner.acquire()
    try:
        with pytest.raises(Unavailable, match="already running"):
            run(state, "")
    finally:
        owner.release()
    assert not (state.folder / detach.LOG).exists()


def parsed(*arguments: str) -> typer.Context:
    commands: dict[str, typer.core.TyperCommand] = vars(typer.main.get_command(app))["commands"]
    return commands["up"].make_context("up", list(arguments))


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--config", "my file.yaml", "--port", "9000", "--host", "0.0.0.0", "--instance", "a b"],
        ["--model", "-odd", "--cpus", "3", "--dashboard", "--restart", "--no-check", "--state-dir", "/x"],
    ],
)
def test_the_command_in_the_background_is_the_same_but_for_detach(given: list[str]) -> None:
    context = parsed(*given, "--detach")
    python, *head, verb = detach.same_command(context, without="detach")[:5]
    again = detach.same_command(context, without="detach")[5:]
    assert ([python, *head], verb) == ([sys.executable, "-P", "-m", "serve_app.cli"], "up")
    assert parsed(*again).params == context.params | {"detach": False}
    assert len(again) == len(given)
