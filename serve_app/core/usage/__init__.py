"""What requests have used, summed by day, key, tenant and model, and reported so that nothing counts twice.

Decides: what one router reports next, and what it reports again. In: requests that an engine begins, and their end with
the tokens used. Out: numbered batches of sums, each with what is in flight after it.
Never: reads a clock; the day of a request is an argument.
"""

from serve_app.core.usage.meter import UsageMeter
from serve_app.core.usage.records import (
    USAGE_COUNTS,
    USAGE_KEY,
    InFlightUse,
    RequestUse,
    UsageBatch,
    UsageKey,
    UsageRow,
)

__all__ = [
    "USAGE_COUNTS",
    "USAGE_KEY",
    "InFlightUse",
    "RequestUse",
    "UsageBatch",
    "UsageKey",
    "UsageMeter",
    "UsageRow",
]
