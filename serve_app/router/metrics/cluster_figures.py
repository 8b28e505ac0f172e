"""What the quota actor and the store know of the whole deployment, as metrics without a router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.core.batches import BatchWork
from serve_app.router.metrics.families import Families
from serve_app.router.metrics.table import ClusterFigure

# Of an engine's lease (`core.memory.Phase`): what operators call its replica.
_STATES = {"reserved": "loading", "committed": "running", "ending": "ending"}


def cluster_families(figures: Mapping[str, Any] | None, work: Sequence[BatchWork] | None, wall: float) -> Families:
    """The figures of memory and of batches.

    Args:
        figures: the quota actor's, as GET /admin/quota has them; None: it does not answer.
        work: the batches that have not ended, the oldest first; None: the store does not answer.
        wall: seconds since 1970.
    """
    families = Families(ClusterFigure)
    families.add(ClusterFigure.UP, figures is not None, "quota_actor")
    families.add(ClusterFigure.UP, work is not None, "store")
    if figures is not None:
        _add_memory(families, figures)
        _add_replicas(families, figures)
    if work is not None:
        _add_batches(families, work, wall)
    return families


def _add_memory(families: Families, figures: Mapping[str, Any]) -> None:
    for device in figures["devices"]:
        for kind in ("reserved", "granted", "free"):
            families.add(ClusterFigure.GPU_MEMORY, device[f"{kind}_bytes"], device["node"], device["device"], kind)
    for engine in figures["engines"]:
        labels = (engine["model"] or "", engine["replica"])
        families.add(ClusterFigure.REPLICA_MEMORY, engine["granted_bytes"], *labels, "granted")
        if engine["measured_bytes"] is not None:
            families.add(ClusterFigure.REPLICA_MEMORY, engine["measured_bytes"], *labels, "measured")
        tokens = {
            "used": engine["kv_tokens_used"],
            "sessions": engine["kv_tokens_sessions"],
            "free": engine["kv_tokens_free"],
            "total": engine["kv_tokens"],
        }
        for kind, count in tokens.items():
            families.add(ClusterFigure.KV_TOKENS, count, *labels, kind)
        if engine["kv_tokens"]:
            families.add(ClusterFigure.KV_USED_RATIO, engine["kv_tokens_used"] / engine["kv_tokens"], *labels)


def _add_replicas(families: Families, figures: Mapping[str, Any]) -> None:
    draining = set(figures["draining"])
    found = Counter(
        (engine["model"] or "", "draining" if engine["replica"] in draining else _STATES[engine["state"]])
        for engine in figures["engines"]
    )
    found.update((engine["model"], "blocked") for engine in figures["waiting"])
    for labels, count in found.items():
        families.add(ClusterFigure.REPLICAS, count, *labels)
    for model in figures["short"]:
        families.add(ClusterFigure.REPLICAS_SHORT, 1, model["model"])
    sessions = Counter((session["model"], "open") for session in figures["sessions"])
    sessions.update((session["model"], "waiting") for session in figures["sessions_waiting"])
    for labels, count in sessions.items():
        families.add(ClusterFigure.SESSIONS, count, *labels)


def _add_batches(families: Families, work: Sequence[BatchWork], wall: float) -> None:
    rows = {
        "waiting": sum(sum(one.waiting.values()) for one in work),
        "running": sum(one.running for one in work),
        "completed": sum(one.batch.completed for one in work),
        "failed": sum(one.batch.failed for one in work),
    }
    for state, count in rows.items():
        families.add(ClusterFigure.BATCH_ROWS, count, state)
    for status, count in Counter(one.batch.status.value for one in work).items():
        families.add(ClusterFigure.BATCHES, count, status)
    oldest_s = wall - work[0].batch.created_at if work else 0.0
    families.add(ClusterFigure.OLDEST_BATCH, max(0.0, oldest_s))
