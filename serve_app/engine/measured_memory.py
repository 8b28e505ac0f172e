"""The processes of an engine on this machine and their measured memory: resident, or on GPUs by NVML.

Invariant: an amount that cannot be measured is None, never a number.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pynvml

from serve_app.core.memory import Hold, Process
from serve_app.system import start_ticks

logger = logging.getLogger("ray.serve")


class MemoryMeter:
    """Measures this process and its children.

    Args:
        node: this machine's id; devices of other machines cannot be measured here.
        nvml: the module `pynvml`, where the devices are GPUs; None: the device is the machine's memory.
    """

    def __init__(self, node: str, nvml: Any = None) -> None:
        self.node = node
        self._nvml = nvml
        self._failed = False
        self.resident_bytes = 0  # of all processes, at the last measurement

    def measure(self, holds: Sequence[Hold]) -> tuple[tuple[Process, ...], tuple[int | None, ...]]:
        """The processes, and their bytes on the device of each hold."""
        me = psutil.Process()
        resident = {process.pid: _resident(process) for process in (me, *me.children(recursive=True))}
        self.resident_bytes = sum(resident.values())
        started = {pid: start_ticks(pid) for pid in resident}
        processes = tuple((pid, ticks) for pid, ticks in started.items() if ticks is not None)
        if self._nvml is None:
            measured: dict[str, int] = {f"{self.node}/0": self.resident_bytes}
        else:
            measured = self._on_gpus([hold.on for hold in holds], resident)
        return processes, tuple(measured.get(hold.on) for hold in holds)

    def _on_gpus(self, devices: Sequence[str], ours: Mapping[int, int]) -> dict[str, int]:
        """Bytes by device, without devices of other machines and devices on which NVML shows none of our processes:
        NVML uses the host's process ids, which differ from a container's."""
        found: dict[str, int] = {}
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            try:
                for device in devices:
                    node, _, index = device.rpartition("/")
                    if node != self.node:
                        continue
                    handle = nvml.nvmlDeviceGetHandleByIndex(int(index))
                    used = [
                        one.usedGpuMemory
                        for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                        if one.pid in ours and one.usedGpuMemory is not None
                    ]
                    if used:
                        found[device] = sum(used)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            if not self._failed:
                logger.warning("NVML does not report this engine's GPU memory: %s", error)
            self._failed = True
        return found


def memory_meter(node: str, *, gpus: bool) -> MemoryMeter:
    """The memory meter of an engine on this machine."""
    return MemoryMeter(node, pynvml if gpus else None)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
