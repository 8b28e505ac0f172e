"""The memory grant of one engine: requested from the quota actor before the start, then reported until the end.

A thread sends the reports: loading a model blocks the event loop, and an engine that stops reporting loses its grant.
They have the engine's processes on this machine and their measured memory: resident, or on GPUs by NVML.

An engine that hangs while loading would keep its memory and block the loading of all others: it reports a failure and
ends.

Invariant: an engine loads only within its grant, and ends when the actor answers that the grant is lost. An amount that
cannot be measured is None, never a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil
import pynvml

from serve_app.core.memory import DrainReport, EngineReply, EngineReport, Hold, Process, StartReport
from serve_app.core.times import ENGINE_ASK_S, ENGINE_HEARTBEAT_S
from serve_app.engine.helper_process import RENDER_PROCESS
from serve_app.engine.stall_detector import StallDetector
from serve_app.errors import InsufficientMemory, LeaseConflict, ServeAppError, Unavailable
from serve_app.system import EventKind, descendants, event, start_ticks

logger = logging.getLogger("ray.serve")

LAST_REPORT_S = 2.0  # for the actor to receive that the memory is free; it also finds out by itself
LOAD_STALL_S = 600.0  # compiling a big model's graphs takes minutes in which hardly any memory moves
PROGRESS_BYTES = 16 * 2**20  # smaller changes are Python's own, without any loading
WAIT_LOG_INTERVAL_S = 10.0  # between log lines of an engine that waits


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
        resident: dict[int, int] = {}
        for pid in (os.getpid(), *descendants(os.getpid())):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                is_renderer = process.cmdline()[1:] == RENDER_PROCESS  # the machine's memory, and not the grant's
                resident[process.pid] = 0 if is_renderer else process.memory_info().rss
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
                logger.warning(
                    "NVML reports no engine memory on node %s, so memory above a grant goes unseen: %s",
                    self.node,
                    error,
                )
            self._failed = True
        return found


@dataclass(eq=False)
class MemoryGrant:
    """One engine's grant, from the first report to the last.

    Args:
        report: the first report: the engine's name, its ranks and the memory it requests.
        send: sends a report to the quota actor and waits for the answer; called from a thread of its own. Raises
            LeaseConflict, or Ray's errors if the actor is down.
        away: what `send` raises while the actor is unavailable.
        lost: called from that thread when the grant is lost; the process must end.
        drain: called from that thread, at each report, when the engine must free its memory: finish running requests
            within these seconds and end.
        meter: measures this process.
        stall_s: how long the engine may load without any progress; after that, `lost` is called.
        clock: monotonic seconds.
        start: how far the engine's start is, for the bytes that it has taken.
        drained: what became of its requests since it drains; None: it does not.
        measured: called from that thread at each report of a running engine, with the bytes of its largest
            hold and of the KV pools of all ranks.
    """

    report: EngineReport
    send: Callable[[EngineReport], EngineReply]
    away: tuple[type[BaseException], ...]
    lost: Callable[[str], None]
    drain: Callable[[float], None]
    meter: MemoryMeter
    stall_s: float = LOAD_STALL_S
    clock: Callable[[], float] = time.monotonic
    start: Callable[[int], StartReport | None] = lambda taken_bytes: None
    drained: Callable[[], DrainReport | None] = lambda: None
    measured: Callable[[int, int], None] = lambda hold_bytes, kv_bytes: None

    def __post_init__(self) -> None:
        self._progress = StallDetector(self.stall_s)
        self._may_load = False
        self._reply = EngineReply(why="the quota actor has not answered yet")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grant", daemon=True)

    async def obtain(self, wait_s: float) -> tuple[Hold, ...]:
        """Wait for the memory and for the turn to load; returns the granted amounts.

        Raises:
            Unavailable: not granted in time; the message names what is missing.
        """
        reported = self._reply.why
        self._thread.start()
        deadline = time.monotonic() + wait_s
        logged_at = time.monotonic()
        try:
            while not (self._reply.holds and self._may_load):
                if self._ended.is_set():
                    raise Unavailable(f"blocked: {self._reply.why}", code="blocked_memory")
                now = time.monotonic()
                if now >= deadline:
                    raise Unavailable(f"blocked: memory: {self._reply.why}", code="blocked_memory")
                if now - logged_at >= WAIT_LOG_INTERVAL_S:
                    logged_at = now
                    report = self.report
                    why = self._reply.why
                    blocked = event(EventKind.HEALTH, report.model, replica=report.owner, blocked="memory")
                    logger.warning(
                        "Engine %s of model %s waits to load and serves nothing: %s",
                        *(report.owner, report.model, why),
                        extra=None if why == reported else blocked,  # an event once, a log line again and again
                    )
                    reported = why
                await asyncio.sleep(ENGINE_ASK_S / 2)
        except BaseException:  # mostly cancellation: Serve ends the replica while it waits
            await asyncio.shield(asyncio.to_thread(self.end))
            raise
        return self._reply.holds

    def engine_started(self, kv_tokens: int, kv_bytes: int, slots: int, fingerprint: str | None) -> None:
        """The engine has started; report its KV pool, its slots for the queue and its fingerprint from now on."""
        report = self.report
        self.report = replace(report, kv_tokens=kv_tokens, kv_bytes=kv_bytes, slots=slots, fingerprint=fingerprint)

    def set_drain_s(self, drain_s: float) -> None:
        """Report this from now on: how long the engine may finish its requests when it is to end."""
        self.report = replace(self.report, drain_s=drain_s)

    def fail(self, why: str) -> None:
        """The engine has failed, and its process ends: report it at once, as the last report. The memory is not free
        before its processes are gone."""
        self.report = replace(self.report, failed=why)
        self._ended.set()

    def end(self) -> None:
        """The engine's memory is free: send the last report. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(LAST_REPORT_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            report = self._current_report()
            pause_s = ENGINE_HEARTBEAT_S if report.kv_tokens else ENGINE_ASK_S
            try:
                self._reply = self.send(report)
                self._may_load = self._may_load or self._reply.may_load
            except (LeaseConflict, InsufficientMemory) as error:
                self._reply = EngineReply(why=error.message)
                self._ended.set()
                self.lost(error.message)
                return
            except self.away as error:
                logger.warning(
                    "Engine %s of model %s got no answer from the quota actor, which misses its report: %s",
                    report.owner,
                    report.model,
                    error,
                )
                pause_s = ENGINE_ASK_S  # a restarted actor waits for this report
            except Exception:  # an engine that stopped reporting would lose its grant and go on running
                logger.exception(
                    "Engine %s of model %s failed to send its report and repeats it. Report this traceback",
                    report.owner,
                    report.model,
                )
            if report.failed:
                self._ended.set()
                self.lost(report.failed)
                return
            if self._reply.drain:
                self.drain(self._reply.drain_s)
            self._ended.wait(pause_s)
        errors: tuple[type[BaseException], ...] = (ServeAppError, *self.away)
        last = replace(self.report, drain=self.drained())
        try:
            self.send(replace(last, holds=self._reply.holds) if last.failed else replace(last, gone=True))
        except errors as error:
            logger.warning(
                "Engine %s of model %s could not report its end; its memory is free once its processes are gone: %s",
                last.owner,
                last.model,
                error,
            )

    def _current_report(self) -> EngineReport:
        """The report with the present measurements."""
        report = self.report
        holds = self._reply.holds
        processes, measured = self.meter.measure(holds)
        loading = self._may_load and not report.kv_tokens
        known = [size for size in measured if size is not None]
        if known and report.kv_tokens:
            self.measured(max(known), report.kv_bytes)
        sizes = (self.meter.resident_bytes, *(size or 0 for size in measured))
        marks = (len(processes), *(size // PROGRESS_BYTES for size in sizes))
        stalled_s = self._progress.observe(not loading, marks, self.clock())
        return replace(
            report,
            holds=holds,
            loading=loading,
            failed="" if stalled_s is None else f"loading has made no progress for {stalled_s:.0f} s",
            processes=((self.meter.node, processes),),
            measured_bytes=measured,
            start=self.start(_of_all_ranks(measured)) if loading else None,
            drain=self.drained(),
        )


def _of_all_ranks(measured: Sequence[int | None]) -> int:
    """The bytes of all ranks, where those on other nodes could not be measured: they load equal parts."""
    known = [size for size in measured if size is not None]
    return sum(known) * len(measured) // len(known) if known else 0
