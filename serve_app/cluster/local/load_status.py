"""What `status` says of a model's load and scaling: from the numbers Serve's controller has, by the policy's own rules.

The policy's averages and delays run in the controller and are not asked for: the figures here are the newest ones, and
a target that is about to change says after which delay it will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoscaling import RouterCounts, readings
from autoscaling.policies import Ongoing, Signals
from serve_app.names import ROUTER

FIXED = "a fixed number"
Told = Mapping[str, Mapping[str, Sequence[Any]]]  # deployment -> number -> a series of each replica that runs


def _raw(told: Told, deployment: str) -> readings.Raw:
    return {name: dict(enumerate(series)) for name, series in told.get(deployment, {}).items()}


def describe_load(deployment: Mapping[str, Any], told: Told) -> dict[str, Any]:
    """`ongoing` (requests on engine replicas), `waiting` (in the routers' lines), both None when nobody has told them,
    and `why` the target is what it is.

    Args:
        deployment: `DeploymentDetails` of an engine deployment, as a dictionary.
        told: the series that routers and engines have told the controller.
    """
    counts = readings.router_counts(_raw(told, ROUTER), lambda router: True).get(deployment["name"])
    executing = readings.executing(_raw(told, deployment["name"]), lambda replica: True)
    config = (deployment.get("deployment_config") or {}).get("autoscaling_config")
    known = {
        # so that both together are the load the policy sees: a request that has just been granted is in one of them
        "ongoing": None if counts is None else round(max(counts.granted, executing - counts.waiting)),
        "waiting": None if counts is None else round(counts.waiting),
    }
    if not config or config["min_replicas"] == config["max_replicas"]:
        return {**known, "why": FIXED}
    return {**known, "why": _why(deployment, config, counts or RouterCounts(), executing)}


def _why(deployment: Mapping[str, Any], config: Mapping[str, Any], counts: RouterCounts, executing: float) -> str:
    target = deployment["target_num_replicas"]
    signals = Signals(
        running=sum(getattr(one["state"], "value", one["state"]) == "RUNNING" for one in deployment["replicas"]),
        target=target,
        waiting=counts.waiting,
        granted=counts.granted,
        executing=executing,
        complete=True,
        rung=False,
        blocked=counts.blocked,
        min_replicas=config["min_replicas"],
        max_replicas=config["max_replicas"],
        target_ongoing=config["target_ongoing_requests"],
        look_back_s=config["look_back_period_s"],
        now=0.0,
    )
    wanted = Ongoing().decide(signals)
    if wanted.replicas > target:
        return f"{wanted.reason}; up after {config['upscale_delay_s']:g} s of that"
    if wanted.replicas < target:
        to_zero_s = config.get("downscale_to_zero_delay_s")
        delay_s = config["downscale_delay_s"] if target > 1 or to_zero_s is None else to_zero_s
        return f"{wanted.reason}; down after {delay_s:g} s of that"
    return wanted.reason
