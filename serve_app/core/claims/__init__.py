"""Which router runs a request with an `Idempotency-Key`, and which routers keep its answer.

Decides: whether a request with a key runs, joins a run, gets a kept answer, or is refused.
In: claims of requests, reports of routers, the ends of routers. Out: verdicts.
Never: holds an answer, reads a clock, or sees the text of a key.
"""

from serve_app.core.claims.book import MAX_RESTARTS, ClaimBook
from serve_app.core.claims.messages import (
    KEPT_S,
    Claim,
    ClaimReply,
    ClaimReport,
    ClaimRequest,
    ClaimState,
    ClaimVerdict,
    Generation,
)

__all__ = [
    "KEPT_S",
    "MAX_RESTARTS",
    "Claim",
    "ClaimBook",
    "ClaimReply",
    "ClaimReport",
    "ClaimRequest",
    "ClaimState",
    "ClaimVerdict",
    "Generation",
]
