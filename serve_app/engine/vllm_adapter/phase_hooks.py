"""Tells the replica in which phase of its start vLLM is: the beginning of some of its methods, in any of its processes.

Private in vLLM 0.32.0: `v1.worker.worker_base`, `v1.executor.abstract`, `compilation.wrapper`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from serve_app.engine.start import phases
from serve_app.engine.vllm_adapter.wrapped import wrap


def install() -> None:
    """Hook this process, EngineCore or one of its workers, if its start is followed; once."""
    if phases.PHASE_FILE not in os.environ:
        return
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    hook(WorkerWrapperBase, "init_device", after=phases.LOADING)
    hook(Executor, "determine_available_memory", before=phases.MEMORY)
    hook(Executor, "compile_or_warm_up_model", before=phases.WARM_UP)
    hook(TorchCompileWithNoGuardsWrapper, "aot_compile", before=phases.COMPILE, after=phases.MEMORY)


def hook(owner: Any, method: str, *, before: str = "", after: str = "") -> None:
    """Write a phase before or after each call of the method."""

    def hooked(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if before:
            phases.write_phase(before, time.monotonic())
        answer = original(*arguments, **named)
        if after:
            phases.write_phase(after, time.monotonic())
        return answer

    wrap(owner, method, hooked)
