"""Ends a vLLM worker process when the process that started it is gone.

EngineCore does not notice its parent's death: after a SIGKILL of the replica, it would keep running and hold memory.
vLLM calls `install` (a `vllm.general_plugins` entry point) in each of its processes; in those started by
multiprocessing, a thread waits for the parent's sentinel. EngineCore's own workers are guarded in the same way, so that
a whole tensor-parallel group ends, process by process.
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
    # SIGTERM first: vLLM's handler frees shared memory and ends its workers; the timer ends a process that hangs.
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
    # our other patches of vLLM's processes, and the form of their logs
    from serve_app.engine.vllm_adapter import mask_budget, phase_hooks, produced_tokens
    from serve_app.system import set_up_child_log

    mask_budget.install()
    phase_hooks.install()
    produced_tokens.install()
    set_up_child_log("vLLM")
