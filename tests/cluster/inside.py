"""What a driver on the head sees of its cluster, one JSON object a line whenever it changes; ends with its input.

{"at": Unix time, "state": of the application, "nodes": {address: [alive ids]}, "dead": [ids],
 "replicas": {deployment: [[id, state, node address]]}, "groups": [[node address of each bundle]]}
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from typing import Any

import ray
from ray.util import placement_group_table

from autoscaling.operations import application
from serve_app.names import NAMESPACE

LOOK_S = 0.5  # a look costs the controller some milliseconds


def look() -> dict[str, Any]:
    known = ray.nodes()  # type: ignore[no-untyped-call]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in known}
    status = application.application_status([])
    groups_of_replicas = {found["deployment"]: found["replicas"] for found in status["models"]}
    replicas = {
        name: sorted([one["id"], one["state"], address.get(one["node"], "")] for one in group)
        for name, group in [*groups_of_replicas.items(), ("routers", status["routers"])]
    }
    groups = [
        [address.get(node, "") for _, node in sorted(group["bundles_to_node_id"].items())]
        for group in placement_group_table().values()
        if group["state"] == "CREATED"
    ]
    nodes: dict[str, list[str]] = {}
    for node in known:
        if node["Alive"]:
            nodes.setdefault(node["NodeManagerAddress"], []).append(node["NodeID"])
    return {
        "state": status["state"],
        "nodes": nodes,
        "dead": sorted(node["NodeID"] for node in known if not node["Alive"]),
        "replicas": replicas,
        "groups": sorted(groups),
    }


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray's own words go between nobody's lines
    ray.init(namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    last: dict[str, Any] = {}
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        seen = look()
        if seen != last:
            print(json.dumps({"at": time.time(), **seen}), file=answers, flush=True)
            last = seen
    ray.shutdown()


if __name__ == "__main__":
    main()
