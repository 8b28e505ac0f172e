"""What engines were measured to need beside their KV cache, kept on this machine for their next start.

A file for each combination of model, settings, device and versions. A need above the estimate counts from the first
measurements that stood for `STOOD_S`, or were reached in `RECURS` spans of that length: on a CPU a long step takes its
memory for a second and gives it back, again and again. One below it counts once an engine has run for `SETTLED_S`: what
takes memory seldom (a long step, a full batch, the first grammar) has not happened before.

Invariant: a kept need never becomes smaller, and what neither stood nor recurred is not kept: while a process forks its
memory is counted twice, and the first start on a machine compiles kernels that later ones find.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml

from serve_app.engine.start.engine_args import engine_arguments
from serve_app.engine.start.environment import Platform
from serve_app.engine.start.memory_size import MEASURED_MARGIN, MemoryNeed, estimated_need
from serve_app.engine.start.vllm_arguments import vllm_version
from serve_app.engine.tiny_model import default_root
from serve_app.settings import ModelSettings

STOOD_S = 30.0  # longer than a kernel compiles
RECURS = 6  # spans: three minutes, longer than the first start on a machine compiles
SETTLED_S = 600.0  # of running: until then an engine may not have done yet what needs most memory
STEP = 1.01  # what is written anew is larger by this: a file each second for a few pages more helps nobody
# Arguments that do not change the need: names, and the size of the KV pool.
APART = ("model", "served_model_name", "kv_cache_memory_bytes", "gpu_memory_utilization")


def need_key(
    settings: ModelSettings,
    platform: Platform,
    weights_bytes: int,
    config: Mapping[str, Any] | None,
    device: str,
    version: str,
) -> str:
    """The name of what is measured: the same for equal models in other folders.

    Args:
        weights_bytes, config: of the model, as `model_lookup` finds them; the bytes count where there is no config.
        device: the kind of device, such as `NVIDIA H100`.
        version: of vLLM.
    """
    arguments = {name: value for name, value in engine_arguments(settings, platform).items() if name not in APART}
    shape = {name: value for name, value in (config or {}).items() if not name.endswith("_token_id")}
    model = shape or weights_bytes
    parts = [arguments, settings.task, model, platform, device, version]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def device_kind(platform: Platform) -> str:
    """The kind of this machine's devices; empty: it has no GPU that NVML knows."""
    if platform == "cpu":
        return "cpu"
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def history_of(
    settings: ModelSettings,
    platform: Platform,
    weights_bytes: int,
    config: Mapping[str, Any] | None,
    clock: Callable[[], float],
) -> MemoryHistory:
    """The history of a model on this machine."""
    key = need_key(settings, platform, weights_bytes, config, device_kind(platform), vllm_version())
    return MemoryHistory(default_root().parent / "memory", key, clock)


def need_here(
    settings: ModelSettings, platform: Platform, weights_bytes: int, config: Mapping[str, Any] | None
) -> MemoryNeed:
    """What an engine on this machine would ask for, beside its KV pool: as measured, else estimated."""
    estimate = estimated_need(settings, platform, weights_bytes, config)
    if settings.engine == "simulated":
        return estimate
    return history_of(settings, platform, weights_bytes, config, time.monotonic).need(estimate)


@dataclass(eq=False)
class MemoryHistory:
    """The kept need of one combination.

    Args:
        folder: on this machine; it is made if it is missing.
        key: see `need_key`.
        clock: monotonic seconds.
    """

    folder: Path
    key: str
    clock: Callable[[], float]
    _began: float | None = field(default=None, init=False)  # of the first measurement of this run
    _stands: tuple[float, int] = field(default=(0.0, 0), init=False)  # since when at least so many bytes
    _span: tuple[float, int] = field(default=(0.0, 0), init=False)  # its begin, and the most in it
    _most_of_spans: list[int] = field(default_factory=list, init=False)  # of ended spans, the largest `RECURS`
    _kept: tuple[int, bool] = field(default=(0, False), init=False)  # bytes, whether they are settled

    def __post_init__(self) -> None:
        try:
            found = json.loads(self._file.read_text())
            self._kept = (int(found["fixed_bytes"]), bool(found["settled"]))
        except (OSError, ValueError, KeyError, TypeError):
            self._kept = (0, False)

    def need(self, estimate: MemoryNeed) -> MemoryNeed:
        """The need to grant: what was measured, else the estimate."""
        fixed_bytes, settled = self._kept
        measured = round(fixed_bytes * MEASURED_MARGIN)
        return MemoryNeed(measured, True) if settled or measured > estimate.fixed_bytes else estimate

    def measured(self, fixed_bytes: int) -> None:
        """A measurement of a running engine, without its KV pool: at each report."""
        now = self.clock()
        if self._began is None:
            self._began = now
            self._stands = (now, fixed_bytes)
            self._span = (now, 0)
        since = self._stands[0]
        least_bytes = min(self._stands[1], fixed_bytes)
        has_stood = now - since >= STOOD_S
        self._stands = (now, fixed_bytes) if has_stood else (since, least_bytes)
        kept_bytes, settled = self._kept
        largest = max(kept_bytes, self._recurring_bytes(now, fixed_bytes), least_bytes if has_stood else 0)
        now_settled = settled or now - self._began >= SETTLED_S
        if largest > kept_bytes * STEP or now_settled > settled:
            self._kept = (largest, now_settled)
            self._write()

    def _recurring_bytes(self, now: float, fixed_bytes: int) -> int:
        """What was reached in `RECURS` spans; 0 before that."""
        begin, most = self._span
        if now - begin >= STOOD_S:
            self._most_of_spans = sorted([*self._most_of_spans, most])[-RECURS:]
            begin = now
            most = 0
        self._span = (begin, max(most, fixed_bytes))
        return self._most_of_spans[0] if len(self._most_of_spans) == RECURS else 0

    @property
    def _file(self) -> Path:
        return self.folder / f"{self.key}.json"

    def _write(self) -> None:
        fixed_bytes, settled = self._kept
        draft = self.folder / f"{self.key}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"fixed_bytes": fixed_bytes, "settled": settled}))
            draft.replace(self._file)
        except OSError:  # a read-only home: the next start is estimated again
            return
