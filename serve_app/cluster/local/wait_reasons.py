"""Why replicas wait, for `serve-app status`: for a place, or for GPU memory. Pure: driver.py asks Ray and the actor.

Serve reports after half a minute that a replica takes long to be scheduled, without the reason. The replica's placement
group and the sizes of the nodes give the reason at once. A replica that waits for memory is `STARTING` for Serve; the
quota actor's figures name it, the models that cannot scale up for lack of memory, and the replicas that use more than
they were granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

COUNTED = ("GPU", "CPU")
KIND = "accelerator_type:"
# In these states Serve's own message on the deployment has more detail.
IN_TROUBLE = ("UNHEALTHY", "DEPLOY_FAILED")

BLOCKED = "blocked: memory"
GB = 1e9

Group = Mapping[str, Any]  # an entry of Ray's placement group table
Node = Mapping[str, Any]  # an entry of `ray.nodes()`


def unplaced(details: Mapping[str, Any], application: str) -> dict[str, list[str]]:
    """Deployment -> the actor names of its replicas that have no node; `details`: Serve's details as a dictionary."""
    found = (details["applications"].get(application) or {}).get("deployments", {})
    actors = {
        name: [replica["actor_name"] for replica in deployment["replicas"] if replica.get("node_id") is None]
        for name, deployment in found.items()
        if getattr(deployment["status"], "value", deployment["status"]) not in IN_TROUBLE
    }
    return {name: names for name, names in actors.items() if names}


def reasons(actors: Mapping[str, Sequence[str]], groups: Iterable[Group], nodes: Sequence[Node]) -> dict[str, str]:
    """Deployment -> the resources that its `unplaced` replicas wait for. Replicas without bundles are left out."""
    by_name = {group["name"]: group for group in groups}
    waiting = {deployment: [by_name[one] for one in names if one in by_name] for deployment, names in actors.items()}
    return {
        deployment: f"{replicas_wait(len(found))} for {wait_reason(found[0], nodes)}"
        for deployment, found in waiting.items()
        if found
    }


def replicas_wait(count: int) -> str:
    return "1 replica waits" if count == 1 else f"{count} replicas wait"


def wait_reason(group: Group, nodes: Sequence[Node]) -> str:
    """The resources that a replica needs, and why Ray cannot place it."""
    bundles = [group["bundles"][index] for index in sorted(group["bundles"])]
    if group["strategy"] == "STRICT_PACK":
        bundles = [{name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}]
    times = f"{len(bundles)} times " if len(bundles) > 1 else ""
    each = bundles[0]  # all of them are alike
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in each.items()) for node in alive):
        return f"{times}{_amounts(each)} on one node, which are not free"
    scarce = "GPU" if each.get("GPU") else "CPU"
    largest: Mapping[str, float] = max(alive, key=lambda node: (node.get(scarce, 0), node.get("CPU", 0)), default={})
    has = _amounts({name: largest.get(name, 0) for name in COUNTED if name == scarce or name in largest})
    return f"{times}{_amounts(each)} on one node, and no node has that; the largest has {has}"


def _amounts(resources: Mapping[str, float]) -> str:
    here = [(name, resources[name]) for name in COUNTED if resources.get(name) is not None]
    counted = " and ".join(f"{amount:g} {name}{'' if amount == 1 else 's'}" for name, amount in here)
    kinds = ", ".join(name.removeprefix(KIND) for name in resources if name.startswith(KIND))
    return f"{counted} ({kinds})" if kinds else counted


def with_memory_waits(state: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with the memory waits of its models from the quota actor's figures: a waiting model has the state
    `blocked: memory`, and the state's message names the waits and the replicas that use more than granted."""
    short = {one["model"]: one["why"] for one in figures["short"]}
    models, waits, overuse = [], [], []
    for told in state["models"]:
        model = dict(told)
        replicas = {replica["id"] for replica in model["replicas"]}
        if model["name"] in short:
            model["why"] = f"{model['why']}; held back: {short[model['name']]}"
        # replicas that have ended do not count
        waiting = [one for one in figures["waiting"] if one["model"] == model["name"] and one["replica"] in replicas]
        if waiting:
            model |= {"state": BLOCKED, "message": _wait(waiting)}
            waits.append(f"{model['deployment']}: {model['message']}")
        overuse += [
            f"{model['deployment']}: {one['replica']} uses {one['measured_bytes'] / GB:.2f} GB of "
            f"{one['granted_bytes'] / GB:.2f} GB granted"
            + ("; it drains" if one["replica"] in figures["draining"] else "")
            for one in figures["alarms"]
            if one["replica"] in replicas
        ]
        models.append(model)
    message = "; ".join(waits) or state["message"]
    return {**state, "message": "; ".join(filter(None, [message, *overuse])), "models": models}


def _wait(waiting: Sequence[Mapping[str, Any]]) -> str:
    first = waiting[0]
    wanted, least = (f"{first[name] / GB:.2f} GB" for name in ("wanted_bytes", "least_bytes"))
    ranks = "" if first["ranks"] == 1 else f" on each of {first['ranks']} devices"
    return f"{replicas_wait(len(waiting))} for {wanted} of memory{ranks} (at least {least}): {first['why']}"
