"""The state of a running application in the words of `serve-app status`, from Serve's own details.

Invariant: `state` is "running" only when every deployment is healthy and the endpoint's proxy too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from serve_app.cluster.local.load_status import Told, describe_load
from serve_app.names import APPLICATION, ENGINE_PREFIX, ROUTER, deployment_of

STATES = {
    "RUNNING": "running",
    "UNHEALTHY": "unhealthy",
    "DEPLOY_FAILED": "failed",
    "DELETING": "stopping",
}  # of Serve's application states; all others mean that it is starting


def _word(value: Any) -> str:
    """Serve's details hold enumerations or, once they were JSON, their values."""
    return str(value.value) if isinstance(value, enum.Enum) else str(value)


def _replicas(deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        # a replica that waits for a place has no node yet
        {"id": replica["replica_id"], "state": _word(replica["state"]), "node": replica.get("node_id") or ""}
        for replica in deployment["replicas"]
    ]


def _deployment(deployment: Mapping[str, Any], told: Told) -> dict[str, Any]:
    return {
        "deployment": deployment["name"],
        "state": _word(deployment["status"]).lower(),
        "message": reason(deployment["message"]),
        "replicas": _replicas(deployment),
        "target": deployment["target_num_replicas"],
        **describe_load(deployment, told),
    }


def reason(message: str) -> str:
    """A Serve message without its traceback: the last error named in it, or all of it when there is none."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":", 1)[0].isidentifier() or "Error:" in line.split(" ")[0]]
    if len(lines) <= 1 or not errors:
        return " ".join(lines)
    return errors[-1]


def declared(details: Mapping[str, Any], name: str = APPLICATION) -> dict[str, Any] | None:
    """What Serve was told of the application last; None when it was not declared but run, or is unknown."""
    return (details["applications"].get(name) or {}).get("deployed_app_config") or None


def declared_models(details: Mapping[str, Any], name: str = APPLICATION) -> list[str]:
    """The names of the models that the application was declared with, as far as they can be made out: what was handed
    to Serve by other means than ours may be anything."""
    arguments = (declared(details, name) or {}).get("args")
    models = arguments.get("models") if isinstance(arguments, Mapping) else None
    named = [model.get("name") for model in models or () if isinstance(model, Mapping)]
    return [name for name in named if isinstance(name, str)]


def built(details: Mapping[str, Any], name: str = APPLICATION) -> bool | None:
    """Whether Serve has made deployments from what it was told last; None while it is at it."""
    application = details["applications"].get(name)
    if application is None:
        return None
    if application["deployments"]:
        return True
    return False if STATES.get(_word(application["status"])) == "failed" else None


def describe(
    details: Mapping[str, Any], models: Sequence[str], name: str = APPLICATION, told: Told = MappingProxyType({})
) -> dict[str, Any]:
    """`state` (starting, running, unhealthy, failed, stopping or absent), `message`, `models`, `routers`.

    Args:
        details: `ServeInstanceDetails` as a dictionary.
        models: the configured names; a deployment of another name counts as the model its name spells.
        told: the numbers that replicas have told the controller, see `serve_app.cluster.local.load_status`.
    """
    application = details["applications"].get(name)
    if application is None:
        return {"state": "absent", "message": "", "models": [], "routers": []}
    by_deployment = {deployment_of(model): model for model in models}
    deployments = {one["name"]: _deployment(one, told) for one in application["deployments"].values()}
    engines = [
        {"name": by_deployment.get(key, key.removeprefix(ENGINE_PREFIX).replace("--", "/")), **one}
        for key, one in deployments.items()
        if key.startswith(ENGINE_PREFIX)
    ]
    state = STATES.get(_word(application["status"]), "starting")
    proxies = [_word(proxy["status"]) for proxy in details["proxies"].values()]
    if state == "running" and (not proxies or any(status != "HEALTHY" for status in proxies)):
        state = "starting"
    failed = [one for one in deployments.values() if one["message"] and one["state"] != "healthy"]
    messages = [f"{one['deployment']}: {one['message']}" for one in failed] or [reason(application["message"])]
    router = deployments.get(ROUTER)
    return {
        "state": state,
        "message": "; ".join(message for message in messages if message),
        "models": engines,
        "routers": router["replicas"] if router else [],
    }
