"""One HTTP exchange, from the request's bytes to the last event of the stream.

Decides: whose request it is, whether it is valid, what it weighs, and the form of each answer and error.
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
    DROPPED,
    EMBED,
    NO_ROUTER,
    STREAM,
    STREAM_COMPLETE,
    Asked,
    Headers,
    Kind,
    Piece,
    ask,
    ask_route,
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
    "DROPPED",
    "EMBED",
    "NO_ROUTER",
    "STREAM",
    "STREAM_COMPLETE",
    "Asked",
    "Headers",
    "KeyRing",
    "Kind",
    "Piece",
    "RouterApp",
    "RouterReplica",
    "ask",
    "ask_route",
    "error_response",
    "read_body",
    "read_events",
    "read_head",
]

# A client needs the Python calls only; these bring Ray Serve, the router and its metrics.
_LATE = {"KeyRing": "keys", "RouterApp": "app", "RouterReplica": "deployment"}


def __getattr__(name: str) -> Any:
    """The names of `_LATE`, imported when they are asked for."""
    module = _LATE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
