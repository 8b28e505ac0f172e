"""One HTTP exchange, from the request's bytes to the last event of the stream.

Decides: the tenant of a request, whether it is valid, its cost, and the form of each answer and error.
In: ASGI calls, and Python calls in HTTP's terms. Out: responses, receipts and metrics of requests.
Never: chooses a replica or the order of requests; `router` does.

Modules are exported unloaded: a client needs the Python calls only, and must not load Ray Serve, the router and its
metrics.
"""

from serve_app.http.error_responses import Headers, error_response
from serve_app.http.python_calls import (
    AnswerPiece,
    CallKind,
    HttpRequest,
    make_request,
    make_route_request,
    read_body,
    read_events,
    read_head,
    require_known,
)

__all__ = [
    "AnswerPiece",
    "CallKind",
    "Headers",
    "HttpRequest",
    "api",
    "app",
    "console",
    "deployment",
    "error_response",
    "keyed",
    "make_request",
    "make_route_request",
    "read_body",
    "read_events",
    "read_head",
    "require_known",
    "tokens",
]
