"""Which replica of a model a request prefers.

Decides: the replica for a key (consistent hashing with bounded loads), and which replicas are ejected as outliers
or are silent.
In: keys, loads, failures and successes. Out: routes, ejections, probes.
Never: sends a request or a message.
"""

from serve_app.core.routing.bounded_ring import (
    FREE_SHARE,
    LOAD_BOUND,
    AffinityKey,
    BoundedRing,
    Route,
    RoutingTarget,
    TargetReason,
)
from serve_app.core.routing.outliers import (
    Eject,
    FailureKind,
    OutlierAction,
    OutlierDetector,
    OutlierState,
    OutlierVerdict,
    Probe,
)
from serve_app.core.routing.retry_budget import RetryBudget
from serve_app.core.routing.silence import FirstFrames, is_to_be_asked

__all__ = [
    "FREE_SHARE",
    "LOAD_BOUND",
    "AffinityKey",
    "BoundedRing",
    "Eject",
    "FailureKind",
    "FirstFrames",
    "OutlierAction",
    "OutlierDetector",
    "OutlierState",
    "OutlierVerdict",
    "Probe",
    "RetryBudget",
    "Route",
    "RoutingTarget",
    "TargetReason",
    "is_to_be_asked",
]
