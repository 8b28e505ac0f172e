"""What is noted of a request on its way through a router, for its receipt."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.routing import Route, Why
from serve_app.types import RequestClass


@dataclass(slots=True)
class RequestTrace:
    """Filled as the request goes.

    Args:
        most_tokens: what it can come to use, prompt and all answers, by the client's bound; None: there is none.
        sequences: how many it runs at once; 0: as many as it takes slots.
        ahead: how many requests waited before it when it came, by class.
        replica_id: where it was handed in last.
        why: the reason for that replica; `route` is how it was found, None: by the queue.
        waited_s: seconds between its last arrival in the queue and the grant.
        losses: replicas that were lost under it.
        kv_token_s: KV tokens held, times seconds.
    """

    most_tokens: int | None = None
    sequences: int = 0
    ahead: tuple[tuple[RequestClass, int], ...] = ()
    replica_id: str | None = None
    why: Why = Why.MOST_FREE
    route: Route | None = None
    waited_s: float = 0.0
    losses: int = 0
    kv_token_s: float = 0.0
