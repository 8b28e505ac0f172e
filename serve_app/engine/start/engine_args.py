"""vLLM's engine arguments and Ray's resources for one model: pure functions of the settings, tested without both.

Invariant: no placement of the bundles by Ray can split a tensor-parallel group over nodes. An engine of one stage has a
bundle per rank, all strictly on one node; in a pipeline, each stage is one bundle, which Ray never splits. The replica
actor is in bundle 0.
"""

from __future__ import annotations

from typing import Any

from serve_app.engine.start.environment import Platform
from serve_app.engine.tiny_model import ensure_tiny_model
from serve_app.errors import ConfigError
from serve_app.settings import DEFAULT_KV_CACHE_GB, GB, ModelSettings

NO_DOMAIN = "media.invalid"  # vLLM reads an empty list as "any"; this name never resolves (RFC 2606)
EXECUTORS: dict[Platform, str] = {"gpu": "ray", "cpu": "mp"}  # of several ranks; the CPU build supports processes only
TINY = "tiny"  # the name of the built-in model


def model_path(settings: ModelSettings) -> str:
    """The folder or Hugging Face id that vLLM loads; creates the built-in model if it is missing."""
    return str(ensure_tiny_model()) if settings.path == TINY else settings.path


def kv_cache_bytes(settings: ModelSettings, platform: Platform) -> int | None:
    """KV cache bytes per rank; None: by `gpu_memory_utilization`, which the CPU build does not support."""
    size_gb = settings.kv_cache_gb or (DEFAULT_KV_CACHE_GB if platform == "cpu" else None)
    return None if size_gb is None else round(size_gb * GB)


def _prefix_caching(settings: ModelSettings) -> bool | None:
    """None: as vLLM has it for the model. If prefix caching is switched on for an encoder and a decoder (Whisper),
    EngineCore of vLLM 0.32.0 starts, and dies at the first request: its cross attention has no blocks to cache."""
    return None if settings.task == "transcribe" and settings.enable_prefix_caching else settings.enable_prefix_caching


def engine_arguments(settings: ModelSettings, platform: Platform) -> dict[str, Any]:
    """Keyword arguments of `vllm.AsyncEngineArgs`."""
    given: dict[str, Any] = {
        "model": model_path(settings),
        "served_model_name": [settings.name],
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if settings.ranks == 1 else EXECUTORS[platform],
        "scheduling_policy": "priority",
        "enable_prefix_caching": _prefix_caching(settings),
        "enforce_eager": settings.enforce_eager,
        "dtype": settings.dtype,
        "max_num_seqs": settings.engine_seqs,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "trust_remote_code": False,
        "allowed_media_domains": list(settings.media_domains) or [NO_DOMAIN],
        "disable_log_stats": True,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "quantization": settings.quantization,
        "kv_cache_memory_bytes": kv_cache_bytes(settings, platform),
        "reasoning_parser": settings.reasoning_parser,
    }
    arguments = {name: value for name, value in given.items() if value is not None}  # else vLLM's own defaults
    if settings.task in ("embed", "classify"):
        arguments |= {"runner": "pooling", "convert": settings.task}
    return arguments | settings.extra_engine_args


def gpus_per_rank(settings: ModelSettings, platform: Platform) -> float:
    """GPUs that each rank requests from Ray. vLLM's CPU build: none; the simulated engine: only if the settings say so.

    Raises:
        ConfigError: ranks that Ray must place on GPUs would get none.
    """
    asked = settings.gpus_per_rank
    if settings.engine == "simulated":
        return asked or 0.0
    if platform == "cpu":
        return 0.0
    if asked == 0 and settings.ranks > 1:
        raise ConfigError(
            f"gpus_per_rank of {settings.name}: its ranks have to be placed on GPUs", param="gpus_per_rank"
        )
    return 1.0 if asked is None else asked


def one_bundle_per_stage(settings: ModelSettings, platform: Platform) -> bool:
    """Whether a bundle holds a whole pipeline stage instead of one rank.

    Bundles of one rank cannot keep a stage of a pipeline together: PACK puts four on nodes with three free GPUs as
    3 + 1. vLLM's CPU build starts all ranks itself, so all of them are on the node of the replica.
    """
    return settings.pipeline_parallel_size > 1 and not (settings.engine == "vllm" and platform == "cpu")


def placement(settings: ModelSettings, platform: Platform) -> dict[str, Any]:
    """Serve's placement options of the engine deployment: bundles, strategy and the replica actor's own resources.

    With several ranks the workers take the GPUs of the bundles and the actor none; with one rank the actor holds the
    GPU itself. A tensor-parallel group is on one node; the stages of a pipeline may be on the same or different nodes.

    Raises:
        ConfigError: see `gpus_per_rank`; or vLLM would start and die at its first request.
    """
    gpus = gpus_per_rank(settings, platform)
    staged = one_bundle_per_stage(settings, platform)
    if settings.pipeline_parallel_size > 1 and not staged and settings.enforce_eager:
        raise ConfigError(
            f"enforce_eager of {settings.name}: vLLM's CPU build cannot run a pipeline with it", param="enforce_eager"
        )
    ranks, bundles = (settings.tensor_parallel_size, settings.pipeline_parallel_size) if staged else (1, settings.ranks)
    bundle: dict[str, float] = {"CPU": settings.cpus_per_rank * ranks}
    if gpus:
        bundle["GPU"] = gpus * ranks
        if settings.accelerator_type:
            bundle[f"accelerator_type:{settings.accelerator_type}"] = 0.001
    actor: dict[str, Any] = {"num_cpus": settings.cpus_per_rank}
    if gpus and settings.ranks == 1:
        actor["num_gpus"] = gpus
    if not any(bundle.values()):
        return {"ray_actor_options": actor}  # nothing to reserve; Ray accepts no empty bundle
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(bundles)],
        "placement_group_strategy": "PACK" if staged else "STRICT_PACK",
        "ray_actor_options": actor,
    }
