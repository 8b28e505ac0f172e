"""Whether a configuration fits a cluster: memory of devices, CPUs and GPUs of nodes. Pure.

Invariant: what is called too large could be placed on no node, and no device, even an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.cli.check.findings import GROWS, Finding, Severity, finding
from serve_app.cli.check.models import kv_bytes_per_token, longest_tokens, text_config
from serve_app.engine.start import engine_args, environment, memory_size, model_lookup
from serve_app.errors import ConfigError
from serve_app.settings import GB, ModelSettings, Settings

KIND = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class Node:
    """What one node has when it is empty. `device_bytes`: what leases may have of each device."""

    cpus: float
    gpus: float
    device_bytes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that are there; `grows`: others may be added."""

    nodes: tuple[Node, ...]
    grows: bool = False


def check_fit(
    settings: Settings,
    facts: Sequence[model_lookup.ModelFacts],
    needs: Sequence[memory_size.MemoryNeed],
    cluster: Cluster,
    platform: environment.Platform,
) -> list[Finding]:
    """What of a configuration has no place on a cluster. `facts`, `needs`: of each model."""
    found: list[Finding] = []
    together = {"CPU": settings.router.cpus * settings.router.replicas, "GPU": 0.0, "bytes": 0.0}
    for index, (model, known, need) in enumerate(zip(settings.models, facts, needs, strict=True)):
        path = f"models.{index}"
        try:
            placed = engine_args.placement(model, platform)
        except ConfigError:
            continue  # `check_settings` says so
        size = _Size.of(model, known, need, cluster, platform)
        of_model = [*_memory(path, model, known, size, cluster), *_nodes(path, model, placed, cluster)]
        found += of_model
        if not of_model:
            for name, amount in _needs(placed, whole=True).items():
                together[name] = together.get(name, 0.0) + amount * model.replicas.first
            together["bytes"] += (size.least_bytes or 0) * model.ranks * model.replicas.first
    have = {
        "CPU": sum(node.cpus for node in cluster.nodes),
        "GPU": sum(node.gpus for node in cluster.nodes),
        "bytes": sum(sum(node.device_bytes) for node in cluster.nodes),
    }
    short = [name for name, amount in have.items() if together[name] > amount]
    if short and cluster.nodes:
        wanted, existing = ({name: one[name] for name in short} for one in (together, have))
        found.append(_about_nodes("no_room", "models", cluster, need=amounts(wanted), have=amounts(existing)))
    return found


