"""What a line counts of itself, and its present state in figures.

Invariant: the counters only grow, and take no memory per request or tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_app.core.queue.events import OTHER_TENANTS, TENANTS_SHOWN, ClassFigures, Reason, Snapshot, TenantFigures
from serve_app.core.queue.queue import Line
from serve_app.core.queue.scheduler import Running
from serve_app.core.queue.wait_forecast import Forecast
from serve_app.types import RequestClass


@dataclass(slots=True, eq=False)
class Tally:
    """How requests ended, since the line was made."""

    arrived: int = 0
    granted: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    granted_tokens: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    refused: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    cancelled_waiting: int = 0
    cancelled_running: int = 0
    done: int = 0
    done_tokens: int = 0


def snapshot(running: Running, forecast: Forecast, tally: Tally, now: float) -> Snapshot:
    """The present state. O(replicas + tenants log tenants)."""
    line, oldest = running.line, running.line.oldest()
    return Snapshot(
        waiting={level.label: count for level, count in line.claimed.items()},
        waiting_tokens=line.tokens,
        oldest_wait_s=0.0 if oldest is None else now - oldest.arrived_s,
        replicas=dict(running.capacity.use()),
        arrived=tally.arrived,
        granted={level.label: count for level, count in tally.granted.items()},
        refused={reason.value: count for reason, count in tally.refused.items()},
        cancelled_waiting=tally.cancelled_waiting,
        cancelled_running=tally.cancelled_running,
        done=tally.done,
        done_tokens=tally.done_tokens,
        drain_slots_per_s=forecast.slots_per_s(),
        classes={level.label: _class_figures(level, line, forecast, tally) for level in RequestClass},
        tenants=_tenant_figures(running),
    )


def _class_figures(level: RequestClass, line: Line, forecast: Forecast, tally: Tally) -> ClassFigures:
    return ClassFigures(
        line.claimed[level], line.claimed_tokens[level], tally.granted_tokens[level], forecast.slots_per_s(level)
    )


def _tenant_figures(running: Running) -> dict[str, TenantFigures]:
    """Every tenant who waits or runs, and who has a share; beyond `TENANTS_SHOWN` in one sum."""
    sums: dict[str, tuple[int, int]] = {}
    for level in running.line.stages:
        for lane in level.active():
            waiting, tokens = sums.get(lane.tenant, (0, 0))
            sums[lane.tenant] = waiting + len(lane.waiting), tokens + lane.tokens
    names = sums.keys() | set(running.guarantees.tenants())
    every = {
        name: TenantFigures(waiting, tokens, *running.guarantees.used(name), running.below_share(name))
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
