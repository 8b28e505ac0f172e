"""The state of a running application for `serve-app status`, from Serve's details: its deployments, their load, and why
replicas wait. Pure: `application` asks Serve, Ray and the quota actor.

Load: the policy's averages and delays are inside the controller and not fetched: the figures here are the newest ones,
and the reason of a target that is about to change names the delay.

Waits: Serve reports after half a minute that a replica takes long to be scheduled, without the reason. The replica's
placement group, the sizes of the nodes and what is free on them give the reason at once. What the quota actor knows is
added by `quota_state`.

Invariant: `state` is "running" only if every deployment and the endpoint's proxy are healthy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from autoscaling import readings
from autoscaling.policies import OngoingRequestsPolicy, Signals
from autoscaling.readings import RouterCounts
from serve_app.names import APPLICATION, ENGINE_PREFIX, ROUTER, deployment_of
from serve_app.settings import DEFAULT_POLICY, RouteSettings

STATES = {
    "RUNNING": "running",
    "UNHEALTHY": "unhealthy",
    "DEPLOY_FAILED": "failed",
    "DELETING": "stopping",
}  # of Serve's application states; all others count as starting
# In these states of a deployment Serve's own message has more detail than ours.
IN_TROUBLE = ("UNHEALTHY", "DEPLOY_FAILED")
ENDPOINT = "endpoint"
FAILED = "deploy_failed"  # of the states in `unready`
FIXED = "a fixed number"
COUNTED = ("GPU", "CPU")
KIND = "accelerator_type:"
NODES_SHOWN = 3  # of the nodes that are large enough for a replica: those with the most free

ReportedSeries = Mapping[str, Mapping[str, Sequence[Any]]]  # deployment -> metric -> a series of each running replica
Replica = Mapping[str, Any]  # of Serve's details
Group = Mapping[str, Any]  # an entry of Ray's placement group table
Node = Mapping[str, Any]  # an entry of `ray.nodes()`, with its free resources as `Free`


def enum_value(value: Any) -> str:
    """The value of an enumeration; details decoded from JSON hold the values themselves."""
    return str(getattr(value, "value", value))


def deployments_of(details: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The application's deployments by name; none if it is not there. `details`: Serve's details as a dictionary."""
    found: Mapping[str, Mapping[str, Any]] = (details["applications"].get(APPLICATION) or {}).get("deployments", {})
    return found


def running_replicas(deployment: Mapping[str, Any]) -> int:
    """The replicas of a deployment that run."""
    return sum(enum_value(one["state"]) == "RUNNING" for one in deployment["replicas"])


def _deployment(deployment: Mapping[str, Any], reported: ReportedSeries) -> dict[str, Any]:
    return {
        "deployment": deployment["name"],
        "state": enum_value(deployment["status"]).lower(),
        "message": "; ".join(filter(None, [reason(deployment["message"]), _stops(deployment)])),
        "cause": reason(deployment["message"]) if "failed to start" in deployment["message"] else "",  # no wait
        "replicas": [
            # an unplaced replica has no node yet
            {
                "id": replica["replica_id"],
                "state": enum_value(replica["state"]),
                "node": replica.get("node_id") or "",
                "address": replica.get("node_ip") or "",
            }
            for replica in deployment["replicas"]
        ],
        "target": deployment["target_num_replicas"],
        **describe_load(deployment, reported),
    }


def _stops(deployment: Mapping[str, Any]) -> str:
    """The reason why replicas are still stopping."""
    stopping = [one.get("node_id") for one in deployment["replicas"] if enum_value(one["state"]) == "STOPPING"]
    if not stopping:
        return ""
    limit_s = deployment["deployment_config"]["graceful_shutdown_timeout_s"]
    subject = "1 replica stops, and" if len(stopping) == 1 else f"{len(stopping)} replicas stop, and each"
    behaviour = "never had a place, so does not answer" if None in stopping else "finishes its requests"
    return f"{subject} {behaviour}, for {limit_s:g} s at most"


