"""What a deploy by HTTP may change of the running configuration. Pure.

A key with the right `deploy` changes how models are served. Everything that reaches the host (paths, arguments of the
engine, addresses, files, what is logged or deleted), says who may call, or counts what the key's own tenant may use
changes from the machine alone. What is not sent of these settings stays as it is.

Invariant: a setting that is not named in `OPEN` or `OPEN_OF_MODEL` is closed, so a new one is closed until it is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from serve_app.errors import BadRequest, Forbidden
from serve_app.settings.model import ModelSettings
from serve_app.settings.settings import Settings, parse
from serve_app.settings.variables import Names

FROM_THE_MACHINE = "only_from_machine"  # the code of the refusal
MODELS = "models"
ROUTES = "routes"  # their weights are open; which models a name stands for says what keys may use

# Fields that a deploy by HTTP may change, by section.
OPEN: Mapping[str, frozenset[str]] = {
    "admission": frozenset(
        {
            "max_queued",
            "max_queued_tokens",
            "classes",
            "tenants",  # except the key's own tenant
            "min_share",
            "guard_slots_share",
            "max_wait_s",
            "no_replica_wait_s",
            "output_quantile",
        }
    ),
    "http": frozenset(
        {
            "max_body_bytes",
            "max_audio_bytes",
            "max_json_depth",
            "max_json_values",
            "max_sequences",
            "max_embedding_inputs",
            "max_output_tokens",
            "default_output_tokens",
        }
    ),
    "router": frozenset({"replicas", "cpus"}),
    "quota": frozenset({"reserved_gb", "host_memory_share", "device_gb", "wait_s", "defrag_above"}),
    "sessions": frozenset({"per_tenant"}),
    "batch": frozenset({"workers", "max_file_bytes", "max_bytes_per_tenant", "max_rows", "max_in_flight"}),
    "traces": frozenset({"sample_ratio", "slow_s"}),
    "metrics": frozenset({"named_tenants"}),
}
OPEN_OF_MODEL = frozenset(
    {
        "name",
        "generation",
        "engine",
        "task",
        "max_image_pixels",
        "max_audio_s",
        "max_audio_hz",
        "preset",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "replicas",
        "dtype",
        "quantization",
        "max_model_len",
        "max_num_seqs",
        "max_long_seqs",
        "long_from_tokens",
        "batching",
        "session_slots",
        "max_session_share",
        "buckets_gb",
        "max_num_batched_tokens",
        "kv_cache_gb",
        "kv_cache_min_gb",
        "memory_gb",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "enforce_eager",
        "tool_parser",
        "tool_strict",
        "reasoning_parser",
        "cpus_per_rank",
        "gpus_per_rank",
        "accelerator_type",
        "grammar_cpu_s",
        "health_stall_s",
        "drain_s",
        "simulated",
    }
)


def remote_settings(running: Settings, given: Mapping[str, Any], tenant: str) -> Settings:
    """The settings that a deploy by HTTP declares.

    Args:
        running: with hashed keys only.
        given: the configuration as it was sent; `${NAME}` has no meaning here.
        tenant: of the key that deploys.

    Raises:
        ConfigError: it is wrong. BadRequest: it has a variable. Forbidden: a closed setting differs; `param` names it.
    """
    _require_plain(given)
    wanted = parse(_with_closed(running.model_dump(mode="json"), given)).without_secrets()
    closed = list(_closed_differences(running, wanted, tenant))
    if closed:
        more = f" (and so are {', '.join(closed[1:])})" if len(closed) > 1 else ""
        raise Forbidden(
            f"{closed[0]}: differs from what runs, and is changed from the machine alone, by `serve-app deploy` "
            f"there{more}; leave it out to keep it",
            param=closed[0],
            code=FROM_THE_MACHINE,
        )
    return wanted.with_names(_kept_names(running, wanted))


def _require_plain(value: Any, at: str = "") -> None:
    """Raises BadRequest: a text in it has a variable, which would be one of the cluster's own environment."""
    if isinstance(value, str) and "${" in value:
        raise BadRequest(f"{at}: a variable is resolved where the file is, before it is sent", param=at)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            place = f"{at}.{name}" if at else str(name)
            _require_plain(str(name), place)
            _require_plain(inner, place)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_plain(inner, f"{at}.{index}")


