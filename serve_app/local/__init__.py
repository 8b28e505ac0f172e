"""An instance of the whole system on this machine: its Ray, its ports, its state, its end."""

from serve_app.local.cluster import LocalCluster, clean_up
from serve_app.local.processes import MARK, Listener, listening_ports, marked
from serve_app.local.state import DEFAULT_INSTANCE, Instance, InstanceState, state_root

__all__ = [
    "DEFAULT_INSTANCE",
    "MARK",
    "Instance",
    "InstanceState",
    "Listener",
    "LocalCluster",
    "clean_up",
    "listening_ports",
    "marked",
    "state_root",
]
