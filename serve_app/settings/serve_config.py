"""The application as Serve's own configuration (`serve deploy`, Serve's REST interface), from ours.

Serve's configuration is the only way in which an application-level scaling policy and live changes of an application
can be had; `serve-app up`, `serve-app deploy` and `serve-app export` all go through here.

Invariant: no API key is in it, only digests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from serve_app.names import APPLICATION, RELEASE, deployment_of
from serve_app.settings.model import GB, ModelSettings
from serve_app.settings.settings import Settings

BUILD = "serve_app.app:build"
POLICY = "autoscaling.ray_policy:ScalingPolicy"

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
        "args": {"release": RELEASE, **settings.model_dump(mode="json")},
    }
    # also where nothing scales: it ends replicas without a place (autoscaling/unplaced.py)
    entry["autoscaling_policy"] = {"policy_function": POLICY}
    # The ledger may choose the node of an engine that shares a device, or says what memory it needs.
    placed = [one for one in settings.models if one.memory_gb is not None or 0 < (one.gpus_per_rank or 0) < 1]
    if placed:
        starts = {
            "application": APPLICATION,
            "models": {deployment_of(model.name): [model.name, _requested_bytes(model)] for model in placed},
            "quota": settings.quota.model_dump(mode="json"),
        }
        entry["autoscaling_policy"]["policy_kwargs"] = {"starts": starts}
    return entry


def _requested_bytes(model: ModelSettings) -> int | None:
    """Of the one device an engine is on; None: its replicas will say."""
    return None if model.memory_gb is None else round(model.memory_gb * GB) * model.ranks


def split_release(arguments: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The release that declares an application with these arguments (None: it does not say), and the configuration."""
    configuration = dict(arguments)
    return configuration.pop("release", None), configuration


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
