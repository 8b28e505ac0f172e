"""The admission queue of one model: events in, grants and refusals out.

Decides: the order of waiting requests (class, minimum share, tenant), which are granted, refused or evicted.
In: arrivals, ends and progress of requests, capacity of replicas. Out: `Grant`, `Refuse` and `Preempt`, forecasts,
snapshots.
Never: reads a clock; every event carries its time.
"""

from serve_app.core.queue.admission import DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S, Admission, EventGrants
from serve_app.core.queue.cold_start import ReplicaStart
from serve_app.core.queue.events import (
    Action,
    Arrival,
    BegunRun,
    Decision,
    Grant,
    Preempt,
    QueueStatus,
    RefusalReason,
    Refuse,
    WaitReason,
    refusal_error,
)
from serve_app.core.queue.policy import (
    DEFAULT_MIN_SHARE,
    DEFAULT_NO_REPLICA_WAIT_S,
    MAX_GUARD_SLOTS_SHARE,
    MAX_WEIGHT,
    MIN_WEIGHT,
    ClassBound,
    QueuedAmount,
    QueuePolicy,
    TenantPolicy,
)
from serve_app.core.queue.scheduler import INPUT_WEIGHT, OUTPUT_WEIGHT
from serve_app.core.queue.session_place import SessionPlace
from serve_app.core.queue.snapshot import OTHER_TENANTS
from serve_app.core.queue.wait_forecast import Backlog

__all__ = [
    "DEFAULT_MIN_SHARE",
    "DEFAULT_NO_REPLICA_WAIT_S",
    "DEFAULT_RETRY_AFTER_S",
    "INPUT_WEIGHT",
    "MAX_GUARD_SLOTS_SHARE",
    "MAX_RETRY_AFTER_S",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "OTHER_TENANTS",
    "OUTPUT_WEIGHT",
    "Action",
    "Admission",
    "Arrival",
    "Backlog",
    "BegunRun",
    "ClassBound",
    "Decision",
    "EventGrants",
    "Grant",
    "Preempt",
    "QueuePolicy",
    "QueueStatus",
    "QueuedAmount",
    "RefusalReason",
    "Refuse",
    "ReplicaStart",
    "SessionPlace",
    "TenantPolicy",
    "WaitReason",
    "refusal_error",
]
