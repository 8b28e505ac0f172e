"""The simulated world of a configuration. Pure.

Decides: what each setting means to the simulator, and what is told of those that mean nothing to it.
Invariant: the queue's policy, the limits and the replica bounds are those that production makes of the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaling.simulator import (
    ClassPlan,
    EngineProfile,
    ModelPlan,
    NodePlan,
    ScalingPlan,
    ServeDelays,
    World,
)
from serve_app.core.limits import Limits
from serve_app.errors import BadRequest
from serve_app.settings import GB, AutoscaleSettings, ModelSettings, Settings

GPUS_PER_NODE = 8  # of most servers
NO_BOUND = 1_000_000  # nodes: more than any configuration's replicas need
NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class GpuBound:
    """The GPUs that there are. Raises BadRequest.

    Args:
        gpus: None: as many as the replicas ask for.
        per_node: None: `GPUS_PER_NODE`, or all of fewer GPUs.
    """

    gpus: int | None = None
    per_node: int | None = None

    def __post_init__(self) -> None:
        if self.gpus is not None and self.gpus % self.of_node:
            raise BadRequest(f"--gpus {self.gpus}: give a multiple of --gpus-per-node ({self.of_node})", param="--gpus")

    @property
    def of_node(self) -> int:
        return self.per_node or min(self.gpus or GPUS_PER_NODE, GPUS_PER_NODE)


def world_of(settings: Settings, profiles: Mapping[str, EngineProfile], bound: GpuBound) -> World:
    """The world of a configuration.

    Args:
        profiles: by model.

    Raises:
        ConfigError: no node has room for a replica.
    """
    admission = settings.admission
    queue = admission.queue_policy()
    models = tuple(
        ModelPlan(model.name, engine_of(model, profiles[model.name]), queue, scaling_of(model.replicas), model.drain_s)
        for model in settings.models
    )
    limits = {name: tenant.limits.limits() for name, tenant in admission.tenants.items()}
    return World(
        models,
        _nodes(settings, models, bound),
        classes={name: ClassPlan(level.ttft_s) for name, level in admission.service_levels.items()},
        limits={name: found for name, found in limits.items() if found != NO_LIMITS},
        routers=settings.router.replicas,
        max_gpus=settings.scaling.max_gpus,
    )


def engine_of(model: ModelSettings, profile: EngineProfile) -> EngineProfile:
    """A profile with what the model's settings say otherwise; its speeds, KV cache and price stay."""
    found = replace(profile, slots=model.max_num_seqs, gpus=model.ranks, prefix_cache=model.enable_prefix_caching)
    if model.memory_gb is not None:
        found = replace(found, memory_bytes=round(model.memory_gb * GB))
    if model.max_num_batched_tokens is not None:  # of which each running sequence takes one
        found = replace(found, prefill_chunk_tokens=max(1, model.max_num_batched_tokens - model.max_num_seqs))
    return found


def scaling_of(replicas: AutoscaleSettings) -> ScalingPlan:
    """A model's replicas, as Serve and the policy have them."""
    return ScalingPlan(
        replicas.min_replicas,
        replicas.max_replicas,
        replicas.first,
        replicas.target_ongoing_requests,
        replicas.look_back_s,
        replicas.metrics_interval_s,
        delays=ServeDelays(
            replicas.upscale_delay_s, replicas.downscale_delay_s, to_zero_s=replicas.downscale_to_zero_delay_s
        ),
    )


def _nodes(settings: Settings, models: Sequence[ModelPlan], bound: GpuBound) -> NodePlan:
    """The nodes. Without a bound further ones are there at once, so that no replica waits for a place."""
    memory = max(model.profile.memory_bytes for model in models)
    quota = settings.quota
    if quota.device_gb is not None:
        memory = round((quota.device_gb - quota.reserved_gb) * GB)
    if bound.gpus is not None:
        nodes = bound.gpus // bound.of_node
        return NodePlan(bound.of_node, memory, nodes, nodes)
    per_node = bound.per_node or max(GPUS_PER_NODE, max(model.profile.gpus for model in models))
    first = sum(math.ceil(model.scaling.first_replicas / max(1, per_node // model.profile.gpus)) for model in models)
    return NodePlan(per_node, memory, max(1, first), NO_BOUND, start_s=0.0)


def notes_on(settings: Settings, profiles: Mapping[str, EngineProfile], bound: GpuBound) -> list[str]:
    """What a reader of the results has to know: what was estimated, and what is not simulated."""
    found = [note for model in settings.models for note in _notes_on_profile(model, profiles[model.name])]
    if bound.gpus is None:
        found.append("GPUs are never short: a replica finds its place at once. Bound them with --gpus")
    unknown = sorted(set(_not_simulated(settings)))
    if unknown:
        found.append(f"not simulated: {', '.join(unknown)}")
    return found


def _notes_on_profile(model: ModelSettings, profile: EngineProfile) -> Iterator[str]:
    if profile.source.startswith("estimate"):
        yield f"{model.name}: the speeds of {profile.name} are estimates of data sheets, not measurements"
    if model.ranks != profile.gpus:
        yield (
            f"{model.name}: {profile.name} has the speeds of {profile.gpus} GPUs, and a replica has {model.ranks}, as "
            "tensor_parallel_size and pipeline_parallel_size say"
        )
    if model.gpus_per_rank is not None and 0 < model.gpus_per_rank < 1:
        yield f"{model.name}: its part of a GPU (gpus_per_rank) counts as a whole one"


def _not_simulated(settings: Settings) -> Iterator[str]:
    """Settings that are in use and that the simulator leaves out."""
    for model in settings.models:
        for name in ("batching", "max_long_seqs", "max_model_len", "kv_cache_gb", "accelerator_type"):
            if getattr(model, name) is not None:
                yield f"models.{name}"
    for name, each in settings.admission.classes.items():
        if each.itl_slo_s is not None:
            yield f"admission.classes.{name}.itl_slo_s"
    for name, tenant in settings.admission.tenants.items():
        if tenant.models:
            yield f"admission.tenants.{name}.models"
        if tenant.over_limit == "wait":
            yield f"admission.tenants.{name}.over_limit"
    if any(key.limits is not None for key in settings.auth.keys):
        yield "auth.keys.limits"
