"""Checks the machine's requirements before the installation, and prints the command that installs missing packages.

It runs with the system's `python3 -I` before any dependency exists: only the standard library, and a syntax that older
Pythons can parse. `-I` is required: without it this folder's `types.py` would hide Python's own.

Invariant: all missing requirements are listed at once, each with its remedy; nothing on the machine is changed.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

PYTHON_MIN = (3, 11)  # pyproject's requires-python; a test compares the two
PYTHON_END = (3, 14)  # exclusive: the lock files have no wheels for 3.14
GLIBC_MIN = (2, 31)  # required by llguidance's wheel in both lock files; every other wheel needs 2.28
ARCHITECTURES = ("x86_64", "aarch64")  # Linux; the lock files have wheels for both
DISK_GB = {"cpu": 5.0, "gpu": 16.0}  # .venv: 3.8 GB measured on CPU; CUDA's libraries add about 9 GB (inferred)
PROBE_S = 20.0  # nvidia-smi takes seconds on a machine with many GPUs; a hung driver must not block this script
NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
POSTGRES_PROGRAMS = "/usr/lib/postgresql/*/bin"  # Debian's, outside of PATH


class Missing(NamedTuple):
    """One missing requirement. `packages` maps a package manager to the packages with it; empty: no package has it."""

    requirement: str
    why: str
    packages: Mapping[str, str]


def _run(*command: str) -> subprocess.CompletedProcess[bytes] | None:
    """A finished command with its output; None: it does not start, or hangs."""
    try:
        return subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is visible, in the driver's own listing or in nvidia-smi (containers, WSL)."""
    if NVIDIA_PROC.is_dir() and any(NVIDIA_PROC.iterdir()):
        return True
    listing = _run("nvidia-smi", "-L")
    return listing is not None and b"GPU " in listing.stdout


def choose_device(wanted: str | None) -> str:
    """ "cpu" or "gpu": the operator's choice, else by the machine's hardware.

    Raises:
        ValueError: any other value.
    """
    if not wanted:
        return "gpu" if has_gpu() else "cpu"
    if wanted not in DISK_GB:
        raise ValueError(f"DEVICE={wanted}: cpu or gpu is wanted")
    return wanted


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def glibc_version() -> tuple[int, ...] | None:
    """glibc's version; None with another C library (musl)."""
    name, version = platform.libc_ver()
    return tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else None


def check_python(version: tuple[int, ...], usable: Callable[[str], bool]) -> list[Missing]:
    if PYTHON_MIN <= version < PYTHON_END:
        return []
    requirement = f"Python from {version_text(PYTHON_MIN)} to {PYTHON_END[0]}.{PYTHON_END[1] - 1}"
    this = f"this is {version_text(version)}"
    others = [name for minor in range(PYTHON_MIN[1], PYTHON_END[1]) if usable(name := f"python3.{minor}")]
    if others:
        return [Missing(requirement, f"{this}, and {others[0]} is here: say `make PYTHON={others[0]} ...`", {})]
    name = f"python{version_text(PYTHON_MIN)}"
    return [Missing(requirement, f"{this}; then say `make PYTHON={name} ...`", {"apt-get": name, "dnf": name})]


def check_platform(system: str, machine: str, glibc: tuple[int, ...] | None) -> list[Missing]:
    if system != "Linux" or machine not in ARCHITECTURES:
        return [Missing(f"Linux on {' or '.join(ARCHITECTURES)}", f"this is {system} on {machine}", {})]
    if glibc is not None and glibc >= GLIBC_MIN:
        return []
    here = "another C library" if glibc is None else f"glibc {version_text(glibc)}"
    return [Missing(f"glibc {version_text(GLIBC_MIN)}", f"this system has {here}; a newer system is needed", {})]


def check_disk(folder: Path, device: str, free_bytes: int) -> list[Missing]:
    if free_bytes >= DISK_GB[device] * 1e9:
        return []
    have = f"{folder} has {free_bytes / 1e9:.1f} GB"
    return [Missing(f"{DISK_GB[device]:.0f} GB of free disk", f".venv goes there; {have}", {})]


