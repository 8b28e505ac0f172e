"""The GPUs of this machine, as NVML reports them."""

from __future__ import annotations

import pynvml


def gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of each device, by index. Raises `pynvml.NVMLError`: there is no driver, or it fails."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetName(one), int(pynvml.nvmlDeviceGetMemoryInfo(one).total)) for one in handles]
    finally:
        pynvml.nvmlShutdown()
