"""Ends a vLLM worker process when the process that started it is gone.

EngineCore does not notice its parent's death: a replica ended by SIGKILL would leave it running with its memory held.
vLLM calls `install` (a `vllm.general_plugins` entry point) in each of its processes; in those started by
multiprocessing a thread waits for the parent's sentinel. EngineCore's own workers are guarded the same way, so that a
whole tensor-parallel group goes down link by link.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading

GRACE_S = 2.0  # for EngineCore's own clean exit before it is ended by force
_THREAD_NAME = "serve-app-parent-guard"


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # Ask first: vLLM's handler frees shared memory and its workers; a process that hangs in a step is then ended.
    force = threading.Timer(GRACE_S, os._exit, args=(1,))
    force.daemon = True
    force.start()
    os.kill(os.getpid(), signal.SIGTERM)


def install() -> None:
    """Guard this process if multiprocessing started it; safe to call more than once."""
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.sentinel,), name=_THREAD_NAME, daemon=True).start()
    from serve_app.engine.vllm_adapter import mask_budget  # the other thing of ours in vLLM's processes

    mask_budget.install()
