"""The counters of a queue, and its present state in figures.

Invariant: the counters only grow; their memory does not depend on the numbers of requests and tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.core.queue.events import RefusalReason
from serve_app.core.queue.scheduler import Scheduler
from serve_app.core.queue.wait_forecast import WaitForecast
from serve_app.types import RequestClass

TENANTS_SHOWN = 50  # by name in a snapshot: each is a label of several metrics
OTHER_TENANTS = "(other)"  # no tenant's name has brackets


@dataclass(slots=True, eq=False)
class QueueCounters:
    """Outcomes of requests since the queue was created."""

    granted: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    granted_tokens: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(RefusalReason, 0))


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class. What was granted only grows; `drain_slots_per_s` is what higher classes leave to this class."""

    waiting: int
    waiting_tokens: int
    granted: int
    granted_tokens: int
    drain_slots_per_s: float | None


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant now. `below_share`: it uses less than its guaranteed share, so it is served first in its class."""

    waiting: int
    waiting_tokens: int
    slots: int
    kv_tokens: int
    below_share: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state in figures. Classes by label, reasons by value.

    `tenants` names the tenants with most slots and waiting requests, at most `TENANTS_SHOWN`; the others are summed as
    `OTHER_TENANTS`.
    """

    oldest_wait_s: float
    drain_slots_per_s: float | None
    refused: Mapping[str, int]
    classes: Mapping[str, ClassFigures]
    tenants: Mapping[str, TenantFigures]


def snapshot(scheduler: Scheduler, forecast: WaitForecast, counters: QueueCounters, now: float) -> Snapshot:
    """The present state. O(replicas + tenants log tenants)."""
    queue, oldest = scheduler.queue, scheduler.queue.oldest()
    classes = {
        level.label: ClassFigures(
            queue.class_queues[level].size,
            queue.class_queues[level].tokens,
            counters.granted[level],
            counters.granted_tokens[level],
            forecast.slots_per_s(level),
        )
        for level in RequestClass
    }
    return Snapshot(
        oldest_wait_s=0.0 if oldest is None else now - oldest.arrived_s,
        drain_slots_per_s=forecast.slots_per_s(max(RequestClass)),  # no class is above it
        refused={reason.value: count for reason, count in counters.refused.items()},
        classes=classes,
        tenants=_tenant_figures(scheduler),
    )


def _tenant_figures(scheduler: Scheduler) -> dict[str, TenantFigures]:
    """Every tenant with a waiting or running request or a share; those beyond `TENANTS_SHOWN` in one sum."""
    waiting = dict.fromkeys(scheduler.tenants(), (0, 0))  # requests and their tokens
    for class_queue in scheduler.queue.class_queues:
        for tenant_queue in class_queue.waiting_tenants():
            requests, tokens = waiting.get(tenant_queue.tenant, (0, 0))
            waiting[tenant_queue.tenant] = requests + len(tenant_queue.order), tokens + tenant_queue.tokens
    every = {
        name: TenantFigures(*sums, *scheduler.use.get(name, (0, 0)), scheduler.is_below_share(name))
        for name, sums in waiting.items()
    }
    ordered = sorted(every, key=lambda name: (-every[name].slots - every[name].waiting, name))
    shown = {name: every[name] for name in ordered[:TENANTS_SHOWN]}
    rest = [every[name] for name in ordered[TENANTS_SHOWN:]]
    if rest:
        shown[OTHER_TENANTS] = TenantFigures(
            sum(one.waiting for one in rest),
            sum(one.waiting_tokens for one in rest),
            sum(one.slots for one in rest),
            sum(one.kv_tokens for one in rest),
            any(one.below_share for one in rest),
        )
    return shown
