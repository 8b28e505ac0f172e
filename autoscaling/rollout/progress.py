"""Which deployments a deploy waits for, and until when, from Serve's details. Pure: deployment.py asks Serve.

Serve calls a deployment updated once it has as many replicas as its load wants. Under load, and without room for
another replica, that is never. A deploy has to see that the least number of replicas runs with the new settings.

Invariant: a replica with the old settings is waited for until it has ended; a replica that only the load wants, never.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoscaling.operations import status
from serve_app.settings import changes


@dataclass(frozen=True, slots=True)
class Rollout:
    """One deploy.

    Args:
        others: deployments that it does not wait for: they were not ready before, and their settings do not change.
        outdated: ids of the replicas that it replaces, by deployment.
    """

    others: frozenset[str]
    outdated: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """How far a deploy is.

    Args:
        waits: the deployments that it waits for, with Serve's state of each; `endpoint`: HAProxy.
        more: deployments that serve with the new settings while their load wants more replicas: `2 of 3`.
    """

    waits: Mapping[str, str]
    more: Mapping[str, str]

    @property
    def failed(self) -> bool:
        return status.FAILED in self.waits.values()


def begun(entry: Mapping[str, Any], before: Mapping[str, Any], *, on_cpu: bool) -> Rollout:
    """The deploy of `entry`; one that changes nothing waits for all.

    Args:
        before: Serve's details from before.
        on_cpu: by vLLM's CPU build, see `engine_version`.
    """
    planned = changes((status.declared(before) or {}).get("args"), entry["args"], on_cpu=on_cpu)
    changed = {one.deployment for one in planned if one.effect not in ("unchanged", "removed")}
    restarted = {one.deployment for one in planned if one.effect == "restarted"}
    others = set(status.unready(before)) - changed - {status.ENDPOINT} if changed else set()
    outdated = {
        name: frozenset(replica["replica_id"] for replica in one["replicas"])
        for name, one in status.deployments_of(before).items()
        if name in restarted
    }
    return Rollout(frozenset(others), outdated)


def state_of(rollout: Rollout, details: Mapping[str, Any]) -> RolloutState:
    """How far the deploy is, by Serve's present details."""
    found = status.deployments_of(details)
    not_ready = {name: state for name, state in status.unready(details).items() if name not in rollout.others}
    replacing = {
        name: status.enum_value(found[name]["status"]).lower()
        for name, ids in rollout.outdated.items()
        if name in found and ids & {replica["replica_id"] for replica in found[name]["replicas"]}
    }
    serving = {name for name in not_ready if name in found and name not in replacing and _serves(found[name])}
    waits = {name: state for name, state in (not_ready | replacing).items() if name not in serving}
    return RolloutState(waits, {name: _count(found[name]) for name in sorted(serving)})


def _serves(deployment: Mapping[str, Any]) -> bool:
    """Whether its least number of replicas runs, and its load wants more."""
    scaling = deployment["deployment_config"].get("autoscaling_config")
    if not scaling or status.enum_value(deployment["status"]) in status.IN_TROUBLE:
        return False
    least = max(scaling["min_replicas"], scaling.get("initial_replicas") or 0, 1)
    return status.running_replicas(deployment) >= least and bool(deployment["target_num_replicas"] > least)


def _count(deployment: Mapping[str, Any]) -> str:
    return f"{status.running_replicas(deployment)} of {deployment['target_num_replicas']}"