def unready(details: Mapping[str, Any]) -> dict[str, str]:
    """The application's deployments, and the endpoint, that are not ready, with Serve's state of each. A deployment
    whose number of replicas follows the load is ready."""
    deployments = deployments_of(details)
    found = {name: enum_value(one["status"]).lower() for name, one in deployments.items()}
    scaling = {
        name
        for name, one in deployments.items()
        if found[name] in ("upscaling", "downscaling") and enum_value(one["status_trigger"]) == "AUTOSCALING"
    }
    waits = {name: state for name, state in found.items() if state != "healthy" and name not in scaling}
    if {enum_value(proxy["status"]) for proxy in details["proxies"].values()} != {"HEALTHY"}:
        waits[ENDPOINT] = "starting"
    return waits


def reason(message: str) -> str:
    """A Serve message without its traceback: the last error in it, or the whole message if there is none."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":", 1)[0].replace(".", "").isidentifier()]
    found = errors[-1] if errors and len(lines) > 1 else " ".join(lines)
    name, _, text = found.partition(": ")
    return text if name.startswith("serve_app.errors.") else found  # our own messages say all of it


def declared(details: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last declaration of the application to Serve; None if it was run without one, or is unknown."""
    return (details["applications"].get(APPLICATION) or {}).get("deployed_app_config") or None


def declared_models(details: Mapping[str, Any]) -> list[str]:
    """The model names of the application's declaration, as far as they can be read: a declaration by other tools may
    have any form."""
    arguments = (declared(details) or {}).get("args")
    models = arguments.get("models") if isinstance(arguments, Mapping) else None
    named = [model.get("name") for model in models or () if isinstance(model, Mapping)]
    return [name for name in named if isinstance(name, str)]