@dataclass(frozen=True, slots=True)
class _Size:
    """The memory of one rank: with the least it starts; None: nothing determines it."""

    least_bytes: int | None
    fixed_bytes: int
    weights_bytes: int
    device_bytes: int  # of the largest device; 0: none is known

    @classmethod
    def of(
        cls,
        model: ModelSettings,
        known: model_lookup.ModelFacts,
        need: memory_size.MemoryNeed,
        cluster: Cluster,
        platform: environment.Platform,
    ) -> _Size:
        weights = known.weights_bytes or 0
        device = max((size for node in cluster.nodes for size in node.device_bytes), default=0)
        if not engine_args.gpus_per_rank(model, platform):
            device //= model.ranks  # all ranks are in the memory of one machine
        fixed = 0 if model.engine == "simulated" else need.fixed_bytes
        try:
            least = memory_size.memory_request(model, platform, need, device or None)[1]
        except ConfigError:
            return cls(None, fixed, -(-weights // model.ranks), device)
        return cls(least, fixed, -(-weights // model.ranks), device)


def _memory(
    path: str, model: ModelSettings, known: model_lookup.ModelFacts, size: _Size, cluster: Cluster
) -> list[Finding]:
    least = size.least_bytes
    fixed = size.fixed_bytes
    if least is None:
        return []
    setting = _setting_of_size(model)
    if size.device_bytes and least > size.device_bytes:
        kept = least - fixed
        parts = f"{gigabytes(size.weights_bytes)} weights, {gigabytes(max(0, fixed - size.weights_bytes))} overhead"
        parts += f", {gigabytes(kept)} KV cache" if kept > 0 else ""
        shown: dict[str, Any] = {"need": gigabytes(least), "parts": parts, "setting": setting}
        have = gigabytes(size.device_bytes)
        return [_about_nodes("memory_too_large", f"{path}.{setting}", cluster, have=have, **shown)]
    if model.engine == "simulated":
        return []
    if least <= fixed:
        values: dict[str, Any] = {"given": gigabytes(least), "fixed": gigabytes(fixed), "setting": setting}
        return [finding("no_kv_left", f"{path}.{setting}", **values)]
    return _length(path, model, known, least - fixed)


def _length(path: str, model: ModelSettings, known: model_lookup.ModelFacts, kv_bytes: int) -> list[Finding]:
    """Whether a KV cache of so many bytes a rank holds one sequence of the longest length: else vLLM does not start."""
    config = text_config(model, known.config)
    length = model.max_model_len or longest_tokens(config)
    each = kv_bytes_per_token(model, config)
    if length is None or each is None or kv_bytes >= length * each:
        return []
    values: dict[str, Any] = {"kv": gigabytes(kv_bytes), "tokens": int(kv_bytes // each), "length": length}
    return [finding("kv_below_length", f"{path}.kv_cache_gb", least=f"{length * each / GB:.2f}", **values)]


def _setting_of_size(model: ModelSettings) -> str:
    """The setting that the size of a rank comes from."""
    names = ("memory_gb", "kv_cache_min_gb", "kv_cache_gb")
    return next((name for name in names if getattr(model, name) is not None), "gpu_memory_utilization")


def _nodes(path: str, model: ModelSettings, placed: Mapping[str, Any], cluster: Cluster) -> list[Finding]:
    if not cluster.nodes:
        return []
    need = _needs(placed, whole=placed.get("placement_group_strategy") != "PACK")
    kind = next((name.removeprefix(KIND) for name in need if name.startswith(KIND)), None)
    kinds = sorted({one for node in cluster.nodes for one in node.kinds})
    if kind is not None and kind not in kinds:
        available = ", ".join(kinds) or "none"
        return [_about_nodes("no_accelerator", f"{path}.accelerator_type", cluster, kind=kind, kinds=available)]
    cpus = need.get("CPU", 0.0)
    gpus = need.get("GPU", 0.0)
    of_kind = [node for node in cluster.nodes if kind is None or kind in node.kinds]
    if any(node.cpus >= cpus and node.gpus >= gpus for node in of_kind):
        return []
    lacks_gpus = max(node.gpus for node in of_kind) < gpus
    largest = max(of_kind, key=lambda node: (node.gpus, node.cpus) if lacks_gpus or gpus else (node.cpus, node.gpus))
    setting = "cpus_per_rank" if not lacks_gpus else "tensor_parallel_size" if model.ranks > 1 else "gpus_per_rank"
    has = {"CPU": largest.cpus, "GPU": largest.gpus}
    values: dict[str, Any] = {"need": amounts({"CPU": cpus, "GPU": gpus}), "have": amounts(has), "setting": setting}
    return [_about_nodes("no_node", f"{path}.{setting}", cluster, **values)]


def _needs(placed: Mapping[str, Any], *, whole: bool) -> dict[str, float]:
    """What a replica asks of Ray: all of it, or of one bundle."""
    bundles = placed.get("placement_group_bundles") or [{"CPU": placed["ray_actor_options"]["num_cpus"]}]
    times = len(bundles) if whole else 1
    return {name: amount * times for name, amount in bundles[0].items()}


def _about_nodes(code: str, path: str, cluster: Cluster, *, have: str | None = None, **values: Any) -> Finding:
    """A finding that a node which is added may settle: where nodes are added, a warning."""
    severity: Severity | None = "warning" if cluster.grows else None
    if have is not None:
        values["have"] = have + (GROWS if cluster.grows else "")
    return finding(code, path, severity=severity, **values)


def gigabytes(size: float) -> str:
    return f"{size / GB:.2f} GB"


def amounts(resources: Mapping[str, float]) -> str:
    """`4 CPUs, 1 GPU, 12.00 GB`"""
    texts = [
        gigabytes(amount) if name == "bytes" else f"{amount:g} {name}{'' if amount == 1 else 's'}"
        for name, amount in resources.items()
        if (amount or name != "GPU") and amount != math.inf  # of an assumed node nobody knows its CPUs
    ]
    return ", ".join(texts)
