"""The Makefile as it is, in a checkout whose `.venv` is stamped as complete and holds a stand-in for serve-app."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import install
from tests.interruptible import interruptible
from tests.requires import requires

ROOT = Path(__file__).resolve().parent.parent
COMMAND_S = 30.0  # bound on a make that installs nothing: it takes 0.3 s on an idle machine

FAKE_SERVE_APP = """#!{python}
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    print("keeps what it compiles:", not sys.dont_write_bytecode)
    print("arguments", sys.argv[1:], "PYTHONPATH", os.environ.get("PYTHONPATH"), flush=True)
    if os.environ.get("STAY") is None:
        sys.exit(int(os.environ.get("STATUS", "0")))
    time.sleep({bound})
    sys.exit("nobody stopped it")
except KeyboardInterrupt:
    time.sleep(0.2)  # serve-app takes longer; if it ended at once, make could be reaping it as it gets the signal, too
    print("taken down", flush=True)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Makefile and set-up step beside a `.venv` that is stamped as complete and holds a stand-in."""
    requires("make")
    requires("system packages")
    root = tmp_path_factory.mktemp("make") / "check out"
    for name in ("Makefile", "pyproject.toml", "requirements", "scripts", "serve_app/system/preflight.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        copy: Callable[..., object] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, root / name)
    programs = root / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    (programs / "serve-app").write_text(FAKE_SERVE_APP.format(python=sys.executable, bound=COMMAND_S))
    (programs / "serve-app").chmod(0o755)
    install.write_stamp(root / ".venv", install.wanted_stamp(root, "cpu"))
    return root


def environment_of_a_shell(**added: str) -> dict[str, str]:
    """This process's environment without what an outer `make test` left in it, and `added`."""
    ours = ("MAKE", "MFLAGS", "TORCH_INDEX", "MODEL", "CONFIG", "PORT", "SIGNING_KEY")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | added


def make(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", f"PYTHON={sys.executable}", "DEVICE=cpu", *arguments]
    return subprocess.run(
        command,
        cwd=checkout,
        env=environment_of_a_shell(**environment),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        stdin=subprocess.DEVNULL,
    )


def test_make_alone_lists_the_targets(checkout: Path) -> None:
    done = make(checkout)
    assert done.returncode == 0
    for target in (
        "serve",
        "check",
        "test",
        "test-long",
        "test-cluster",
        "test-first-hour",
        "gpu-check",
        "setup",
        "lint",
        "lock",
        "release",
        "clean",
        "help",
    ):
        assert re.search(rf"^  {target} +[`\w]", done.stdout, re.MULTILINE), target
    listed = re.findall(r"^  [a-z-]+ +(?=[`\w])", done.stdout.partition("\n\n  MODEL")[0], re.MULTILINE)
    assert len({len(name) for name in listed}) == 1, "the descriptions stand below each other"


def test_make_serve_passes_on_nothing_by_default(checkout: Path) -> None:
    done = make(checkout, "serve", PYTHONPATH="/somewhere/else", PYTHONDONTWRITEBYTECODE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "arguments ['up'] PYTHONPATH None" in done.stdout
    assert "keeps what it compiles: True" in done.stdout


def test_make_serve_passes_model_configuration_and_port_on_as_they_are(checkout: Path) -> None:
    done = make(checkout, "serve", "MODEL=Qwen/Qwen3-0.6B", "CONFIG=my file.yaml", "PORT=9000")
    assert "['up', '--config', 'my file.yaml', '--model', 'Qwen/Qwen3-0.6B', '--port', '9000']" in done.stdout
    done = make(checkout, "serve", MODEL='/models/it\'s "one"; $(exit 3)')
    assert """['up', '--model', '/models/it\\'s "one"; $(exit 3)']""" in done.stdout


def test_make_serve_fails_with_serve_app(checkout: Path) -> None:
    assert make(checkout, "serve", STATUS="7").returncode == 2


def test_make_gpu_check_passes_model_device_and_arguments_on_and_fails_with_it(checkout: Path) -> None:
    program = checkout / "benchmarks" / "gpu_check.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text("import os, sys; print('arguments', sys.argv[1:]); sys.exit(int(os.environ.get('STATUS', '0')))")
    done = make(checkout, "gpu-check", "MODEL=org/a model", "GPU_CHECK_ARGS=--quick --out my.md")
    assert (done.returncode, done.stderr) == (0, "")
    assert "arguments ['--model', 'org/a model', '--device', 'cpu', '--quick', '--out', 'my.md']" in done.stdout
    failed = make(checkout, "gpu-check", STATUS="1")
    assert failed.returncode == 2  # make's own status of a failed command
    assert "Error 1" in failed.stderr


def test_an_unsupported_device_is_refused_before_anything(checkout: Path) -> None:
    done = make(checkout, "serve", "DEVICE=tpu")
    assert done.returncode != 0
    assert "DEVICE=tpu" in done.stderr
    assert "arguments" not in done.stdout


def stopped_while_serving(checkout: Path, stop: Callable[[int], object]) -> str:
    """Everything `make serve` prints when `stop(pid)` is done to it once it serves; both are gone when this returns."""
    command = ["make", f"PYTHON={sys.executable}", "DEVICE=cpu", "serve"]
    with subprocess.Popen(
        interruptible(command),
        cwd=checkout,
        env=environment_of_a_shell(STAY="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, as a shell gives to a command in a terminal
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline() + process.stdout.readline()
        assert "arguments" in first
        stop(process.pid)
        rest, _ = process.communicate(timeout=COMMAND_S)
    return first + rest


def test_ctrl_c_reaches_serve_app_and_make_adds_no_noise(checkout: Path) -> None:
    # a terminal's Ctrl-C is a SIGINT to every process of the foreground group
    shown = stopped_while_serving(checkout, lambda pid: os.killpg(pid, signal.SIGINT))
    assert shown.splitlines()[2:] == ["taken down"]


def test_sigterm_to_make_reaches_serve_app(checkout: Path) -> None:
    shown = stopped_while_serving(checkout, lambda pid: os.kill(pid, signal.SIGTERM))
    assert "taken down" in shown
