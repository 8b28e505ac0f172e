"""What SIGTERM does to the processes of actors.

Ray's own handler has an actor refuse calls and end once those that it runs have ended. A call of Serve's that never ends,
as its controller's loop and what its replicas are asked for, makes of it one that neither works nor ends: a controller
was seen so for five minutes, a router for one and a half, and nobody starts their successors meanwhile.
"""

from __future__ import annotations

import ctypes
import signal

from ray import WORKER_MODE
from ray._private import worker

SIG_DFL = 0  # ends the process


def end_on_sigterm() -> None:
    """Let SIGTERM end this process at once, as SIGKILL does, which costs no request. For an actor's constructor, whatever
    its thread (`signal.signal` is for the main thread alone); no effect in a process that is no actor's."""
    if worker.global_worker.mode == WORKER_MODE:
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(SIG_DFL))
