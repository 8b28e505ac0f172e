"""Ray's own state of its nodes, by interfaces that Serve's controller uses and Ray calls private.

Each call waits for the GCS, for `timeout_s` at most, and raises Ray's errors; the public ones have no bound.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]


def draining_nodes(timeout_s: float) -> dict[str, int]:
    """The nodes that drain, by a command, a spot notice or Ray's autoscaler: node id -> when it ends, in milliseconds
    since the epoch; 0: no deadline."""
    return _gcs().get_draining_nodes(timeout=timeout_s)  # type: ignore[no-any-return]


def live_nodes(timeout_s: float) -> dict[str, dict[str, float]]:
    """The resources of each node that is alive, by node id."""
    found = _gcs().get_all_node_info(timeout=timeout_s, state_filter=GcsNodeInfo.ALIVE)
    return {node.hex(): dict(info.resources_total) for node, info in found.items()}


def session_folder() -> Path | None:
    """The folder of Ray's session on this node; None: Ray does not run in this process."""
    if not ray.is_initialized():
        return None
    here = ray.get_runtime_context()
    return Path(here.get_temp_dir(), here.get_session_name())


def _gcs() -> GcsClient:
    return _client(ray.get_runtime_context().gcs_address)


@functools.cache
def _client(address: str) -> GcsClient:
    return GcsClient(address=address)
