"""What `serve-app drain NAME` means: an engine replica, by the beginning of its id, or a node, by its address, host
name or the beginning of its id. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoscaling.operations.status import deployments_of
from serve_app.errors import BadRequest, NotFound
from serve_app.names import ENGINE_PREFIX

HEAD_RESOURCE = "node:__internal_head__"  # a resource that only Ray's head has
NEAR = 0.6  # difflib's own cutoff
SHOWN = 5  # names that a message has


@dataclass(frozen=True, slots=True)
class DrainTarget:
    """A replica or a node (`is_node`), by its whole id."""

    target_id: str
    is_node: bool


def find(name: str, details: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> DrainTarget:
    """What the name stands for.

    Args:
        details: Serve's details as a dictionary.
        nodes: as of `ray.nodes()`.

    Raises:
        NotFound: nothing is called so; the message has names that are near. BadRequest: several are, or it is the head
            or no engine.
    """
    deployments = deployments_of(details)
    owners = {replica["replica_id"]: name for name, one in deployments.items() for replica in one["replicas"]}
    alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
    replicas = [one for one in owners if one.startswith(name)]
    found = [one for one in alive if one.startswith(name) or name in _names(alive[one])]
    if len(replicas) + len(found) > 1:
        raise BadRequest(f"{name}: several are called so: {', '.join([*replicas, *found][:SHOWN])}", param="name")
    if replicas:
        if not owners[replicas[0]].startswith(ENGINE_PREFIX):
            raise BadRequest(f"{name}: {replicas[0]} is of {owners[replicas[0]]}: only engines drain", param="name")
        return DrainTarget(replicas[0], is_node=False)
    if found:
        if HEAD_RESOURCE in alive[found[0]]["Resources"]:
            raise BadRequest(f"{name}: the head cannot be drained; `serve-app drain REPLICA` can", param="name")
        return DrainTarget(found[0], is_node=True)
    known = [one for one in owners if owners[one].startswith(ENGINE_PREFIX)]
    known += [one for node in alive.values() if HEAD_RESOURCE not in node["Resources"] for one in _names(node)]
    near = difflib.get_close_matches(name, known, n=SHOWN, cutoff=NEAR) or sorted(set(known))[:SHOWN]
    raise NotFound(f"{name}: no replica or node is called so; there are {', '.join(near) or 'none'}", param="name")


def _names(node: Mapping[str, Any]) -> list[str]:
    return sorted({node["NodeManagerAddress"], node["NodeManagerHostname"]})
