"""Who uses a cluster beside this application: other applications of Serve, and the holders of CPUs and GPUs. Pure.

Invariant: the amounts of all holders add up to what Ray counts as used; what no actor or placement group accounts for
is shown as held by tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from serve_app.names import APPLICATION

COUNTED = ("CPU", "GPU")
REPLICA_PREFIX = "SERVE_REPLICA::"  # of a replica's actor and of its placement group
LEAST = 0.001  # Ray counts in steps of 0.0001; sums of shares are not exact


def other_applications(details: Mapping[str, Any]) -> list[dict[str, str]]:
    """Name, state and route of Serve's applications that are not ours; `details`: Serve's details as a dictionary."""
    return [
        {
            "name": name,
            "state": str(getattr(one["status"], "value", one["status"])).lower(),
            "route": one.get("route_prefix") or "",
        }
        for name, one in sorted(details["applications"].items())
        if name != APPLICATION
    ]


def usage(
    actors: Iterable[Any],
    groups: Iterable[Mapping[str, Any]],
    total: Mapping[str, float],
    available: Mapping[str, float],
) -> dict[str, Any]:
    """`resources`: used and total amounts of CPUs and GPUs. `holders`: kind, owner, CPU and GPU, largest first.

    Args:
        actors: entries of Ray's table of actors: the living ones that hold resources outside of placement groups.
        groups: entries of Ray's placement group table.
        total, available: of the cluster, as Ray counts them.
    """
    held: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0.0))

    def add(owner: tuple[str, str], resources: Mapping[str, float]) -> None:
        for name in COUNTED:
            held[owner][name] += resources.get(name, 0.0)

    for group in groups:
        if group["state"] == "CREATED":
            name = group["name"] or group["placement_group_id"]
            for bundle in group["bundles"].values():
                add(_owner_of_replica(name) or ("placement group", name), bundle)
    for actor in actors:
        named = f"{actor.name or actor.class_name} (job {actor.job_id.hex()}, namespace {actor.ray_namespace})"
        add(_owner_of_replica(actor.name) or ("actor", named), actor.required_resources)
    used = {name: total.get(name, 0.0) - available.get(name, 0.0) for name in COUNTED}
    add(("tasks", "tasks"), {name: used[name] - sum(one[name] for one in held.values()) for name in COUNTED})
    holders = [
        {"kind": kind, "owner": owner, **{name: round(amount, 3) for name, amount in amounts.items()}}
        for (kind, owner), amounts in held.items()
        if any(amount >= LEAST for amount in amounts.values())
    ]
    return {
        "resources": {name: {"used": round(used[name], 3), "total": total.get(name, 0.0)} for name in COUNTED},
        "holders": sorted(holders, key=lambda holder: (-holder["GPU"], -holder["CPU"], holder["owner"])),
    }


def _owner_of_replica(name: str) -> tuple[str, str] | None:
    """Kind and owner of a Serve replica, by its name `SERVE_REPLICA::application#deployment#id`; None: it is none."""
    if not name.startswith(REPLICA_PREFIX):
        return None
    application, _, rest = name.removeprefix(REPLICA_PREFIX).partition("#")
    deployment = rest.rpartition("#")[0]
    if application == APPLICATION:
        return "ours", deployment
    return "other application", f"{application}, {deployment}"
