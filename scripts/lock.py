"""Writes requirements/cpu.txt and requirements/gpu.txt anew: `make lock`, or `python3 -I scripts/lock.py cpu`.

A lock is a list of `name==version` lines, everything the extra and the dev tools need, and names no host. pip resolves
pyproject's own lists with a dry run in a throw-away environment, so nothing is installed and little is downloaded.

Invariant: a lock file is replaced only after pip has resolved the new one by itself; the two locks agree on every
package they share, those of NOT_SHARED excepted.
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
# Equal as a string: a CPU wheel (2.13.0+cpu) in reach of pip would satisfy `==2.13.0` and take CUDA out of the lock.
GPU_CONSTRAINTS = ("torch===2.13.0",)
# torch is another build in each lock, and the other two are pinned by the CUDA builds of torch and vLLM.
NOT_SHARED = frozenset({"torch", "triton", "apache-tvm-ffi"})
# What has no wheel on the other architecture and is not wanted there.
MARKERS = dict.fromkeys(("intel-openmp", "intel-cmplr-lib-ur"), 'platform_machine == "x86_64"')
RESOLVE_S = 900.0  # a resolution takes one minute; a slow index may take several


def canonical(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Name to version of a lock file; comments and markers are left out."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def wanted(device: str) -> list[str]:
    """The requirements a lock is resolved from: those of the project, of the device, of development and of building."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras[device], *extras["dev"], *pyproject["build-system"]["requires"]]


def constraints(device: str) -> list[str]:
    """What the GPU lock has to keep to: the CPU lock's versions."""
    if device == "cpu":
        return []
    shared = read_lock(REQUIREMENTS / "cpu.txt")
    return [*GPU_CONSTRAINTS, *(f"{name}=={version}" for name, version in shared.items() if name not in NOT_SHARED)]


def dry_run(python: Path, *arguments: str) -> None:
    """pip's resolver, without installing. Raises CalledProcessError where nothing fits together."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(command, check=True, timeout=RESOLVE_S, env=environment)


def resolve(python: Path, device: str, folder: Path) -> dict[str, str]:
    """Name to version of everything `wanted(device)` needs, as pip chooses it now."""
    report = folder / f"{device}.json"
    limits = folder / f"{device}-constraints.txt"
    limits.write_text("\n".join(constraints(device)))
    dry_run(python, "--report", str(report), "--constraint", str(limits), *wanted(device))
    metadata = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = {canonical(item["name"]): item["version"] for item in metadata}
    excluded = CPU_EXCLUDED if device == "cpu" else frozenset()
    return {name: pins[name] for name in sorted(pins) if name not in excluded}


def lock_text(device: str, pins: dict[str, str]) -> str:
    """The contents of a lock file."""
    head = [
        f"# The {device} environment, dev tools too. Made by `make lock`, installed by `make serve` and `make test`.",
        "# By hand: pip install --no-deps -r this file. It names no index: pip's own configuration does.",
    ]
    markers = {name: f" ; {marker}" for name, marker in MARKERS.items()}
    lines = [f"{name}=={version}{markers.get(name, '')}" for name, version in pins.items()]
    return "\n".join([*head, *lines, ""])


def main(devices: list[str]) -> int:
    unknown = set(devices) - set(DEVICES)
    if unknown:
        print(f"lock: {sorted(unknown)[0]}: cpu or gpu is wanted", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="serve-app-lock-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        for device in DEVICES:
            if devices and device not in devices:
                continue
            print(f"lock: resolving the {device} environment (about a minute)", flush=True)
            pins = resolve(python, device, folder)
            new = folder / f"{device}.txt"
            new.write_text(lock_text(device, pins))
            print(f"lock: {len(pins)} packages; asking pip whether they fit together", flush=True)
            dry_run(python, "-r", str(new))
            (REQUIREMENTS / f"{device}.txt").write_text(new.read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError:
        print(
            "lock: pip found no set of versions that fits (its words are above); that lock is as it was",
            file=sys.stderr,
        )
        sys.exit(1)
