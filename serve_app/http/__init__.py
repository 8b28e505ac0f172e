"""One HTTP exchange, from the request's bytes to the last event of the stream.

Decides: the tenant of a request, whether it is valid, its cost, and the form of each answer and error.
In: ASGI calls, and Python calls in HTTP's terms. Out: responses, receipts and metrics of requests.
Never: chooses a replica or the order of requests; `router` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from serve_app.http.error_responses import error_response
from serve_app.http.python_calls import (
    CHAT,
    COMPLETE,
    EMBED,
    STREAM,
    STREAM_COMPLETE,
    AnswerPiece,
    CallKind,
    Headers,
    HttpRequest,
    make_request,
    make_route_request,
    read_body,
    read_events,
    read_head,
)

if TYPE_CHECKING:
    from serve_app.http.app import RouterApp
    from serve_app.http.deployment import RouterReplica
    from serve_app.http.keys import KeyRing

__all__ = [
    "CHAT",
    "COMPLETE",
    "EMBED",
    "STREAM",
    "STREAM_COMPLETE",
    "AnswerPiece",
    "CallKind",
    "Headers",
    "HttpRequest",
    "KeyRing",
    "RouterApp",
    "RouterReplica",
    "error_response",
    "make_request",
    "make_route_request",
    "read_body",
    "read_events",
    "read_head",
]

# A client needs the Python calls only; these names import Ray Serve, the router and its metrics.
_LATE = {"KeyRing": "keys", "RouterApp": "app", "RouterReplica": "deployment"}


def __getattr__(name: str) -> Any:
    """Imports the names of `_LATE` on first use."""
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
