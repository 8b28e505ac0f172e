"""The counters of a queue, and its present state in figures.

Invariant: the counters only grow; their memory does not depend on the numbers of requests and tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.queue.events import (
    OTHER_TENANTS,
    TENANTS_SHOWN,
    ClassFigures,
    RefusalReason,
    Snapshot,
    TenantFigures,
)
from serve_app.core.queue.queue import RequestQueue
from serve_app.core.queue.scheduler import Scheduler
from serve_app.core.queue.wait_forecast import WaitForecast
from serve_app.types import RequestClass


@dataclass(slots=True, eq=False)
class QueueCounters:
    """Outcomes of requests since the queue was created."""

    arrived: int = 0
    granted: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    granted_tokens: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(RefusalReason, 0))
    cancelled_waiting: int = 0
    cancelled_running: int = 0
    done: int = 0
    done_tokens: int = 0


def snapshot(scheduler: Scheduler, forecast: WaitForecast, counters: QueueCounters, now: float) -> Snapshot:
    """The present state. O(replicas + tenants log tenants)."""
    line, oldest = scheduler.queue, scheduler.queue.oldest()
    return Snapshot(
        waiting={level.label: count for level, count in line.count_by_class.items()},
        waiting_tokens=line.tokens,
        oldest_wait_s=0.0 if oldest is None else now - oldest.arrived_s,
        replicas=dict(scheduler.capacity.snapshot()),
        arrived=counters.arrived,
        granted={level.label: count for level, count in counters.granted.items()},
        refused={reason.value: count for reason, count in counters.refused.items()},
        cancelled_waiting=counters.cancelled_waiting,
        cancelled_running=counters.cancelled_running,
        done=counters.done,
        done_tokens=counters.done_tokens,
        drain_slots_per_s=forecast.slots_per_s(),
        classes={level.label: _class_figures(level, line, forecast, counters) for level in RequestClass},
        tenants=_tenant_figures(scheduler),
    )


def _class_figures(
    request_class: RequestClass, queue: RequestQueue, forecast: WaitForecast, counters: QueueCounters
) -> ClassFigures:
    return ClassFigures(
        queue.count_by_class[request_class],
        queue.tokens_by_class[request_class],
        counters.granted_tokens[request_class],
        forecast.slots_per_s(request_class),
    )


def _tenant_figures(scheduler: Scheduler) -> dict[str, TenantFigures]:
    """Every tenant with a waiting or running request or a share; those beyond `TENANTS_SHOWN` in one sum."""
    sums: dict[str, tuple[int, int]] = {}
    for level in scheduler.queue.class_queues:
        for tenant_queue in level.waiting_tenants():
            waiting, tokens = sums.get(tenant_queue.tenant, (0, 0))
            sums[tenant_queue.tenant] = waiting + len(tenant_queue.requests), tokens + tenant_queue.tokens
    names = sums.keys() | set(scheduler.guaranteed_shares.tenants())
    every = {
        name: TenantFigures(waiting, tokens, *scheduler.guaranteed_shares.in_use(name), scheduler.is_below_share(name))
        for name in names
        for waiting, tokens in [sums.get(name, (0, 0))]
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
