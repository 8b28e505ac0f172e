"""What this machine has: GPUs by NVML, versions, the checks of `serve-app doctor`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pynvml

from benchmarks.common import conditions
from serve_app.settings import GB
from serve_app.system import doctor

TORCH_S = 120.0  # an import of torch from a cold disk


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by NVML."""

    name: str
    total_bytes: int
    used_bytes: int


def gpus() -> tuple[list[Gpu], str]:
    """The GPUs in NVML's order, or why NVML does not answer."""
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            sizes = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
            names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return [], str(error)
    return [Gpu(name, int(size.total), int(size.used)) for name, size in zip(names, sizes, strict=True)], ""


def driver() -> dict[str, str]:
    """The driver's version, and the newest CUDA that it supports. Call where there are GPUs."""
    pynvml.nvmlInit()
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion())
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "CUDA of the driver": f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
    finally:
        pynvml.nvmlShutdown()


def torch_cuda() -> str:
    """The CUDA that torch was built for; in a process of its own, which leaves no context behind."""
    command = [sys.executable, "-c", "import torch; print(torch.version.cuda)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_S, check=True)
    except subprocess.SubprocessError as error:
        return f"unknown: {error}"
    return done.stdout.strip()


def figures(found: list[Gpu]) -> dict[str, Any]:
    """What the report says of the machine."""
    rows: list[dict[str, Any]] = [
        {"GPU": index, "name": one.name, "GB": round(one.total_bytes / GB, 1), "used GB": round(one.used_bytes / GB, 2)}
        for index, one in enumerate(found)
    ]
    described = (driver() if found else {"driver": "none"}) | {"CUDA of torch": torch_cuda(), **conditions.versions()}
    return described | ({"GPUs": rows} if rows else {})


def doctor_checks() -> list[tuple[str, str, str]]:
    """Name, state and finding of each check of `serve-app doctor` about the machine."""
    return [(one.name, one.state, one.found) for one in doctor.machine()]
