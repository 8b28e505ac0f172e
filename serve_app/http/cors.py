"""Web pages of other origins: which may call, and what their scripts may read of an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from serve_app.http.body import Receive
from serve_app.http.error_responses import EXPOSED_HEADERS
from serve_app.http.response import Send

Handler = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def with_cors(handler: Handler, origins: Sequence[str]) -> Handler:
    """The handler for web pages of these origins, too: a preflight is answered without a key, as browsers send it."""
    methods = ("GET", "POST", "DELETE")
    exposed = [name.decode() for name in EXPOSED_HEADERS]
    return CORSMiddleware(handler, origins, methods, allow_headers=["*"], expose_headers=exposed)
