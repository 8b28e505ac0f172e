"""What a key, a tenant, or a tenant of one model may use: requests and tokens a minute and a day, and at once.

Decides: what is charged, refused until when, or waits, exactly, however many routers charge it.
In: requests with their estimated tokens, their end with the tokens used. Out: charges, refusals with a reserved moment.
Never: reads a clock; every event carries its time.
"""

from serve_app.core.limits.policy import (
    BucketStanding,
    LimitedRequest,
    LimitReason,
    Limits,
    Standing,
    TokenPrices,
)

__all__ = ["BucketStanding", "LimitReason", "LimitedRequest", "Limits", "Standing", "TokenPrices"]
