"""What a test may need of the machine: skipped where it lacks, failed where CI promised to have it.

    requires("gpu")          # in a test, a fixture, or at the top of a test module

    python -m tests.requires "test hosts" vllm    # before a target that was asked for: names all that is missing

Invariant: under `CI=true` nothing but a GPU is ever skipped, so that a green run means that everything ran.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from serve_app.system import preflight

ROOT = Path(__file__).resolve().parent.parent
MAY_LACK_IN_CI = frozenset({"gpu"})


def _linux() -> str | None:
    return None if sys.platform == "linux" else "processes and ports are read from Linux's /proc"


def _gpu() -> str | None:
    return None if preflight.has_gpu() else "no NVIDIA GPU is visible"


def _system_packages() -> str | None:
    missing = preflight.check(preflight.choose_device(None))
    return f"{missing[0].requirement} is missing: {missing[0].why}" if missing else None


def _vllm() -> str | None:
    """A real vLLM engine: the package, what it links with and what it compiles with."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (pip extra cpu or gpu)"
    return _system_packages()


def _two_cores() -> str | None:
    cores = len(os.sched_getaffinity(0))
    return None if cores >= 2 else f"{cores} core, and two ranks on the CPU need a core each"


def _make() -> str | None:
    return None if shutil.which("make") else "make is not installed"


def _own_venv() -> str | None:
    """The `.venv` that `make` made: what the lock files say of it can be checked in no other environment."""
    stamped = (Path(sys.prefix) / "serve-app-stamp.json").is_file()
    here = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    return None if stamped and here else f"this Python lives in {sys.prefix}, not in this checkout's .venv"


def _test_hosts() -> str | None:
    """Network namespaces with an sshd each; programs by the Debian package that brings them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {"ip": "iproute2", "nsenter": "util-linux", "rsync": "rsync", "ssh": "openssh-client"}
    lacking = [package for program, package in packages.items() if shutil.which(program) is None]
    if not Path("/usr/sbin/sshd").exists():
        lacking.append("openssh-server")
    if lacking:
        return _not_installed(*lacking)
    allowed = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return None if allowed.returncode == 0 else "this system allows no namespaces"


def _redis_server() -> str | None:
    return None if shutil.which("redis-server") else _not_installed("redis-server")


def _ssh_keygen() -> str | None:
    return None if shutil.which("ssh-keygen") else _not_installed("openssh-client")


def _nginx() -> str | None:
    return None if shutil.which("nginx") else _not_installed("nginx-light")


def _promtool() -> str | None:
    return None if shutil.which("promtool") else _not_installed("prometheus")


def _prometheus() -> str | None:
    return None if shutil.which("prometheus") else _not_installed("prometheus")


def _chromium() -> str | None:
    return None if shutil.which("chromium") else _not_installed("chromium")


def _not_installed(*packages: str) -> str:
    names = " ".join(packages)
    return f"not installed: {names} (apt-get update && apt-get install -y {names})"


def _postgresql() -> str | None:
    return None if preflight.postgres_programs() else _not_installed("postgresql")


def _root_file_system() -> str | None:
    """A root file system of Debian's packages, and namespaces to run in it."""
    if os.geteuid() != 0:
        return "chroot and mounts need root"
    return None if shutil.which("mmdebstrap") else "not installed: mmdebstrap (a Debian package)"


def _mounts() -> str | None:
    """A file system of its own in memory, which a test can fill."""
    if os.geteuid() != 0:
        return "mounts need root"
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else "this system allows no mounts"


def _systemd_analyze() -> str | None:
    return None if shutil.which("systemd-analyze") else "not installed: systemd (a Debian package)"


# Each says what is lacking, or None.
def _openid_provider() -> str | None:
    return None if importlib.util.find_spec("authlib") is not None else "authlib is not installed: `make setup`"


PROBES: Mapping[str, Callable[[], str | None]] = {
    "linux": _linux,
    "gpu": _gpu,
    "system packages": _system_packages,
    "vllm": _vllm,
    "two cores": _two_cores,
    "make": _make,
    "own venv": _own_venv,
    "test hosts": _test_hosts,
    "redis-server": _redis_server,
    "ssh-keygen": _ssh_keygen,
    "nginx": _nginx,
    "promtool": _promtool,
    "prometheus": _prometheus,
    "chromium": _chromium,
    "postgresql": _postgresql,
    "root file system": _root_file_system,
    "openid provider": _openid_provider,
    "mounts": _mounts,
    "systemd-analyze": _systemd_analyze,
}


def missing(reason: str, *, fatal: bool = True, environ: Mapping[str, str] = os.environ) -> None:
    """Skip with the reason; under `CI=true` fail with it, if `fatal`.

    Raises:
        pytest.skip.Exception, pytest.fail.Exception: always one of the two.
    """
    if fatal and environ.get("CI", "").lower() == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def requires(
    name: str,
    *,
    probes: Mapping[str, Callable[[], str | None]] = PROBES,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Go on only if this machine has `name`, a key of `PROBES`; else `missing`, which under CI a GPU alone survives.

    Raises:
        KeyError: there is no such probe.
    """
    lacking = probes[name]()
    if lacking is not None:
        missing(f"requires {name}: {lacking}", fatal=name not in MAY_LACK_IN_CI, environ=environ)


def main(names: Sequence[str], probes: Mapping[str, Callable[[], str | None]] = PROBES) -> int:
    """Print what this machine lacks of `names`, each with its remedy. Returns the exit status: 1 if it lacks any.

    Raises:
        KeyError: there is no such probe.
    """
    lacking = {name: why for name in names if (why := probes[name]()) is not None}
    for name, why in lacking.items():
        print(f"requires {name}: {why}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
