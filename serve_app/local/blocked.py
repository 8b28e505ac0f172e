"""Models with replicas that wait for GPU memory, or with too little of it for more, in the words of `serve-app status`.
Pure.

driver.py asks the quota actor. Serve calls such a replica starting for as long as it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.local.load import FIXED

BLOCKED = "blocked: memory"
GB = 1e9
Waiting = Sequence[Mapping[str, Any]]  # `waiting` of the quota actor's figures


def anyone(state: Mapping[str, Any]) -> bool:
    """Whether a replica in a state does not run (yet), so that asking is worth while."""
    return any(replica["state"] != "RUNNING" for model in state["models"] for replica in model["replicas"])


def scales(state: Mapping[str, Any]) -> bool:
    """Whether a model's number of replicas follows its load, and so may be short of memory for more."""
    return any(model["why"] != FIXED for model in state["models"])


def short(state: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state with what keeps models from having more replicas behind the reason of their targets.

    Args:
        models: `short` of the quota actor's figures.
    """
    why = {one["model"]: one["why"] for one in models}
    told = [
        model | {"why": f"{model['why']}; held back: {why[model['name']]}"} if model["name"] in why else dict(model)
        for model in state["models"]
    ]
    return {**state, "models": told}


def explained(state: Mapping[str, Any], waiting: Waiting) -> dict[str, Any]:
    """The state with `blocked: memory` for the models whose replicas wait for it, and the figures as their message."""
    models = [_explained(model, [one for one in waiting if one["model"] == model["name"]]) for model in state["models"]]
    told = [f"{model['deployment']}: {model['message']}" for model in models if model["state"] == BLOCKED]
    message = state["message"] if not told else "; ".join(told)
    return {**state, "message": message, "models": models}


def _explained(model: Mapping[str, Any], waiting: Waiting) -> dict[str, Any]:
    replicas = {replica["id"] for replica in model["replicas"]}
    ours = [one for one in waiting if one["replica"] in replicas]  # a replica that has left is not waited for
    if not ours:
        return dict(model)
    first = ours[0]
    count = "1 replica waits" if len(ours) == 1 else f"{len(ours)} replicas wait"
    wanted, least = (f"{first[name] / GB:.2f} GB" for name in ("wanted_bytes", "least_bytes"))
    ranks = "" if first["ranks"] == 1 else f" on each of {first['ranks']} devices"
    message = f"{count} for {wanted} of memory{ranks} (at least {least}): {first['why']}"
    return {**model, "state": BLOCKED, "message": message}
