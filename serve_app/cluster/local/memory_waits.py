"""Adds memory shortage to `serve-app status`: models with replicas that wait for GPU memory, that cannot scale up for
lack of it, or that use more than they were granted. Pure.

driver.py asks the quota actor. Serve's state of a replica that waits for memory is `STARTING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BLOCKED = "blocked: memory"
GB = 1e9
Rows = Sequence[Mapping[str, Any]]  # one of the lists in the quota actor's figures


def with_memory_waits(state: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with the memory waits of its models from the quota actor's figures."""
    told = _with_waiting(_with_shortages(state, figures["short"]), figures["waiting"])
    return _with_overuse(told, figures["alarms"], figures["draining"])


def _with_shortages(state: Mapping[str, Any], models: Rows) -> dict[str, Any]:
    """Append the memory shortage of a model to the reason of its target."""
    why = {one["model"]: one["why"] for one in models}
    told = [
        model | {"why": f"{model['why']}; held back: {why[model['name']]}"} if model["name"] in why else dict(model)
        for model in state["models"]
    ]
    return {**state, "models": told}


def _with_waiting(state: Mapping[str, Any], found: Rows) -> dict[str, Any]:
    """Set `blocked: memory` for models whose replicas wait for memory, with the figures as their message."""
    models = [
        _with_wait_reason(model, [one for one in found if one["model"] == model["name"]]) for model in state["models"]
    ]
    told = [f"{model['deployment']}: {model['message']}" for model in models if model["state"] == BLOCKED]
    message = state["message"] if not told else "; ".join(told)
    return {**state, "message": message, "models": models}


def _with_overuse(state: Mapping[str, Any], alarms: Rows, draining: Sequence[str]) -> dict[str, Any]:
    """Add the replicas that use more memory than granted to the message."""
    told = []
    for model in state["models"]:
        replicas = {replica["id"] for replica in model["replicas"]}
        told += [
            f"{model['deployment']}: {one['replica']} uses {one['measured_bytes'] / GB:.2f} GB of "
            f"{one['granted_bytes'] / GB:.2f} GB granted" + ("; it drains" if one["replica"] in draining else "")
            for one in alarms
            if one["replica"] in replicas
        ]
    return {**state, "message": "; ".join(filter(None, [state["message"], *told]))}


def _with_wait_reason(model: Mapping[str, Any], waiting: Rows) -> dict[str, Any]:
    replicas = {replica["id"] for replica in model["replicas"]}
    ours = [one for one in waiting if one["replica"] in replicas]  # replicas that have ended do not count
    if not ours:
        return dict(model)
    first = ours[0]
    count = "1 replica waits" if len(ours) == 1 else f"{len(ours)} replicas wait"
    wanted, least = (f"{first[name] / GB:.2f} GB" for name in ("wanted_bytes", "least_bytes"))
    ranks = "" if first["ranks"] == 1 else f" on each of {first['ranks']} devices"
    message = f"{count} for {wanted} of memory{ranks} (at least {least}): {first['why']}"
    return {**model, "state": BLOCKED, "message": message}