def _with_closed(running: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the running value of each closed setting that it lacks."""
    found = dict(given)
    for section, values in running.items():
        if section == MODELS:
            continue
        if section == ROUTES:
            found.setdefault(ROUTES, values)
            continue
        sent = given.get(section, {})
        if isinstance(sent, Mapping):  # else it is refused as no mapping
            found[section] = {**_closed(values, OPEN.get(section, frozenset())), **sent}
    models = given.get(MODELS)
    if isinstance(models, list):
        old = {model["name"]: model for model in running[MODELS]}
        found[MODELS] = [
            {**_closed(old.get(str(one.get("name")), {}), OPEN_OF_MODEL), **one} if isinstance(one, Mapping) else one
            for one in models
        ]
    return found


def _closed(values: Mapping[str, Any], open_fields: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in open_fields}


def _closed_differences(running: Settings, wanted: Settings, tenant: str) -> Iterator[str]:
    """The closed settings that differ, by their dotted names. A new model has to have the defaults."""
    for section in Settings.model_fields:
        if section not in (MODELS, ROUTES):
            before = getattr(running, section)
            after = getattr(wanted, section)
            yield from _different(section, before, after, OPEN.get(section, frozenset()))
    old = {model.name: model for model in running.models}
    for index, model in enumerate(wanted.models):
        before = old.get(model.name) or ModelSettings(name=model.name, preset=model.preset)
        yield from _different(f"{MODELS}.{index}", before, model, OPEN_OF_MODEL)
    if _without_weights(running) != _without_weights(wanted):
        yield ROUTES
    if running.admission.tenants.get(tenant) != wanted.admission.tenants.get(tenant):
        yield f"admission.tenants.{tenant}"


def _without_weights(settings: Settings) -> dict[str, Any]:
    """The models that each name stands for."""
    return {
        route.name: (
            {target.model for target in route.targets},
            route.fallbacks,
            None if route.shadow is None else route.shadow.model,
        )
        for route in settings.routes
    }


def _different(at: str, before: Any, after: Any, open_fields: frozenset[str]) -> Iterator[str]:
    for name in type(after).model_fields:
        if name not in open_fields and getattr(before, name) != getattr(after, name):
            yield f"{at}.{name}"


def _kept_names(running: Settings, wanted: Settings) -> Names:
    """The texts of variables, of values that stay: without them a plan or a bundle would show the values."""
    before, after = (one.model_dump(mode="json") for one in (running, wanted))
    names = dict(running.names)
    of_models = names.pop(MODELS, {})
    found = _kept(names, before, after) or {}
    places = {model["name"]: str(index) for index, model in enumerate(before[MODELS])}
    kept = {}
    for index, model in enumerate(after[MODELS]):
        place = places.get(model["name"])
        if place is not None and place in of_models:
            kept[str(index)] = _kept(of_models[place], before[MODELS][int(place)], model)
    kept = {index: names for index, names in kept.items() if names}
    return {**found, MODELS: kept} if kept else found


def _kept(names: Names | str, before: Any, after: Any) -> Any:
    """The names of the values that are the same in both; None: of none."""
    if isinstance(names, str):
        return names if before == after else None
    found = {}
    for part, inner in names.items():
        new = _inside(after, part)
        if new is not None and (kept := _kept(inner, _inside(before, part), new)) is not None:
            found[part] = kept
    return found or None


def _inside(data: Any, part: str) -> Any:
    if isinstance(data, Mapping):
        return data.get(part)
    return data[int(part)] if isinstance(data, list) and int(part) < len(data) else None
