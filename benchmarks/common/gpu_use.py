"""How busy this machine's GPUs are, by NVML: the share of time in which a kernel ran, as a mean over devices.

Invariant: without a GPU, a driver or an answer of NVML the share is None, never 0.
"""

from __future__ import annotations

import contextlib
import threading
from statistics import fmean
from types import TracebackType

import pynvml

SAMPLE_S = 0.1  # NVML's own period is between a sixth of a second and a second


class GpuUse:
    """Samples while its context lasts; `share` is then from 0 to 1, or None."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuUse:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self.share = fmean(self._samples) if self._samples else None
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _sample(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            while devices and not self._stop.wait(SAMPLE_S):
                self._samples.append(fmean(pynvml.nvmlDeviceGetUtilizationRates(one).gpu for one in devices) / 100)
