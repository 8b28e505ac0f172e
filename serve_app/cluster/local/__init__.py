"""An instance of the whole system on this machine: its Ray cluster, ports, state and end.

Decides: which ports and folders an instance has, and when its processes have to end.
In: the application's configuration. Out: a running instance, its status, its drivers.
Never: leaves a process behind; all of an instance's processes carry its mark.
"""

from serve_app.cluster.local.cluster import TERM_GRACE_S, LocalCluster, clean_up
from serve_app.cluster.local.node import LOOPBACK, LOOPBACK_ENVIRONMENT
from serve_app.cluster.local.ports import require_free
from serve_app.cluster.local.remote_driver import SHUTDOWN_QUESTION_S, RemoteDriver, answers, ask
from serve_app.cluster.local.state import (
    DEFAULT_INSTANCE,
    TOKEN_BYTES,
    Instance,
    InstanceState,
    make_private,
    read_text,
    state_root,
    write_private,
)

__all__ = [
    "DEFAULT_INSTANCE",
    "LOOPBACK",
    "LOOPBACK_ENVIRONMENT",
    "SHUTDOWN_QUESTION_S",
    "TERM_GRACE_S",
    "TOKEN_BYTES",
    "Instance",
    "InstanceState",
    "LocalCluster",
    "RemoteDriver",
    "answers",
    "ask",
    "clean_up",
    "driver",
    "make_private",
    "read_text",
    "require_free",
    "state_root",
    "write_private",
]
