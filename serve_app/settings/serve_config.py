"""The application as Serve's own configuration (`serve deploy`, Serve's REST interface), from ours.

Serve's configuration is the only way in which an application-level scaling policy and live changes of an application
can be had; `serve-app up`, `serve-app deploy` and `serve-app export` all go through here.

Invariant: no API key is in it, only digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

from serve_app.errors import ConfigError
from serve_app.names import APPLICATION, RELEASE, deployment_of
from serve_app.settings.model import DEFAULT_POLICY, GB, ModelSettings
from serve_app.settings.settings import Settings
from serve_app.settings.variables import Names, escaped, resolve, with_names

BUILD = "serve_app.app:build"
POLICY = "autoscaling.ray_policy:ScalingPolicy"
# Of a model whose node the ledger may choose: what is said of it in the policy's own arguments.
READ_BY_THE_CONTROLLER = ("name", "memory_gb", "tensor_parallel_size", "pipeline_parallel_size")

ProxyLocation = Literal["EveryNode", "HeadOnly"]


def application(settings: Settings, *, import_path: str = BUILD) -> dict[str, Any]:
    """One entry of `applications`. `settings` must hold hashed keys only.

    Raises:
        ValueError: a key in clear.
    """
    if any(key.key is not None for key in settings.auth.keys):
        raise ValueError("auth.keys: a key in clear must not leave the process that read the configuration")
    entry: dict[str, Any] = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": import_path,
        # Serve builds an application anew only if its arguments change: after an upgrade the release does.
        "args": {"release": RELEASE, **escaped(settings.model_dump(mode="json"))},
    }
    if settings.names:
        entry["args"]["names"] = escaped(settings.names)
    # also where nothing scales: it ends replicas without a place (autoscaling/unplaced.py)
    entry["autoscaling_policy"] = {"policy_function": POLICY}
    # The ledger may choose the node of an engine that shares a device, or says what memory it needs.
    placed = [one for one in settings.models if one.memory_gb is not None or 0 < (one.gpus_per_rank or 0) < 1]
    kwargs: dict[str, Any] = {}
    named = {
        deployment_of(model.name): [model.replicas.policy, model.replicas.advise]
        for model in settings.models
        if (model.replicas.policy, model.replicas.advise) != (DEFAULT_POLICY, None)
    }
    if named:
        kwargs["policies"] = named
    if settings.scaling.max_gpus is not None:
        fixed = sum(one.replicas.min_replicas * one.gpus for one in settings.models if not one.replicas.autoscaled)
        kwargs["budget"] = {
            "max_gpus": settings.scaling.max_gpus - fixed,
            "gpus": {deployment_of(one.name): one.gpus for one in settings.models if one.replicas.autoscaled},
        }
    if settings.scaling.record_decisions:
        kwargs["record"] = True
    if placed:
        kwargs["starts"] = {
            "application": APPLICATION,
            "models": {deployment_of(model.name): [model.name, _requested_bytes(model)] for model in placed},
            "quota": settings.quota.model_dump(mode="json"),
        }
    if kwargs:
        entry["autoscaling_policy"]["policy_kwargs"] = kwargs
    return entry


def _requested_bytes(model: ModelSettings) -> int | None:
    """Of the one device an engine is on; None: its replicas will say."""
    return None if model.memory_gb is None else round(model.memory_gb * GB) * model.ranks


def with_variables(entry: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The entry with `${NAME}` in place of each value of a variable: the process that builds the application resolves
    them. A key is then no digest but its variable.

    Raises:
        ConfigError: a variable is in what Serve's controller reads itself, for models that the ledger places.
    """
    if not settings.names:
        return dict(entry)
    if "policy_kwargs" in entry["autoscaling_policy"]:
        _require_plain(settings.names)
    arguments = {name: one for name, one in with_names(entry["args"], settings.names).items() if name != "names"}
    for key in arguments["auth"]["keys"]:
        if key["key"] is not None:
            key["key_sha256"] = None
    return {**entry, "args": arguments}


def _require_plain(names: Names) -> None:
    found = [("quota", name) for name in names.get("quota", {})]
    found += [
        (f"models.{index}", name)
        for index, model in names.get("models", {}).items()
        for name in READ_BY_THE_CONTROLLER
        if name in model
    ]
    if found:
        path = ".".join(found[0])
        raise ConfigError(
            f"{path}: an export cannot have a variable here, which Serve's controller would not resolve", param=path
        )


def split_arguments(arguments: Mapping[str, Any]) -> tuple[str | None, Names, dict[str, Any]]:
    """What an application was declared with: the release that declares it (None: it does not say), the texts of what
    was a variable then, and the configuration as `resolve` takes it."""
    configuration = dict(arguments)
    release = configuration.pop("release", None)
    names = configuration.pop("names", {})
    return release, resolve(names, {}).data if isinstance(names, dict) else {}, configuration


def configuration_digest(arguments: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration of an application's arguments, in hexadecimal digits: the same for each release, and
    for a configuration that is declared again (`as_change`)."""
    configuration = split_arguments(arguments)[2]
    models = configuration.get("models")
    if isinstance(models, list | tuple) and all(isinstance(one, Mapping) for one in models):
        plain = ({**one, "replicas": {**(one.get("replicas") or {}), "initial_replicas": None}} for one in models)
        configuration["models"] = list(plain)
    text = json.dumps(configuration, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def as_change(arguments: Mapping[str, Any], served: Collection[str]) -> dict[str, Any]:
    """An application's arguments for a Serve that has these of its models: they keep their number of replicas. Serve
    would put a model whose settings change back to its `initial_replicas`, under load."""
    models = [
        one | {"replicas": one["replicas"] | {"initial_replicas": None}} if one["name"] in served else one
        for one in arguments["models"]
    ]
    return {**arguments, "models": models}


def with_other_applications(application_entry: Mapping[str, Any], details: Mapping[str, Any]) -> list[dict[str, Any]]:
    """This application and the others that were declared to the running Serve, which would otherwise be deleted.

    Args:
        details: `ServeInstanceDetails` as a dictionary.
    """
    others = [
        dict(found["deployed_app_config"])
        for name, found in details["applications"].items()
        if name != application_entry["name"] and found.get("deployed_app_config")
    ]
    return [*others, dict(application_entry)]
