"""The processes of an engine on this machine and their measured memory: resident, or on GPUs by NVML.

Invariant: an amount that cannot be measured is None, never a number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import pynvml

from serve_app.core.memory import Hold, Process
from serve_app.system import start_ticks

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class MemoryMeter:
    """Measures this process and its children.

    Args:
        node: this machine's id; devices of other machines cannot be measured here.
        gpus: whether the devices are GPUs, which NVML measures; else the device is the machine's memory.
    """

    node: str
    gpus: bool
    resident_bytes: int = field(default=0, init=False)  # of all processes, at the last measurement
    _failed: bool = field(default=False, init=False)

    def measure(self, holds: Sequence[Hold]) -> tuple[tuple[Process, ...], tuple[int | None, ...]]:
        """The processes, and their bytes on the device of each hold."""
        me = psutil.Process()
        resident: dict[int, int] = {}
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                resident[process.pid] = process.memory_info().rss
        self.resident_bytes = sum(resident.values())
        processes = tuple((pid, ticks) for pid in resident if (ticks := start_ticks(pid)) is not None)
        if self.gpus:
            measured = self._on_gpus([hold.on for hold in holds], resident)
        else:
            measured = {f"{self.node}/0": self.resident_bytes}
        return processes, tuple(measured.get(hold.on) for hold in holds)

    def _on_gpus(self, devices: Sequence[str], ours: Mapping[int, int]) -> dict[str, int]:
        """Bytes by device, without devices of other machines and devices on which NVML shows none of our processes:
        NVML uses the host's process ids, which differ from a container's."""
        found: dict[str, int] = {}
        try:
            pynvml.nvmlInit()
            try:
                for device in devices:
                    node, _, index = device.rpartition("/")
                    if node != self.node:
                        continue
                    handle = pynvml.nvmlDeviceGetHandleByIndex(int(index))
                    used = [
                        one.usedGpuMemory
                        for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                        if one.pid in ours and one.usedGpuMemory is not None
                    ]
                    if used:
                        found[device] = sum(used)
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            if not self._failed:
                logger.warning("NVML does not report this engine's GPU memory: %s", error)
            self._failed = True
        return found
