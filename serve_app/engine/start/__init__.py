"""The start of one engine replica, until its model is loaded.

Decides: the engine's arguments and environment, where its ranks are, and the memory that it requests.
In: a model's settings, the files of the model, what earlier engines needed. Out: a memory grant, and the phases and the
failures of the start.
Never: imports vLLM, or reads weights.

Modules are exported unloaded, as those of `serve_app.engine`.
"""

__all__ = [
    "download_size",
    "engine_args",
    "environment",
    "fingerprint",
    "grant_request",
    "memory_grant",
    "memory_history",
    "memory_size",
    "model_lookup",
    "phases",
    "rank_layout",
    "vllm_arguments",
]
