"""What a router records about a request on its way, for its receipt."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.routing import Route, TargetReason
from serve_app.types import RequestClass


@dataclass(slots=True)
class RequestTrace:
    """Filled in while the request runs.

    Args:
        max_kv_tokens: the most tokens of prompt and all answers, by the client's bound; None: no bound.
        sequences: how many it runs at once; 0: one for each slot.
        ahead: how many requests waited ahead of it on arrival, by class.
        replica_id: the replica to which it was submitted last.
        reason: the reason for that replica; `route`: how the replica was found, None: by the queue.
        waited_s: seconds between its last arrival in the queue and the grant.
        losses: number of replicas lost during the request.
        kv_token_s: KV tokens held, times seconds.
    """

    max_kv_tokens: int | None = None
    sequences: int = 0
    ahead: tuple[tuple[RequestClass, int], ...] = ()
    replica_id: str | None = None
    reason: TargetReason = TargetReason.MOST_FREE
    route: Route | None = None
    waited_s: float = 0.0
    losses: int = 0
    kv_token_s: float = 0.0
