"""Ray's own state of its nodes, by interfaces that Serve's controller uses and Ray calls private."""

from __future__ import annotations

import functools

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]


def draining_nodes(timeout_s: float) -> dict[str, int]:
    """The nodes that drain, by a command, a spot notice or Ray's autoscaler: node id -> when it ends, in milliseconds
    since the epoch; 0: no deadline. Waits for the GCS and raises Ray's errors."""
    return _client(ray.get_runtime_context().gcs_address).get_draining_nodes(timeout=timeout_s)  # type: ignore[no-any-return]


@functools.cache
def _client(address: str) -> GcsClient:
    return GcsClient(address=address)
