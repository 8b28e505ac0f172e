"""deploy/node.sh: what a machine is set up with, and what it hands on."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSTALLER = """import sys
open(sys.argv[0] + ".ran", "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The synced folder as a machine has it, with an installer that only writes down how it was called."""
    root = tmp_path / "serve app"
    shutil.copytree(ROOT / "deploy", root / "deploy")
    (root / "serve_app" / "system").mkdir(parents=True)
    shutil.copy(ROOT / "serve_app" / "system" / "preflight.py", root / "serve_app" / "system")
    (root / "scripts").mkdir()
    (root / "scripts" / "install.py").write_text(INSTALLER)
    return root


def run(checkout: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "HOME": str(checkout.parent / "home"), **(environment or {})}
    Path(given["HOME"]).mkdir(exist_ok=True)
    command = [str(checkout / "deploy" / "node.sh"), *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=60)


def calls(checkout: Path) -> list[str]:
    written = checkout / "scripts" / "install.py.ran"
    return written.read_text().splitlines() if written.exists() else []


def without_packages(tmp_path: Path) -> dict[str, str]:
    """A PATH whose apt-get does nothing: what is missing on the machine of the test is nobody's business here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("apt-get", "sudo"):
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(("arguments", "device"), [(["gpu"], "gpu"), (["cpu"], "cpu")])
def test_setup_installs_by_the_lock_of_the_device_that_is_given(
    checkout: Path, tmp_path: Path, arguments: list[str], device: str
) -> None:
    done = run(checkout, "setup", *arguments, environment=without_packages(tmp_path))
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == [f"--device {device}"]


def test_setup_without_a_device_looks_at_the_machine(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, "setup", environment=without_packages(tmp_path))
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == ["--device "]  # the installer's own choice


def test_an_environment_that_is_there_already_is_used_and_nothing_installed(checkout: Path) -> None:
    done = run(checkout, "setup", "gpu", environment={"SERVE_APP_PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    assert calls(checkout) == []


def test_a_login_shell_finds_ray_however_often_setup_ran(checkout: Path) -> None:
    for _ in range(2):
        assert run(checkout, "setup", environment={"SERVE_APP_PYTHON": sys.executable}).returncode == 0
    lines = (checkout.parent / "home" / ".bashrc").read_text().splitlines()
    assert len(lines) == 1
    found = subprocess.run(
        ["bash", "-c", "source ~/.bashrc; command -v ray; command -v serve-app"],
        env={"PATH": os.environ["PATH"], "HOME": str(checkout.parent / "home")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [f"{checkout}/deploy/bin/ray", f"{checkout}/deploy/bin/serve-app"]


def test_what_the_script_hands_on_runs_this_folders_code(tmp_path: Path) -> None:
    token = tmp_path / "token"
    given = {"SERVE_APP_PYTHON": sys.executable, "RAY_AUTH_TOKEN_PATH": str(token)}
    done = run(ROOT, "token", environment={**given, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert run(ROOT, environment={**given, "HOME": str(tmp_path)}).returncode == 2
