"""Which changes of the configuration restart which replicas.

Serve gives every deployment of an application one version, made from the whole configuration: changing one model would
restart all engines. Ours has one per deployment, made from what its replicas cannot take over while they run.

Invariant: two configurations that differ in one model only give every other deployment the same version.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from serve_app.names import RELEASE
from serve_app.settings.model import DEFAULT_KV_CACHE_GB, ModelSettings

# Serve applies these to running replicas: bounds of scaling, how long one may drain, and how requests are batched. The
# others are the routers' own: sizes of sessions, and what a request weighs. A preset is in the settings that it gave
# their defaults.
LIVE_FIELDS = {
    "batching",
    "buckets_gb",
    "drain_s",
    "long_from_tokens",
    "max_long_seqs",
    "max_session_share",
    "preset",
    "prices",
    "replicas",
}
VERSION_CHARS = 16  # of a SHA-256, 64 bits: no two configurations of one deployment ever meet


def engine_version(model: ModelSettings, *, on_cpu: bool) -> str:
    """The version of a model's engine deployment: of everything an engine is built from, a default that is written out
    being no difference.

    Args:
        on_cpu: by vLLM's CPU build, which decides what some settings are where they are not set.
    """
    return _digest({"engine": _written_out(model, on_cpu=on_cpu).model_dump(mode="json", exclude=LIVE_FIELDS)})


def _written_out(model: ModelSettings, *, on_cpu: bool) -> ModelSettings:
    """The same model, with what it has where these settings are not set."""
    found: dict[str, float | None] = {}
    if model.engine == "simulated" or on_cpu:
        found["gpus_per_rank"] = (model.gpus_per_rank or 0.0) if model.engine == "simulated" else 0.0
    elif model.gpus_per_rank is None:
        found["gpus_per_rank"] = 1.0
    if on_cpu and model.kv_cache_gb is None and model.memory_gb is None:
        found["kv_cache_gb"] = DEFAULT_KV_CACHE_GB
    if model.kv_cache_min_gb == found.get("kv_cache_gb", model.kv_cache_gb):
        found["kv_cache_min_gb"] = None  # with no less is what it does then, too
    return model.model_copy(update=found)


def code_version(part: Literal["router", "batch"]) -> str:
    """The version of the deployment of routers or of batch workers: both take over every setting while they run, so
    only their code counts."""
    return _digest({part: None})


def _digest(parts: dict[str, Any]) -> str:
    text = json.dumps({"release": RELEASE, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:VERSION_CHARS]
