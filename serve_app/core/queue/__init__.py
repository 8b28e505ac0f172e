"""The admission queue of one model: events in, grants and refusals out.

Decides: the order of waiting requests (class, minimum share, tenant), who is granted, refused or evicted.
In: arrivals, ends and progress of requests, capacity of replicas. Out: `Grant` and `Refuse`, forecasts, snapshots.
Never: reads a clock; every event carries its time.
"""

from serve_app.core.queue.admission import DEFAULT_RETRY_AFTER_S, MAX_RETRY_AFTER_S, Admission
from serve_app.core.queue.cold_start import StartUp
from serve_app.core.queue.events import (
    Action,
    Arrival,
    Grant,
    Preempt,
    QueueStatus,
    Reason,
    Refuse,
    ReplicaUse,
    refusal_error,
)
from serve_app.core.queue.policy import MAX_HEADROOM_SHARE, ClassBound, Policy, TenantPolicy
from serve_app.core.queue.vtc_charges import INPUT_WEIGHT, OUTPUT_WEIGHT
from serve_app.core.queue.wait_forecast import Backlog

__all__ = [
    "DEFAULT_RETRY_AFTER_S",
    "INPUT_WEIGHT",
    "MAX_HEADROOM_SHARE",
    "MAX_RETRY_AFTER_S",
    "OUTPUT_WEIGHT",
    "Action",
    "Admission",
    "Arrival",
    "Backlog",
    "ClassBound",
    "Grant",
    "Policy",
    "Preempt",
    "QueueStatus",
    "Reason",
    "Refuse",
    "ReplicaUse",
    "StartUp",
    "TenantPolicy",
    "refusal_error",
]
