"""How many tokens a request will need.

Decides: the estimate for a request, learned per tenant and model, and the slots that a long sequence takes.
In: sizes of requests, and the use of ended requests. Out: estimates with their source.
Never: keeps more than a fixed number of tenants and models.
"""

from serve_app.core.estimate.estimate import (
    DEFAULT_QUANTILE,
    EstimateSource,
    Estimator,
    ObservedUse,
    RequestCost,
)
from serve_app.core.estimate.length import LengthRule

__all__ = [
    "DEFAULT_QUANTILE",
    "EstimateSource",
    "Estimator",
    "LengthRule",
    "ObservedUse",
    "RequestCost",
]
