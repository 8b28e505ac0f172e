"""What requests have used, summed by day, key, tenant, model and name, and reported so that nothing counts twice.

Decides: what one router reports next, and what it reports again; what a killed one would have reported. In: requests
that an engine begins, and their end with the tokens used. Out: numbered batches of sums, each with what is in flight
after it; lines of a journal; the tenants of most use, which the metrics name.
Never: reads a clock; the day of a request is an argument.
"""

from serve_app.core.usage.journal import begin_line, end_line, meter_of, state_line
from serve_app.core.usage.meter import UsageMeter
from serve_app.core.usage.named_tenants import OTHER, NamedTenants
from serve_app.core.usage.records import (
    BATCH_SUFFIX,
    MODEL_KEY,
    USAGE_COUNTS,
    USAGE_KEY,
    InFlightUse,
    RequestUse,
    UsageBatch,
    UsageKey,
    UsageRow,
    UsedModel,
)

__all__ = [
    "BATCH_SUFFIX",
    "MODEL_KEY",
    "OTHER",
    "USAGE_COUNTS",
    "USAGE_KEY",
    "InFlightUse",
    "NamedTenants",
    "RequestUse",
    "UsageBatch",
    "UsageKey",
    "UsageMeter",
    "UsageRow",
    "UsedModel",
    "begin_line",
    "end_line",
    "meter_of",
    "state_line",
]
