"""What the quota actor, Serve's controller and the store know of the whole deployment, as metrics without a router."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.core.batches import BatchWork, RowCounts
from serve_app.names import deployment_of
from serve_app.router.metrics.families import Families
from serve_app.router.metrics.table import ClusterFigure
from serve_app.store import StoreFigures

# Of an engine's lease (`core.memory.Phase`): what operators call its replica.
_STATES = {"reserved": "loading", "committed": "running", "ending": "ending"}
OTHER_MODEL = "other"  # clients write the names of models into the rows of batches
FIXED = "fixed"  # in place of a cause: the number of replicas does not follow the load


@dataclass(frozen=True, slots=True)
class ClusterAnswers:
    """What the parts of the deployment have answered; None: one has not.

    Args:
        quota: the quota actor's figures, as GET /admin/quota has them.
        store: its size and what it knows of batches.
        decisions: of scaling, by deployment: `wanted`, `target`, `cause`. Serve's controller has them.
        proxies: by node, the exposition of its HAProxy.
        keys: how many, by source and state.
        routers: how many the configuration wants.
    """

    quota: Mapping[str, Any] | None = None
    store: StoreFigures | None = None
    decisions: Mapping[str, Mapping[str, Any]] | None = None
    proxies: Mapping[str, str | None] | None = None
    keys: Mapping[tuple[str, str], int] | None = None
    routers: int | None = None


def cluster_families(answers: ClusterAnswers, models: Mapping[str, int | None], wall: float) -> Families:
    """The figures of memory, scaling, batches and keys.

    Args:
        models: those served now, by name: the number of replicas, None where it follows the load.
        wall: seconds since 1970.
    """
    families = Families(ClusterFigure)
    proxies = answers.proxies
    up = {
        "quota_actor": answers.quota is not None,
        "store": answers.store is not None,
        "controller": answers.decisions is not None,
        "haproxy": proxies is not None and None not in proxies.values(),
    }
    for part, is_up in up.items():
        families.add(ClusterFigure.UP, is_up, part)
    if answers.quota is not None:
        _add_memory(families, answers.quota)
        _add_replicas(families, answers.quota)
    _add_wanted(families, answers.decisions or {}, models)
    if answers.store is not None:
        _add_batches(families, answers.store.work, wall)
        _add_model_rows(families, answers.store.rows, models)
        families.add(ClusterFigure.STORE_BYTES, answers.store.bytes)
    for labels, count in (answers.keys or {}).items():
        families.add(ClusterFigure.KEYS, count, *labels)
    if answers.routers is not None:
        families.add(ClusterFigure.ROUTERS_WANTED, answers.routers)
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


def _add_wanted(
    families: Families, decisions: Mapping[str, Mapping[str, Any]], models: Mapping[str, int | None]
) -> None:
    for model, fixed in models.items():
        decision = decisions.get(deployment_of(model))
        if fixed is not None:
            decision = {"wanted": fixed, "target": fixed, "cause": FIXED}
        if decision is not None:
            families.add(ClusterFigure.REPLICAS_WANTED, decision["wanted"], model)
            families.add(ClusterFigure.REPLICAS_TARGET, decision["target"], model)
            families.add(ClusterFigure.REPLICAS_REASON, 1, model, decision["cause"])
            if "advised" in decision:
                families.add(ClusterFigure.REPLICAS_ADVISED, decision["advised"], model)


def _add_model_rows(families: Families, rows: Mapping[str, RowCounts], models: Collection[str]) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for model, counts in rows.items():
        name = model if model in models else OTHER_MODEL
        for state in ("waiting", "running", "completed", "failed"):
            found[name, state] += getattr(counts, state)
    for labels, count in found.items():
        families.add(ClusterFigure.BATCH_MODEL_ROWS, count, *labels)


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
