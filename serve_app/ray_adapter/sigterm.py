"""What SIGTERM does to the processes of actors.

By Ray's own handler an actor refuses calls, and ends once those that it runs have ended. One with a call that never
ends, as Serve's controller and replicas have, then neither works nor ends: a controller was seen so for five minutes, a
router for one and a half, and nobody starts their successors meanwhile.
"""

from __future__ import annotations

import ctypes
import signal

import ray

SIG_DFL = 0  # ends the process


def end_on_sigterm() -> None:
    """Let SIGTERM end this process at once, with the losses of SIGKILL, no others. For an actor's constructor, in any
    thread (`signal.signal` is for the main thread alone); no effect in a process that is no actor's."""
    if is_actor():
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(SIG_DFL))


def is_actor() -> bool:
    """Whether this process is an actor of a cluster, and not a test or a command."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
