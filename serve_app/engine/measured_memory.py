"""The processes of an engine on this machine and the memory they really have: resident, or on GPUs by NVML.

Invariant: what cannot be measured is None, never a number.
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


class Measured:
    """This process and its children.

    Args:
        node: this machine's id; devices of others are not seen from here.
        nvml: the module `pynvml`, where the devices are GPUs; None: the device is the machine's memory.
    """

    def __init__(self, node: str, nvml: Any = None) -> None:
        self.node = node
        self._nvml = nvml
        self._failed = False
        self.resident_bytes = 0  # of all processes, when it was looked last

    def look(self, holds: Sequence[Hold]) -> tuple[tuple[Process, ...], tuple[int | None, ...]]:
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
        """By device; left out are those of other machines, and those on which NVML shows none of our processes: it
        names processes as the host does, and in a container they may have other names."""
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
                logger.warning("NVML does not tell what this engine uses of its GPUs: %s", error)
            self._failed = True
        return found


def measured_here(node: str, *, gpus: bool) -> Measured:
    """What measures an engine on this machine."""
    return Measured(node, pynvml if gpus else None)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
