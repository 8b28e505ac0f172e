"""One engine replica: the deployment, its memory grant, the vLLM adapter and the simulated engine.

Decides: the engine's arguments, the memory it requests, and when the replica is unhealthy and ends.
In: a model's settings, requests of routers. Out: frames, load and memory reports.
Never: imports vLLM outside `vllm_adapter`, or loads a model before its memory is granted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serve_app.engine import environment
from serve_app.engine.environment import platform

if TYPE_CHECKING:
    from serve_app.engine.deployment import EngineReplica
    from serve_app.engine.engine_args import placement
    from serve_app.engine.simulated.scheduler import Sequence, SequenceState, SimulatedScheduler
    from serve_app.engine.tiny_model import WORDS, ensure_tiny_model

__all__ = [
    "WORDS",
    "EngineReplica",
    "Sequence",
    "SequenceState",
    "SimulatedScheduler",
    "ensure_tiny_model",
    "environment",
    "placement",
    "platform",
]

# vLLM's own processes and the grammar compiler import one module of this package and must not load the others, which
# need Ray, pydantic or numpy.
_LATE = {
    "EngineReplica": "deployment",
    "Sequence": "simulated.scheduler",
    "SimulatedScheduler": "simulated.scheduler",
    "SequenceState": "simulated.scheduler",
    "WORDS": "tiny_model",
    "ensure_tiny_model": "tiny_model",
    "placement": "engine_args",
}


def __getattr__(name: str) -> Any:
    """Import the names of `_LATE` on first use."""
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
