"""The present state of a queue in figures.

Invariant: the size of a snapshot does not depend on the numbers of requests and tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass

from serve_app.core.queue.events import RefusalReason
from serve_app.core.queue.scheduler import Scheduler
from serve_app.core.queue.wait_forecast import WaitForecast
from serve_app.types import RequestClass

TENANTS_SHOWN = 50  # by name in a snapshot: each is a label of several metrics
OTHER_TENANTS = "(other)"  # no tenant's name has brackets


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


def snapshot(scheduler: Scheduler, forecast: WaitForecast, refused: Counter[RefusalReason], now: float) -> Snapshot:
    """The present state. O(replicas + waiting requests + tenants log tenants)."""
    return Snapshot(
        oldest_wait_s=max((now - waiting.arrived_s for waiting in scheduler.queue.by_id.values()), default=0.0),
        drain_slots_per_s=forecast.slots_per_s(max(RequestClass)),  # no class is above it
        refused={reason.value: refused[reason] for reason in RefusalReason},
        classes={
            level.label: ClassFigures(
                one.size, one.tokens, one.granted, one.granted_tokens, forecast.slots_per_s(level)
            )
            for level, one in zip(RequestClass, scheduler.queue.class_queues, strict=True)
        },
        tenants=_tenant_figures(scheduler),
    )


def _tenant_figures(scheduler: Scheduler) -> dict[str, TenantFigures]:
    """Every tenant with a waiting or running request or a share; those beyond `TENANTS_SHOWN` in one sum."""
    waiting = dict.fromkeys(scheduler.shares.keys() | scheduler.use.keys(), (0, 0))  # requests and their tokens
    for class_queue in scheduler.queue.class_queues:
        for tenant_queue in class_queue.waiting_tenants():
            count, cost = waiting.get(tenant_queue.tenant, (0, 0))
            cost += sum(queued.cost for _, _, queued in tenant_queue.order)
            waiting[tenant_queue.tenant] = count + len(tenant_queue.order), cost
    every = {
        name: TenantFigures(*sums, *scheduler.use.get(name, (0, 0)), scheduler.is_below_share(name))
        for name, sums in waiting.items()
    }
    ordered = sorted(every, key=lambda name: (-every[name].slots - every[name].waiting, name))
    shown = {name: every[name] for name in ordered[:TENANTS_SHOWN]}
    if len(ordered) > TENANTS_SHOWN:
        rest = (astuple(every[name]) for name in ordered[TENANTS_SHOWN:])
        requests, tokens, slots, kv_tokens, below_share = zip(*rest, strict=True)
        shown[OTHER_TENANTS] = TenantFigures(sum(requests), sum(tokens), sum(slots), sum(kv_tokens), any(below_share))
    return shown
