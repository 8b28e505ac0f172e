"""What the quota actor knows of the models of an application, beside Serve's state (`status`): which replicas wait for
memory, how far starts and drains are, and why an engine that had started has died. Pure.

A replica that waits for memory is `STARTING` for Serve, and one that died is forgotten when another one starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoscaling.operations.status import replicas_wait
from serve_app.settings import GB

BLOCKED = "blocked: memory"
DRAINING = "DRAINING"  # beside Serve's states of a replica


def with_quota_figures(state: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """The state, with what the quota actor's figures say of its models: a starting replica has `start`
    (`serve_app.core.memory.StartReport`), one that drains the state `DRAINING` and `drain`; a waiting model has the
    state `blocked: memory`, one whose last engine has died a `cause`. The state's message names the waits, these causes
    and the replicas that use more than granted."""
    short = {one["model"]: one["why"] for one in figures["short"]}
    starts = {one["replica"]: one for one in figures.get("starting", ())}  # 0.2.0's actor, at an upgrade, tells none
    drains = {one["replica"]: one for one in figures.get("drains", ())}
    crashes = {one["model"]: one for one in figures.get("crash_loops", ())}
    failures = {one["model"]: one for one in figures.get("failures", ())}
    models = []
    waits = []
    deaths = []
    overuse = []
    for known in state["models"]:
        model = dict(known)
        model["replicas"] = [
            one
            | {"start": starts.get(one["id"])}
            | ({"state": DRAINING, "drain": drains[one["id"]]} if one["id"] in drains else {})
            for one in known["replicas"]
        ]
        replicas = {replica["id"] for replica in model["replicas"]}
        if model["name"] in short:
            model["why"] = f"{model['why']}; held back: {short[model['name']]}"
        # replicas that have ended do not count
        waiting = [one for one in figures["waiting"] if one["model"] == model["name"] and one["replica"] in replicas]
        if waiting:
            model |= {"state": BLOCKED, "message": _memory_wait(waiting)}
            waits.append(f"{model['deployment']}: {model['message']}")
        if (loop := crashes.get(model["name"])) is not None:
            waits.append(
                f"{model['deployment']}: {loop['crashes']} engines crashed soon after their start; "
                f"the next one waits {loop['pause_s']:.0f} s (serve-app logs {model['name']})"
            )
        if (failure := failures.get(model["name"])) is not None and not model.get("cause"):  # no failed start since
            model["cause"] = f"an engine failed {failure['ago_s']:.0f} s ago: {failure['why']}"
            deaths.append(f"{model['deployment']}: {model['cause']}")
        overuse += [
            f"{model['deployment']}: {one['replica']} uses {one['measured_bytes'] / GB:.2f} GB of "
            f"{one['granted_bytes'] / GB:.2f} GB granted"
            + ("; it drains" if one["replica"] in figures["draining"] else "")
            for one in figures["alarms"]
            if one["replica"] in replicas
        ]
        models.append(model)
    if waits:  # which do not say why the replica before has failed
        waits += [f"{one['deployment']}: {one['cause']}" for one in state["models"] if one.get("cause")]
    messages = [*(waits or [state["message"]]), *deaths, *overuse]
    return {**state, "message": "; ".join(filter(None, messages)), "models": models}


def _memory_wait(waiting: Sequence[Mapping[str, Any]]) -> str:
    first = waiting[0]
    wanted, least = (f"{first[name] / GB:.2f} GB" for name in ("wanted_bytes", "least_bytes"))
    ranks = "" if first["ranks"] == 1 else f" on each of {first['ranks']} devices"
    return f"{replicas_wait(len(waiting))} for {wanted} of memory{ranks} (at least {least}): {first['why']}"
