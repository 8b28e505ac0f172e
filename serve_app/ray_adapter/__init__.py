"""Every private or alpha interface of Ray and Ray Serve that the application uses.

Decides: nothing; translates Ray's failures into the errors of `errors`.
In: deployments, handles, keys. Out: handles that can choose a replica, and a store that outlives processes.
Never: knows models or requests.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serve_app.ray_adapter.kv_store import GcsStore, Unreadable, cluster_secret

if TYPE_CHECKING:
    from serve_app.ray_adapter.serve import (
        ACCEPT_S,
        CALL_ERRORS,
        NO_ANSWER,
        DirectedRequestRouter,
        EngineHandle,
        EveryReplica,
        Handle,
        IngressHandle,
        deployment_handle,
        in_fresh_context,
        on_fast_path,
        pin_version,
        quiet_router_thread,
    )

__all__ = [
    "ACCEPT_S",
    "CALL_ERRORS",
    "NO_ANSWER",
    "DirectedRequestRouter",
    "EngineHandle",
    "EveryReplica",
    "GcsStore",
    "Handle",
    "IngressHandle",
    "Unreadable",
    "cluster_secret",
    "deployment_handle",
    "in_fresh_context",
    "on_fast_path",
    "pin_version",
    "quiet_router_thread",
]

# The quota actor needs only the store; Ray Serve takes a second to import.
_LATE = {
    "ACCEPT_S": "serve",
    "CALL_ERRORS": "serve",
    "DirectedRequestRouter": "serve",
    "EngineHandle": "serve",
    "EveryReplica": "serve",
    "Handle": "serve",
    "IngressHandle": "serve",
    "NO_ANSWER": "serve",
    "deployment_handle": "serve",
    "in_fresh_context": "serve",
    "on_fast_path": "serve",
    "pin_version": "serve",
    "quiet_router_thread": "serve",
}


def __getattr__(name: str) -> Any:
    """Import the names of `_LATE` on first use."""
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
