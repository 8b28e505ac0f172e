"""Which replica of a model a request prefers.

Decides: the replica for a key (consistent hashing with bounded loads), and which replicas are ejected as outliers.
In: keys, loads, failures and successes. Out: routes, ejections, probes.
Never: sends anything.
"""

from serve_app.core.routing.bounded_ring import BOUND, FREE_SHARE, Route, Routing
from serve_app.core.routing.outliers import Action, Eject, FailureKind, Outliers, Probe, State, Verdict
from serve_app.core.routing.target import Aim, Key, Why

__all__ = [
    "BOUND",
    "FREE_SHARE",
    "Action",
    "Aim",
    "Eject",
    "FailureKind",
    "Key",
    "Outliers",
    "Probe",
    "Route",
    "Routing",
    "State",
    "Verdict",
    "Why",
]
