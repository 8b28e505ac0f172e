"""What an engine has of a device: resident memory of its processes, or what NVML shows of them on its GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from serve_app.core.memory import Hold
from serve_app.engine.helper_process import RENDER_PROCESS
from serve_app.engine.start import memory_grant
from serve_app.engine.start.memory_grant import MemoryMeter
from serve_app.system import start_ticks

ME = os.getpid()
GPUS = (Hold("n/0", 10), Hold("n/1", 10))


class NVMLError(Exception):
    """As pynvml's."""


@dataclass
class Nvml:
    """Stands for `pynvml`: what each process has on each GPU; None: the driver does not say."""

    used: dict[int, dict[int, int | None]] = field(default_factory=dict)
    broken: bool = False
    opened: int = 0
    NVMLError: type[Exception] = NVMLError

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("driver not loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index not in self.used:
            raise NVMLError("no such device")
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.used[handle].items()]


def test_without_gpus_it_is_the_resident_memory_of_all_its_processes() -> None:
    _, (alone,) = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1)])
    assert alone is not None
    assert alone > 10e6
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        processes, (both,) = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1)])
        assert both is not None
        assert both > alone
        assert {(ME, start_ticks(ME)), (child.pid, start_ticks(child.pid))} <= set(processes)
    finally:
        child.kill()
        child.wait()


def test_the_process_that_reads_large_requests_is_no_part_of_the_grant() -> None:
    def measured() -> int:
        _, (found,) = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1)])
        assert found is not None
        return found

    alone = measured()
    child = subprocess.Popen([sys.executable, *RENDER_PROCESS], stdin=subprocess.PIPE)
    try:
        beside = measured()
        processes, _ = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1)])
        assert beside - alone < 4e6  # an interpreter has more
        assert (child.pid, start_ticks(child.pid)) in processes
    finally:
        child.kill()
        child.wait()


def test_a_device_of_another_machine_is_not_measured_from_here() -> None:
    _, measured = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1), Hold("elsewhere/0", 1)])
    assert measured[0] is not None
    assert measured[1] is None


def test_on_gpus_it_is_what_nvml_shows_of_its_processes_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml({0: {ME: 700, 1: 9000}, 1: {ME: 300}})
    monkeypatch.setattr(memory_grant, "pynvml", nvml)
    processes, measured = MemoryMeter("n", gpus=True).measure(GPUS)
    assert measured == (700, 300)
    assert (ME, start_ticks(ME)) in processes
    assert nvml.opened == 0


@pytest.mark.parametrize(
    "nvml",
    [
        Nvml({0: {1: 9000}, 1: {}}),  # in a container: the host's ids are not ours
        Nvml({0: {ME: None}, 1: {ME: None}}),  # the driver does not say
        Nvml({}),
        Nvml(broken=True),
    ],
)
def test_what_nvml_does_not_show_is_not_taken_for_nothing(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grant, "pynvml", nvml)
    measured_by = MemoryMeter("n", gpus=True)
    for _ in range(2):
        processes, measured = measured_by.measure(GPUS)
        assert measured == (None, None)
        assert processes
    assert nvml.opened == 0


def test_before_anything_is_granted_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grant, "pynvml", Nvml(broken=True))
    assert MemoryMeter("n", gpus=True).measure([])[1] == ()


def test_without_a_driver_an_engine_on_gpus_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert MemoryMeter("n", gpus=True).measure(GPUS)[1] == (None, None)


def test_nvml_is_asked_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_grant, "pynvml", Nvml({0: {ME: 5}, 1: {ME: 6}}))
    assert MemoryMeter("n", gpus=True).measure(GPUS)[1] == (5, 6)
    (resident,) = MemoryMeter("n", gpus=False).measure([Hold("n/0", 1)])[1]
    assert resident is not None
    assert resident > 10e6
