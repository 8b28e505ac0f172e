"""The state of a running application for `serve-app status`, from Serve's details.

Invariant: `state` is "running" only if every deployment and the endpoint's proxy are healthy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from serve_app.cluster.local.load_status import ReportedSeries, describe_load
from serve_app.names import APPLICATION, ENGINE_PREFIX, ROUTER, deployment_of

STATES = {
    "RUNNING": "running",
    "UNHEALTHY": "unhealthy",
    "DEPLOY_FAILED": "failed",
    "DELETING": "stopping",
}  # of Serve's application states; all others count as starting


def _enum_value(value: Any) -> str:
    """The value of an enumeration; details decoded from JSON hold the values themselves."""
    return str(getattr(value, "value", value))


def _deployment(deployment: Mapping[str, Any], reported: ReportedSeries) -> dict[str, Any]:
    return {
        "deployment": deployment["name"],
        "state": _enum_value(deployment["status"]).lower(),
        "message": reason(deployment["message"]),
        "replicas": [
            # an unplaced replica has no node yet
            {"id": replica["replica_id"], "state": _enum_value(replica["state"]), "node": replica.get("node_id") or ""}
            for replica in deployment["replicas"]
        ],
        "target": deployment["target_num_replicas"],
        **describe_load(deployment, reported),
    }


def reason(message: str) -> str:
    """A Serve message without its traceback: the last error in it, or the whole message if there is none."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":", 1)[0].isidentifier() or "Error:" in line.split(" ")[0]]
    return errors[-1] if errors and len(lines) > 1 else " ".join(lines)


def declared(details: Mapping[str, Any], name: str = APPLICATION) -> dict[str, Any] | None:
    """The last declaration of the application to Serve; None if it was run without one, or is unknown."""
    return (details["applications"].get(name) or {}).get("deployed_app_config") or None


def declared_models(details: Mapping[str, Any], name: str = APPLICATION) -> list[str]:
    """The model names of the application's declaration, as far as they can be read: a declaration by other tools may
    have any form."""
    arguments = (declared(details, name) or {}).get("args")
    models = arguments.get("models") if isinstance(arguments, Mapping) else None
    named = [model.get("name") for model in models or () if isinstance(model, Mapping)]
    return [name for name in named if isinstance(name, str)]


def is_built(details: Mapping[str, Any], name: str = APPLICATION) -> bool | None:
    """Whether Serve has built deployments from the last declaration; None while it builds them."""
    application = details["applications"].get(name)
    if application is None:
        return None
    if application["deployments"]:
        return True
    return False if STATES.get(_enum_value(application["status"])) == "failed" else None


def describe(
    details: Mapping[str, Any],
    models: Sequence[str],
    name: str = APPLICATION,
    reported: ReportedSeries = MappingProxyType({}),
) -> dict[str, Any]:
    """`state` (starting, running, unhealthy, failed, stopping or absent), `message`, `models`, `routers`.

    Args:
        details: `ServeInstanceDetails` as a dictionary.
        models: the configured names; for another deployment the model's name is taken from the deployment's.
        reported: the metrics that replicas reported to the controller, see `serve_app.cluster.local.load_status`.
    """
    application = details["applications"].get(name)
    if application is None:
        return {"state": "absent", "message": "", "models": [], "routers": []}
    by_deployment = {deployment_of(model): model for model in models}
    deployments = {one["name"]: _deployment(one, reported) for one in application["deployments"].values()}
    engines = [
        {"name": by_deployment.get(key, key.removeprefix(ENGINE_PREFIX).replace("--", "/")), **one}
        for key, one in deployments.items()
        if key.startswith(ENGINE_PREFIX)
    ]
    state = STATES.get(_enum_value(application["status"]), "starting")
    proxies = [_enum_value(proxy["status"]) for proxy in details["proxies"].values()]
    if state == "running" and set(proxies) != {"HEALTHY"}:
        state = "starting"
    failed = [one for one in deployments.values() if one["message"] and one["state"] != "healthy"]
    messages = [f"{one['deployment']}: {one['message']}" for one in failed] or [reason(application["message"])]
    return {
        "state": state,
        "message": "; ".join(message for message in messages if message),
        "models": engines,
        "routers": deployments[ROUTER]["replicas"] if ROUTER in deployments else [],
    }
