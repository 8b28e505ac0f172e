"""Begins drains and looks how far they are, by Ray: in a driver of the cluster or a router."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from autoscaling.operations import application, status
from autoscaling.operations.drain_target import DrainTarget
from autoscaling.operations.draining import DrainLook
from serve_app.core.memory import DrainRequest
from serve_app.core.times import MOVE_S
from serve_app.errors import Unavailable
from serve_app.names import ENGINE_PREFIX

# Until replicas of a draining node end without a replacement: a model loads within that time from a local cache.
REPLACE_S = 120.0


class RayDrains:
    """The drains of the running application, see `draining.DrainControl`."""

    def drain_replica(self, replica: str, within_s: float | None) -> None:
        application.ask_quota("exchange", DrainRequest(replica, within_s))

    def drain_node(self, node_id: str, within_s: float | None) -> float:
        found = application.details(application.ANSWER_S)
        limit_s = REPLACE_S + status.longest_drain_s(found, node_id) if within_s is None else within_s + MOVE_S
        application.announce_end(node_id, limit_s)
        return limit_s

    def look(self, target: DrainTarget) -> DrainLook:
        rows: list[dict[str, Any]] | None = None
        is_recovering = False
        with contextlib.suppress(Unavailable):  # the actor starts anew
            figures = application.ask_quota("figures")
            rows = figures["drains"]
            is_recovering = figures["recovering"]
        try:
            found = application.details(application.ANSWER_S)
        except Unavailable:  # Serve's controller starts anew, or stands still
            return DrainLook(rows, is_recovering)
        engines = _engines_of(found, target)
        if not target.is_node:
            return DrainLook(rows, is_recovering, engines)
        left = status.replicas_on(found, target.target_id)
        return DrainLook(rows, is_recovering, engines, left, target.target_id in found["proxies"])


def _engines_of(details: Mapping[str, Any], target: DrainTarget) -> dict[str, str]:
    """The engine replica, or those on the node, as far as Serve counts them, and its state of each."""
    wanted = "node_id" if target.is_node else "replica_id"
    return {
        replica["replica_id"]: status.enum_value(replica["state"])
        for name, one in status.deployments_of(details).items()
        if name.startswith(ENGINE_PREFIX)
        for replica in one["replicas"]
        if replica.get(wanted) == target.target_id
    }
