"""The Python handle: an application called from the cluster, a driver or a notebook, without HTTP.

Decides: which cluster and application a client reaches, and in which event loop a call runs.
In: calls with OpenAI's fields. Out: objects of the `openai` package, streams, agent sessions, the errors of `errors`.
Never: checks a request; the router does, as over HTTP.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serve_app.client.agents import (
    DEFAULT_MAX_WAITING,
    STEP_WAIT_S,
    AgentRun,
    AgentScheduler,
    AgentState,
    Sessions,
    Task,
)

if TYPE_CHECKING:
    from serve_app.client.client import Client, connect

__all__ = [
    "DEFAULT_MAX_WAITING",
    "STEP_WAIT_S",
    "AgentRun",
    "AgentScheduler",
    "AgentState",
    "Client",
    "Sessions",
    "Task",
    "connect",
]

# `serve_app.agents` works with any client; `connect` imports Ray.
_LATE = {"Client": "client", "connect": "client"}


def __getattr__(name: str) -> Any:
    """Imports the names of `_LATE` on first use."""
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
