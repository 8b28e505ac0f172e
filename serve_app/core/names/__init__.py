"""Which model answers a name.

Decides: the models that a request to a name may run on, in order, and after which outcome it goes to the next one; what
its models' records say of each.
In: the routes of the configuration, a key of the request, errors, records. Out: names of models, figures.
Never: asks whether a key may use a name, and never sends a request.
"""

from serve_app.core.names.comparison import Estimate, compared
from serve_app.core.names.hops import TOO_LARGE_CODES, HopReason, ModelHops
from serve_app.core.names.routes import DEFAULT_WEIGHT, ModelRoute, ModelRoutes, Shadow, WeightedModel

__all__ = [
    "DEFAULT_WEIGHT",
    "TOO_LARGE_CODES",
    "Estimate",
    "HopReason",
    "ModelHops",
    "ModelRoute",
    "ModelRoutes",
    "Shadow",
    "WeightedModel",
    "compared",
]
