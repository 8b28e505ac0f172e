"""Replicas of one queue alone, for queues without an actor: their pools belong to nobody else."""

from __future__ import annotations

from serve_app.core.pools import UNBOUNDED, RequestPool, TokenSpace
from serve_app.core.queue import Action, Admission


def set_replica(
    queue: Admission, replica_id: str, slots: int, now: float, kv_tokens: int | None = None
) -> list[Action]:
    """A replica has this size from now on, whatever runs on it; 0 slots: it drains. `kv_tokens`: None: not bounded."""
    known = queue.capacity.replicas.get(replica_id)
    pool = RequestPool(replica_id, TokenSpace(), slots) if known is None else known.pool
    pool.slots = slots
    pool.space.capacity = pool.space.limit = UNBOUNDED if kv_tokens is None else kv_tokens
    if queue.capacity.is_as_known(replica_id, pool, 0):
        return queue.on_returned(now)
    return queue.on_pool(replica_id, pool, now)
