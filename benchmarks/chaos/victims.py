"""What there is to be hit on a running stack, which engines are ready, and whether what was hit is there again.

Invariant: an engine is hit only while two are ready, a router only while two run, and no kind before what replaces its
last victim is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil

from benchmarks.chaos.plan import OF_VLLM, ON_ENGINES, Fault, signal_of
from benchmarks.common.arms import BenchmarkError
from benchmarks.common.processes import ENGINE_CORE, role_of, title_of, titled
from benchmarks.common.scaling_stack import Stage
from serve_app.cluster.local import RemoteDriver
from serve_app.names import ENGINE_PREFIX, ROUTER
from serve_app.system import start_ticks

SPARE = 2  # engines ready, and routers running, while one of them is hit
ACTORS = {Fault.QUOTA: "ray::GpuMemoryQuota", Fault.CONTROLLER: "ray::ServeController"}
SPAWNED = "multiprocessing.spawn"  # EngineCore's command line, where it did not set its title (seen)
DRAIN_WITHIN_S = 10.0
CLI_S = 60.0  # of one command: it connects to Ray


def possible_faults(engine: str) -> list[Fault]:
    """The kinds that there are on such engines. `drain` is one from the release on that has the command."""
    help_of_drain = [sys.executable, "-m", "serve_app.cli", "drain", "--help"]
    has_drain = subprocess.run(help_of_drain, capture_output=True, timeout=CLI_S, check=False).returncode == 0
    absent = (set() if has_drain else {Fault.DRAIN}) | (set() if engine == "vllm" else OF_VLLM)
    return [fault for fault in Fault if fault not in absent]


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that was done. `pid`: the process that it ends, by a signal with this number or (None) by a command."""

    fault: Fault
    pid: int
    at: float
    number: signal.Signals | None = None


