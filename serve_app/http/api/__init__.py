"""The table of routes, and the answers of those that need no engine: models, sessions, keys, files, batches, usage.

Decides: which route a method and a path are, who may use it, and what a route without an engine answers.
In: a route, the identity of its caller, and the request. Out: a complete answer, or one in pieces.
Never: runs an engine operation or sends bytes; `app` and `engine_calls` do.
"""

from serve_app.http.api.api_routes import ApiRoutes
from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.local_routes import LocalRoutes, model_named, not_an_operator
from serve_app.http.api.router_parts import RouterParts
from serve_app.http.api.routes import permitted, resolve

__all__ = [
    "ApiRoutes",
    "BatchLane",
    "LocalRoutes",
    "RouterParts",
    "model_named",
    "not_an_operator",
    "permitted",
    "resolve",
]
