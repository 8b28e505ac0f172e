"""One engine replica: the deployment, its start, the vLLM adapter and the simulated engine.

Decides: how a request runs in the engine, and when the replica is unhealthy and ends; `start` decides what it needs.
In: a model's settings, requests of routers. Out: frames, load and memory reports.
Never: imports vLLM outside `vllm_adapter`, or loads a model before its memory is granted.

Modules are exported unloaded: vLLM's own processes and the grammar compiler import one module of this package and must
not load the others, which need Ray, pydantic or numpy.
"""

from serve_app.engine.tiny_model import WORDS, default_root, ensure_tiny_model

__all__ = [
    "WORDS",
    "batch_figures",
    "batched_engine",
    "default_root",
    "deployment",
    "ensure_tiny_model",
    "simulated",
    "start",
]