def declared_routes(details: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The names of the declaration that stand for models, with all fields of `settings.routes`, as far as they can be
    read."""
    arguments = (declared(details) or {}).get("args")
    routes = arguments.get("routes") if isinstance(arguments, Mapping) else None
    found = list[dict[str, Any]]()
    for route in routes or ():
        with contextlib.suppress(ValidationError):  # a declaration by other tools may have any form
            found.append(RouteSettings.model_validate(route).model_dump(mode="json"))
    return found


def deployed(
    details: Mapping[str, Any], nodes: Sequence[Node], devices: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """What is there: `nodes` [{resources, device_bytes: those for leases}], the `arguments` of the application's
    declaration (None: there is none), and the ids of its `replicas` by deployment.

    Args:
        devices: by key, the total bytes and those for leases, as the quota actor has them.
    """
    of_node: dict[str, list[int]] = {}
    for key, (_, available) in devices.items():
        of_node.setdefault(key.rpartition("/")[0], []).append(available)
    deployments = deployments_of(details)
    return {
        "nodes": [
            {"resources": node["Resources"], "device_bytes": of_node.get(node["NodeID"], [])}
            for node in nodes
            if node["Alive"]
        ],
        "arguments": (declared(details) or {}).get("args"),
        "replicas": {
            name: [one["replica_id"] for one in deployment["replicas"]] for name, deployment in deployments.items()
        },
    }


def replicas_on(details: Mapping[str, Any], node_id: str) -> list[str]:
    """The deployments of all replicas on a node, one entry a replica."""
    deployments = [
        one for application in details["applications"].values() for one in application["deployments"].values()
    ]
    return [one["name"] for one in deployments for replica in one["replicas"] if replica.get("node_id") == node_id]


def longest_drain_s(details: Mapping[str, Any], node_id: str) -> float:
    """The longest `drain_s` of a model with a replica on the node. A router's own bound is above any request's."""
    here = set(replicas_on(details, node_id)) - {ROUTER}
    deployments = deployments_of(details)
    bounds = [deployments[name]["deployment_config"]["graceful_shutdown_timeout_s"] for name in here & set(deployments)]
    return max(bounds, default=0.0)


def is_built(details: Mapping[str, Any]) -> bool | None:
    """Whether Serve has built deployments from the last declaration; None while it builds them."""
    application = details["applications"].get(APPLICATION)
    if application is None:
        return None
    if application["deployments"]:
        return True
    return False if STATES.get(enum_value(application["status"])) == "failed" else None


def describe(
    details: Mapping[str, Any],
    models: Sequence[str],
    reported: ReportedSeries = MappingProxyType({}),
    decisions: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """`state` (starting, running, unhealthy, failed, stopping or absent), `message`, `models`, `routers`, `routes`,
    `unready`.

    Args:
        details: `ServeInstanceDetails` as a dictionary.
        models: the configured names; for another deployment the model's name is taken from the deployment's.
        reported: the metrics that replicas reported to the controller.
        decisions: the last ones of scaling, by deployment (`operations.scraped`).
    """
    application = details["applications"].get(APPLICATION)
    if application is None:
        return {"state": "absent", "message": "", "models": [], "routers": [], "unready": {}}
    by_deployment = {deployment_of(model): model for model in models}
    deployments = {one["name"]: _deployment(one, reported) for one in application["deployments"].values()}
    engines = [
        {"name": by_deployment.get(key, key.removeprefix(ENGINE_PREFIX).replace("--", "/")), **one}
        | _decided(decisions.get(key, {}))
        for key, one in deployments.items()
        if key.startswith(ENGINE_PREFIX)
    ]
    state = STATES.get(enum_value(application["status"]), "starting")
    proxies = [enum_value(proxy["status"]) for proxy in details["proxies"].values()]
    if state == "running" and set(proxies) != {"HEALTHY"}:
        state = "starting"
    failed = [one for one in deployments.values() if one["message"] and one["state"] != "healthy"]
    messages = [f"{one['deployment']}: {one['message']}" for one in failed] or [reason(application["message"])]
    return {
        "state": state,
        "message": "; ".join(message for message in messages if message),
        "models": engines,
        "routers": deployments[ROUTER]["replicas"] if ROUTER in deployments else [],
        "routes": declared_routes(details),
        "unready": unready(details),
    }


def _decided(decision: Mapping[str, Any]) -> dict[str, Any]:
    """`advised`: the number of replicas that a second policy would want, None: there is none; `advice`: why; `signals`:
    what the policy saw, empty before its first decision. Also `why`, where only the policy knows: it has seen more than
    the present numbers."""
    advice = {"advised": decision.get("advised"), "advice": decision.get("advice", "")}
    advice["signals"] = decision.get("signals", "")
    return advice if decision.get("policy", DEFAULT_POLICY) == DEFAULT_POLICY else advice | {"why": decision["reason"]}


def _raw(reported: ReportedSeries, deployment: str) -> readings.Raw:
    return {name: dict(enumerate(series)) for name, series in reported.get(deployment, {}).items()}


def describe_load(deployment: Mapping[str, Any], reported: ReportedSeries) -> dict[str, Any]:
    """`ongoing` (requests on engine replicas), `waiting` (in the routers' queues), both None if not reported, and
    `why`, the reason of the target.

    Args:
        deployment: `DeploymentDetails` of an engine deployment, as a dictionary.
        reported: the series that routers and engines reported to the controller.
    """
    counts = readings.router_counts(_raw(reported, ROUTER), lambda router: True).get(deployment["name"])
    executing = readings.engine_figures(_raw(reported, deployment["name"]), lambda replica: True).executing
    config = (deployment.get("deployment_config") or {}).get("autoscaling_config")
    known = {
        # so that the sum is the load that the policy sees: a request just granted is in one of the two counts
        "ongoing": None if counts is None else round(max(counts.granted, executing - counts.waiting)),
        "waiting": None if counts is None else round(counts.waiting),
    }
    if not config or config["min_replicas"] == config["max_replicas"]:
        return {**known, "why": FIXED}
    return {**known, "why": _why(deployment, config, counts or RouterCounts(), executing)}


def _why(deployment: Mapping[str, Any], config: Mapping[str, Any], counts: RouterCounts, executing: float) -> str:
    target = deployment["target_num_replicas"]
    signals = Signals(
        running=running_replicas(deployment),
        target=target,
        waiting=counts.waiting,
        granted=counts.granted,
        rows=counts.rows,
        executing=executing,
        complete=True,
        cold_start_requested=False,
        blocked=counts.blocked,
        unplaced=len(_unplaced(deployment)),
        min_replicas=config["min_replicas"],
        max_replicas=config["max_replicas"],
        target_ongoing=config["target_ongoing_requests"],
        look_back_s=config["look_back_period_s"],
        now=0.0,
    )
    wanted = OngoingRequestsPolicy().decide(signals)
    if wanted.replicas > target:
        return f"{wanted.reason}; up after {config['upscale_delay_s']:g} s of that"
    if wanted.replicas < target:
        to_zero_s = config.get("downscale_to_zero_delay_s")
        delay_s = config["downscale_delay_s"] if target > 1 or to_zero_s is None else to_zero_s
        return f"{wanted.reason}; down after {delay_s:g} s of that"
    return wanted.reason


def unplaced(details: Mapping[str, Any]) -> dict[str, list[Replica]]:
    """Deployment -> its starting replicas that have no node; `details`: Serve's details as a dictionary."""
    deployments = deployments_of(details)
    found = {name: _unplaced(one) for name, one in deployments.items() if enum_value(one["status"]) not in IN_TROUBLE}
    return {name: replicas for name, replicas in found.items() if replicas}


def _unplaced(deployment: Mapping[str, Any]) -> list[Replica]:
    return [
        one for one in deployment["replicas"] if enum_value(one["state"]) == "STARTING" and one.get("node_id") is None
    ]


def placement_waits(
    waiting: Mapping[str, Sequence[Replica]], groups: Iterable[Group], nodes: Sequence[Node], now: float
) -> dict[str, str]:
    """Deployment -> the resources that its `unplaced` replicas wait for, and how long. Replicas without bundles,
    and those whose process is about to start, are left out. `now`: seconds since the epoch."""
    by_name = {group["name"]: group for group in groups if group["state"] != "CREATED"}
    reasons = {}
    for deployment, replicas in waiting.items():
        found = [one for one in replicas if one["actor_name"] in by_name]
        if found:
            since_s = now - min(one["start_time_s"] for one in found)
            why = wait_reason(by_name[found[0]["actor_name"]], nodes)
            reasons[deployment] = f"{replicas_wait(len(found))} since {since_s:.0f} s for {why}"
    return reasons


def replicas_wait(count: int) -> str:
    return "1 replica waits" if count == 1 else f"{count} replicas wait"


def wait_reason(group: Group, nodes: Sequence[Node]) -> str:
    """The resources that a replica needs, and why Ray cannot place it."""
    bundles = [group["bundles"][index] for index in sorted(group["bundles"])]
    if group["strategy"] == "STRICT_PACK":
        bundles = [{name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}]
    times = f"{len(bundles)} times " if len(bundles) > 1 else ""
    each = bundles[0]  # all of them are alike
    scarce = "GPU" if each.get("GPU") else "CPU"
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    large = [
        node
        for node in nodes
        if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in each.items())
    ]
    if large:
        large.sort(key=lambda node: (node["Free"].get(scarce, 0), node["Free"].get("CPU", 0)), reverse=True)
        free = ", ".join(_free(node, each) for node in large[:NODES_SHOWN])
        rest = f" and no more on {len(large) - NODES_SHOWN} others" if len(large) > NODES_SHOWN else ""
        return f"{times}{_amounts(each)} on one node, which are not free: {free}{rest}"
    largest: Mapping[str, float] = max(alive, key=lambda node: (node.get(scarce, 0), node.get("CPU", 0)), default={})
    has = _amounts({name: largest.get(name, 0) for name in COUNTED if name == scarce or name in largest})
    return f"{times}{_amounts(each)} on one node, and no node has that; the largest has {has}"


def _free(node: Node, each: Mapping[str, float]) -> str:
    """The free part of what a replica needs, of one node."""
    counts = [
        f"{node['Free'].get(name, 0):g} of {node['Resources'][name]:g} {name}s" for name in COUNTED if each.get(name)
    ]
    return f"{' and '.join(counts)} on {node['NodeManagerAddress']}"


def _amounts(resources: Mapping[str, float]) -> str:
    here = [(name, resources[name]) for name in COUNTED if resources.get(name) is not None]
    counted = " and ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in here)
    kinds = ", ".join(name.removeprefix(KIND) for name in resources if name.startswith(KIND))
    return f"{counted} ({kinds})" if kinds else counted
