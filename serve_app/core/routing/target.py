"""The preferred replica of a request, the reason for it, and the affinity key that it is chosen by."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serve_app.core.routing.bounded_ring import Route


class TargetReason(enum.StrEnum):
    """Why a request runs on its replica; a label of the metrics."""

    SESSION = "session"
    PREFIX = "prefix"
    PROBE = "probe"  # the replica was ejected, and this request tests whether it works again
    MOST_FREE = "most_free"  # the queue's own choice: no key, or no free capacity on the preferred replica


@dataclass(frozen=True, slots=True)
class AffinityKey:
    """Requests with one key prefer one replica. `text` includes the tenant: caches are salted per tenant."""

    text: str
    reason: TargetReason


@dataclass(frozen=True, slots=True)
class RoutingTarget:
    """The preferred replica of a request. `route`: the rule that chose it; None: no rule was applied."""

    replica_id: str
    reason: TargetReason
    route: Route | None = None
