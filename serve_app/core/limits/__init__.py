"""What a key, a tenant, or a tenant of one model may use: requests and tokens a minute and a day, and at once.

Decides: what is charged, refused until when, or waits, exactly, however many routers charge it.
In: requests with their estimated tokens, their end with the tokens used. Out: charges, refusals with a reserved moment.
Never: reads a clock; every event carries its time.
"""

from serve_app.core.limits.actor_limits import ActorLimits
from serve_app.core.limits.decisions import Charged, LimitDecision
from serve_app.core.limits.messages import (
    LOST_RETRY_S,
    LimitAction,
    LimitEvent,
    LimitGrant,
    LimitRecall,
    LimitRefuse,
    LimitRequest,
    lost,
)
from serve_app.core.limits.policy import (
    Kind,
    LimitedRequest,
    LimitReason,
    Limits,
    Scopes,
    Standing,
    TokenPrices,
)
from serve_app.core.limits.router_limits import RouterLimits

__all__ = [
    "LOST_RETRY_S",
    "ActorLimits",
    "Charged",
    "Kind",
    "LimitAction",
    "LimitDecision",
    "LimitEvent",
    "LimitGrant",
    "LimitReason",
    "LimitRecall",
    "LimitRefuse",
    "LimitRequest",
    "LimitedRequest",
    "Limits",
    "RouterLimits",
    "Scopes",
    "Standing",
    "TokenPrices",
    "lost",
]