def loads(library: str) -> bool:
    """Whether the dynamic loader finds a shared library."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_python_parts(
    version: tuple[int, ...],
    *,
    importable: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    headers: Path | None = None,
) -> list[Missing]:
    """Check the parts of Python that distributions ship in separate packages."""
    found: list[Missing] = []
    python = f"python{version_text(version)}"
    if not (importable("ensurepip") and importable("venv")):
        packages = {"apt-get": f"{python}-venv", "dnf": "python3-pip"}
        found.append(Missing("Python's venv with ensurepip", "the dependencies go into a .venv", packages))
    include = headers if headers is not None else Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        packages = {"apt-get": f"{python}-dev", "dnf": "python3-devel"}
        found.append(
            Missing("Python's C headers (Python.h)", "the kernels that torch.compile makes need them", packages)
        )
    return found


def check_libraries(
    device: str,
    *,
    loadable: Callable[[str], bool] = loads,
    command: Callable[[str], bool] = lambda name: shutil.which(name) is not None,
) -> list[Missing]:
    """Check system libraries and tools. The probes are arguments so that a test can remove each of them."""
    found: list[Missing] = []
    if device == "cpu" and not loadable("libnuma.so.1"):
        packages = {"apt-get": "libnuma1", "dnf": "numactl-libs"}
        found.append(Missing("libnuma.so.1", "vLLM's CPU extension is linked with it", packages))
    if not command("g++"):
        packages = {"apt-get": "g++", "dnf": "gcc-c++"}
        found.append(Missing("a C++ compiler (g++)", "torch.compile makes kernels when a model starts", packages))
    return found


def postgres_programs() -> Path | None:
    """The folder with the programs of a PostgreSQL server."""
    found = sorted(glob.glob(POSTGRES_PROGRAMS))
    return Path(found[-1]) if found else None


def check_for_tests() -> list[Missing]:
    """Check what only tests need."""
    found: list[Missing] = []
    if postgres_programs() is None:
        packages = {"apt-get": "postgresql", "dnf": "postgresql-server"}
        found.append(Missing("PostgreSQL's server", "tests run the store on a real one", packages))
    if shutil.which("redis-server") is None:
        packages = {"apt-get": "redis-server", "dnf": "redis"}
        found.append(Missing("Redis's server", "tests run the intake of batches on a real one", packages))
    if shutil.which("promtool") is None:
        packages = {"apt-get": "prometheus"}
        found.append(Missing("promtool", "tests check the metrics with Prometheus' own tool", packages))
    if shutil.which("chromium") is None:
        packages = {"apt-get": "chromium", "dnf": "chromium"}
        found.append(Missing("Chromium", "tests open the console in a real browser", packages))
    if shutil.which("ssh-keygen") is None:
        packages = {"apt-get": "openssh-client", "dnf": "openssh"}
        found.append(Missing("ssh-keygen", "tests sign and verify a release", packages))
    return found


def _runs(python: str) -> bool:
    """Whether a Python of this name runs (a pyenv shim can exist and fail)."""
    done = _run(python, "-I", "-c", "")
    return done is not None and done.returncode == 0


def check(device: str, venv_folder: Path | None = None) -> list[Missing]:
    """All missing requirements for `device`; the disk is checked only if `venv_folder` is given."""
    version = tuple(sys.version_info[:2])
    # packages of a Python that will not be used would mislead
    found = check_python(version, _runs) or check_python_parts(version)
    found += check_platform(platform.system(), platform.machine(), glibc_version())
    found += check_libraries(device)
    if venv_folder is not None:
        found += check_disk(venv_folder, device, shutil.disk_usage(venv_folder).free)
    return found


def report(found: list[Missing], manager: str | None, root: bool) -> str:
    """The missing requirements and their remedies as text, without a final newline: the command that installs the
    packages, or their names in Debian if this system's package manager is unknown."""
    family = manager or "apt-get"
    lines = ["This machine lacks:"]
    for missing in found:
        package = missing.packages.get(family)
        lines.append(f"  - {missing.requirement}: {missing.why}" + (f" (package {package})" if package else ""))
    names = " ".join(missing.packages[family] for missing in found if family in missing.packages)
    if names:
        sudo = "" if root else "sudo "
        command = f"{sudo}{manager} install -y {names}"
        if manager is None:
            command = f"with this system's package manager, what Debian calls: {names}"
        elif manager == "apt-get":
            command = f"{sudo}apt-get update && {command}"
        lines += ["All of it that comes in packages:", f"    {command}"]
    return "\n".join(lines)


def package_manager() -> str | None:
    return next((name for name in ("apt-get", "dnf") if shutil.which(name)), None)


def advice(found: list[Missing]) -> str:
    """`report` for this machine and this user."""
    return report(found, package_manager(), os.geteuid() == 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Name what this machine lacks for serve-app.")
    parser.add_argument("--device", choices=sorted(DISK_GB), help="default: gpu where an NVIDIA GPU is visible")
    parser.add_argument("--venv-folder", type=Path, help="also check the disk this folder is on")
    parser.add_argument("--packages", action="store_true", help="print only the names of missing packages, on one line")
    parser.add_argument("--tests", action="store_true", help="also check what only tests need")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    found = check(device, options.venv_folder) + (check_for_tests() if options.tests else [])
    if options.packages:
        manager = package_manager()
        print(" ".join(missing.packages[manager] for missing in found if manager and manager in missing.packages))
        return 0
    if found:
        print(advice(found), file=sys.stderr)
        return 1
    here = f"Python {platform.python_version()}, {platform.machine()}, glibc {version_text(glibc_version() or ())}"
    print(f"preflight: this machine has what the {device} build needs ({here})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
