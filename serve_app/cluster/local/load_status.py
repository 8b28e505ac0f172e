"""A model's load and scaling for `status`: from the numbers of Serve's controller, by the rules of the policy.

The policy's averages and delays are inside the controller and not fetched: the figures here are the newest ones, and
the reason of a target that is about to change names the delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoscaling import RouterCounts, readings
from autoscaling.policies import OngoingRequestsPolicy, Signals
from serve_app.names import ROUTER

FIXED = "a fixed number"
ReportedSeries = Mapping[str, Mapping[str, Sequence[Any]]]  # deployment -> metric -> a series of each running replica


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
    executing = readings.executing(_raw(reported, deployment["name"]), lambda replica: True)
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
        running=sum(getattr(one["state"], "value", one["state"]) == "RUNNING" for one in deployment["replicas"]),
        target=target,
        waiting=counts.waiting,
        granted=counts.granted,
        executing=executing,
        complete=True,
        cold_start_requested=False,
        blocked=counts.blocked,
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
