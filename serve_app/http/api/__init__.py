"""The table of routes, and the answers of those that need no engine: models, sessions, keys, files, batches,
stored responses, usage.

Decides: which route a method and a path are, who may use it, and what a route without an engine answers.
In: a route, the identity of its caller, and the request. Out: a complete answer, or one in pieces.
Never: runs an engine operation or sends bytes; `app` and `engine_calls` do.
"""

from serve_app.http.api.api_routes import ApiRoutes
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.local_routes import LocalRoutes, model_named, not_an_operator, require_right
from serve_app.http.api.receipt_lookup import ReceiptLookup
from serve_app.http.api.router_parts import RouterParts
from serve_app.http.api.routes import is_anthropic, permitted, resolve

__all__ = [
    "ApiRoutes",
    "BatchLane",
    "LocalRoutes",
    "ReceiptLookup",
    "RouterParts",
    "is_anthropic",
    "model_named",
    "not_an_operator",
    "permitted",
    "require_right",
    "resolve",
]
