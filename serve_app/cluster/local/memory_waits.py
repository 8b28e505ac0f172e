"""Adds memory shortage to `serve-app status`: models with replicas that wait for GPU memory, that cannot scale up for
lack of it, or that use more than they were granted. Pure.

driver.py asks the quota actor. Serve's state of a replica that waits for memory is `STARTING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.cluster.local.pending_reasons import replicas_wait

BLOCKED = "blocked: memory"
GB = 1e9


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
