"""The figures of a router's models, read at a scrape from the objects that count them."""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.core.queue import RefusalReason
from serve_app.names import versions
from serve_app.router.metrics.families import Families
from serve_app.router.metrics.table import Figure
from serve_app.router.model_router import ModelRouter


def model_families(models: Iterable[ModelRouter]) -> Families:
    """The present figures of these models."""
    families = Families(Figure)
    running = versions()
    families.add(Figure.BUILD_INFO, 1, running["version"], running.get("vllm", ""))
    models = list(models)
    for model in models:
        _add_queue(families, model)
        _add_replicas(families, model)
    if models:  # what all models of a router share
        first = models[0]
        families.add(Figure.UNREAD_BYTES, first.unread.bytes)
        families.add(Figure.SLOW_CLIENTS, first.unread.ended_requests)
        families.add(Figure.OLD_UNREAD_ENDED, first.unread.ended_requests)
        for node, share in first.queue.fragmentation:
            families.add(Figure.GPU_FRAGMENTATION, share, node)
    return families


def _add_queue(families: Families, model: ModelRouter) -> None:
    name = model.settings.name
    queue = model.queue
    families.add(Figure.BLOCKED, queue.blocked, name, "memory")
    for request_class, count in queue.core.pending.count_by_class(name).items():
        families.add(Figure.WAITING, count, name, request_class.label)
    if queue.fill_ratio is not None:
        families.add(Figure.WAITING_RATIO, queue.fill_ratio, name)
    for reason in RefusalReason:
        families.add(Figure.OLD_REFUSED, queue.refused[reason], name, reason.value)
    for (key, place), count in model.placed.items():
        families.add(Figure.PLACEMENTS, count, name, key, place)
        families.add(Figure.OLD_PLACED, count, name, key, place)


def _add_replicas(families: Families, model: ModelRouter) -> None:
    name = model.settings.name
    replicas = model.replica_set
    for replica in sorted(replicas.running):
        used, account = model.queue.core.account(replica)
        families.add(Figure.SLOTS, used, name, replica, "granted")
        families.add(Figure.SLOTS, account.slots, name, replica, "booked")
        families.add(Figure.SLOTS, replicas.slots[replica], name, replica, "total")
    families.add(Figure.EJECTED, replicas.ejected_count, name)
    for reason, count in replicas.ejections.items():
        families.add(Figure.REPLICA_EJECTIONS, count, name, reason.value)
        families.add(Figure.OLD_EJECTIONS, count, name, reason.value)