class Victims:
    """The processes of one stack. Use as a context manager; `look` often.

    Args:
        engines: that there are when all are there.
        has_core: whether each of them has an EngineCore.
    """

    def __init__(self, stage: Stage, draw: random.Random, engines: int, *, has_core: bool) -> None:
        self._stage = stage
        self._draw = draw
        self._engines = engines
        self._has_core = has_core
        self._child = RemoteDriver({"environment": stage.cluster.environment()}, module="benchmarks.batch_crash.watch")
        self._running: Mapping[str, Mapping[str, int]] = {}
        self._cores: dict[int, int] = {}  # of an engine replica
        self._open: dict[Fault, Hit] = {}  # not replaced yet
        self._ending: set[int] = set()  # processes that were hit
        self._drains: list[tuple[Hit, subprocess.Popen[str]]] = []
        self.hits: list[Hit] = []
        self.notes: list[str] = []
        self.gone_s: dict[Fault, list[float]] = {fault: [] for fault in Fault}  # from the fault to the process's end
        self.back_s: dict[Fault, list[float]] = {fault: [] for fault in Fault}  # and until all of its kind are there
        self.unready_at = time.monotonic()  # the last moment without a ready engine

    def __enter__(self) -> Victims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hit in self._open.values():
            if hit.fault is Fault.FREEZE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hit.pid, signal.SIGKILL)
        for _, command in self._drains:
            command.kill()
            command.wait()
        self._child.close()

    def look(self) -> None:
        """Take in what the controller has said, and what has ended and come back.

        Raises:
            BenchmarkError: the child that asks the controller has ended.
        """
        while (event := self._child.event(0.0)) is not None:
            if event.get("event") == "end":
                raise BenchmarkError("nothing is told of the replicas any more")
            if event["running"] is not None:
                self._running = event["running"]
        now = time.monotonic()
        self._drains = [(hit, command) for hit, command in self._drains if not self._has_drained(hit, command)]
        if not self.ready_engines():
            self.unready_at = now
        for fault, hit in list(self._open.items()):
            if hit.pid in self._ending and start_ticks(hit.pid) is None:
                self._ending.discard(hit.pid)
                self.gone_s[fault].append(now - hit.at)
            if hit.pid not in self._ending and self._is_whole(fault):
                del self._open[fault]
                self.back_s[fault].append(now - hit.at)

    def ready_engines(self) -> dict[int, int]:
        """The processes of the engine replicas that can answer, with their EngineCores'."""
        found = {}
        for pid in self._replicas(ENGINE_PREFIX):
            core = self._core_of(pid) if self._has_core else pid
            if core not in self._ending and start_ticks(core) is not None:
                found[pid] = core
        return found

    def is_whole(self) -> bool:
        """Whether all that can be hit is there."""
        return not self._open and len(self.ready_engines()) >= self._engines and self._is_whole(Fault.ROUTER)

    def hit(self, faults: Sequence[Fault]) -> Hit | None:
        """Do the first of these that can be done now; None: none can."""
        for fault in faults:
            if fault in self._open or (fault in ON_ENGINES and ON_ENGINES & self._open.keys()):
                continue
            targets = self._targets(fault)
            if targets and (hit := self._do(fault, self._draw.choice(targets))) is not None:
                self.hits.append(hit)
                self._ending.add(hit.pid)
                self._open[fault] = hit
                return hit
        return None

    def _do(self, fault: Fault, pid: int) -> Hit | None:
        hit = Hit(fault, pid, time.monotonic(), signal_of(fault, sum(one.fault is fault for one in self.hits)))
        if hit.number is None:
            self._drains.append((hit, self._drain(pid)))
            return hit
        try:
            os.kill(pid, hit.number)
        except ProcessLookupError:
            return None  # it has ended in this instant
        return hit

    def _drain(self, pid: int) -> subprocess.Popen[str]:
        """Begin `serve-app drain` of the replica of this process."""
        replica = next(name for name, one in self._named(ENGINE_PREFIX).items() if one == pid)
        cluster = self._stage.cluster
        command = [sys.executable, "-m", "serve_app.cli", "drain", replica, "--within", f"{DRAIN_WITHIN_S:g}s"]
        command += ["--instance", cluster.instance.name, "--state-dir", str(cluster.state.folder.parent)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _has_drained(self, hit: Hit, command: subprocess.Popen[str]) -> bool:
        """Whether the command is over; one that has failed has done nothing."""
        if command.poll() is None:
            return False
        output = " ".join(command.communicate()[0].split())
        self.notes.append(f"drain: status {command.returncode}: {output[-300:]}")
        if command.returncode and start_ticks(hit.pid) is not None:
            self._ending.discard(hit.pid)
            self._open.pop(Fault.DRAIN, None)
        return True

    def _targets(self, fault: Fault) -> list[int]:
        if fault in ON_ENGINES:
            ready = self.ready_engines()
            if len(ready) < SPARE:
                return []
            found = ready.values() if fault in OF_VLLM else ready
            # the one that has run longest: what has just started has few streams to lose
            return sorted(found, key=lambda pid: start_ticks(pid) or 0)[:1]
        if fault is Fault.ROUTER:
            routers = self._replicas(ROUTER)
            return sorted(routers) if len(routers) >= SPARE else []
        return self._singles(fault)

    def _singles(self, fault: Fault) -> list[int]:
        """The process of HAProxy, or of an actor."""
        cluster = self._stage.cluster
        if fault is Fault.HAPROXY:
            found = [one.pid for one in cluster.listeners() if one.port == cluster.instance.http_port]
            return [max(found)] if found else []  # one that is being replaced may listen still
        found = titled(cluster.pids(), ACTORS[fault])
        return found if len(found) == 1 else []

    def _is_whole(self, fault: Fault) -> bool:
        if fault in ON_ENGINES:
            return len(self.ready_engines()) >= self._engines
        if fault is Fault.ROUTER:
            return len(self._replicas(ROUTER)) >= SPARE
        return bool(self._singles(fault))

    def _named(self, prefix: str) -> dict[str, int]:
        deployments = [replicas for name, replicas in self._running.items() if name.startswith(prefix)]
        return {name: pid for replicas in deployments for name, pid in replicas.items()}

    def _replicas(self, prefix: str) -> list[int]:
        """The processes of running replicas, without those that have ended or were hit."""
        found = self._named(prefix).values()
        return [pid for pid in found if pid not in self._ending and start_ticks(pid) is not None]

    def _core_of(self, pid: int) -> int:
        """The EngineCore of an engine replica; the first that was found, whatever became of it; 0: none."""
        if pid not in self._cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                children = psutil.Process(pid).children(recursive=True)
                titles = {child.pid: title_of(child.pid) for child in children}
                cores = [one for one, title in titles.items() if role_of(title) == ENGINE_CORE or SPAWNED in title]
                if cores:
                    self._cores[pid] = cores[0]
        return self._cores.get(pid, 0)
