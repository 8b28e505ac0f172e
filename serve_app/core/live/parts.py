"""What each source knows now: the quota actor, one router, the configuration. Values that cross processes.

Invariant: a part has at most `TENANTS_NAMED` tenants of a model, and those that were asked for; all others are one sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve_app.core.messages import message

TENANTS_NAMED = 50  # of a model: more rows than anybody reads, and some 10 kB of an object

# Ended requests and output tokens so far, by model and tenant; the tenant None: of all.
Counts = Mapping[tuple[str, str | None], tuple[int, int]]


class Wait(NamedTuple):
    """A request that waits now: its class's label, and the reason as `WaitReason` has it."""

    request_class: str
    tenant: str
    waited_s: float
    reason: str


@message
@dataclass(frozen=True, slots=True)
class WaitingRow:
    """Requests of one tenant in one class of a model. `tenant`: None: of all that have no row of their own, a name that
    no tenant can have."""

    model: str
    request_class: str
    tenant: str | None
    waiting: int
    oldest_s: float
    reasons: Mapping[str, int]


@message
@dataclass(frozen=True, slots=True)
class QuotaPart:
    """What the quota actor knows.

    Args:
        figures: as of `serve_app.quota.report.figures`.
        rows: of its queues. waiting: requests there, by model.
        sessions: open sessions as plain values, each with its `tenant`.
    """

    figures: Mapping[str, Any]
    rows: tuple[WaitingRow, ...] = ()
    waiting: Mapping[str, int] = field(default_factory=dict)
    sessions: tuple[Mapping[str, Any], ...] = ()


@message
@dataclass(frozen=True, slots=True)
class RouterPart:
    """What one router knows.

    Args:
        router: its id. at: seconds of its monotonic clock.
        waiting: its waiting requests by model, those that are in no queue among them. running: replicas by model.
        slots: used by its requests, and all, by replica. kv_used: KV tokens that its requests hold, by replica.
        ejected: replicas that get none of its requests, or on probation one at a time.
        rows: its waiting requests, while the quota actor does not answer it.
    """

    router: str
    at: float
    waiting: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ejected: tuple[str, ...] = ()
    counts: Counts = field(default_factory=dict)
    rows: tuple[WaitingRow, ...] = ()
    kv_used: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """What the configuration says of a model. waiting_bound: requests that may wait. scales_to_zero: it may have no
    replica."""

    waiting_bound: int
    scales_to_zero: bool = False


def waiting_rows(model: str, waits: Iterable[Wait], named: Collection[str] = ()) -> tuple[WaitingRow, ...]:
    """The rows of a model: of the tenants with most waiting requests, of those in `named`, and one for each class of
    all others. O(waiting requests + tenants log tenants)."""
    groups: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        groups[wait.request_class, wait.tenant].append(wait)
    rows = [_row(model, request_class, tenant, group) for (request_class, tenant), group in groups.items()]
    return merged_rows(rows, named)


def merged_rows(rows: Iterable[WaitingRow], named: Collection[str] | None = ()) -> tuple[WaitingRow, ...]:
    """Rows of several sources as one set, by model, class (the highest number first) and tenant. `named`: tenants that
    keep their rows beside the largest; None: all do."""
    rows = list(rows)
    keep = {model: _kept(model, rows, named) for model in {row.model for row in rows}}
    groups: dict[tuple[str, str, str | None], list[WaitingRow]] = defaultdict(list)
    for row in rows:
        tenant = row.tenant if row.tenant in keep[row.model] else None
        groups[row.model, row.request_class, tenant].append(row)
    found = [_sum(*key, group) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda row: (row.model, -row.waiting, row.request_class, row.tenant or "")))


def _kept(model: str, rows: list[WaitingRow], named: Collection[str] | None) -> set[str]:
    """The tenants of a model that have rows of their own."""
    waiting: Counter[str] = Counter()
    for row in rows:
        if row.model == model and row.tenant is not None:
            waiting[row.tenant] += row.waiting
    if named is None:
        return set(waiting)
    largest = sorted(waiting, key=lambda tenant: (-waiting[tenant], tenant))[:TENANTS_NAMED]
    return set(largest) | (set(named) & waiting.keys())


def _row(model: str, request_class: str, tenant: str, waits: list[Wait]) -> WaitingRow:
    oldest_s = max(wait.waited_s for wait in waits)
    return WaitingRow(model, request_class, tenant, len(waits), oldest_s, Counter(wait.reason for wait in waits))


def _sum(model: str, request_class: str, tenant: str | None, rows: list[WaitingRow]) -> WaitingRow:
    reasons: Counter[str] = Counter()
    for row in rows:
        reasons.update(row.reasons)
    waiting = sum(row.waiting for row in rows)
    return WaitingRow(model, request_class, tenant, waiting, max(row.oldest_s for row in rows), dict(reasons))
