"""What happens now, as one object for people who watch: queues with reasons, replicas, GPU memory, batches. Pure.

Decides: what an operator and what a tenant sees, and what is left off where there is more than a person can read.
In: the last answers of quota actor, routers, Serve's controller and store. Out: plain values for JSON.
Never: puts anything of one tenant into the object of another.
"""

from serve_app.core.live.parts import (
    Counts,
    LiveModel,
    QuotaPart,
    RouterPart,
    Wait,
    WaitingRow,
    waiting_rows,
)
from serve_app.core.live.rates import Rates, rates
from serve_app.core.live.views import Found, operator_view, tenant_view

__all__ = [
    "Counts",
    "Found",
    "LiveModel",
    "QuotaPart",
    "Rates",
    "RouterPart",
    "Wait",
    "WaitingRow",
    "operator_view",
    "rates",
    "tenant_view",
    "waiting_rows",
]
