"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}}`, with our `code` and `param` beside.

Load is told apart as Anthropic does: a limit of the key or the tenant is a 429 `rate_limit_error`, and a service that
has no room now is a 529 `overloaded_error`. Both tell when to come back.

Invariant: an error that has this form already stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serve_app.core.body_bounds import TOO_LONG
from serve_app.core.limits import LimitReason

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
TOO_LONG_WORDS = "prompt is too long"  # Anthropic's: agents that read them shorten the conversation and go on


def status_of(status: int, body: Mapping[str, Any]) -> int:
    """The status that a client of Anthropic gets for this error, whose body has either form."""
    if status == 503 or (status == 429 and _details(body).get("code") not in set(LimitReason)):
        return OVERLOADED
    return status


def error_of(status: int, body: Mapping[str, Any], request_id: str = "") -> dict[str, Any]:
    """The body of an error, from that in OpenAI's form. `status`: before or after `status_of`."""
    if body.get("type") == "error":
        return dict(body)
    given = _details(body)
    kind = _TYPES.get(status_of(status, body), "invalid_request_error" if status < 500 else "api_error")
    message = str(given.get("message"))
    if given.get("code") == TOO_LONG:
        message = f"{TOO_LONG_WORDS}: {message}"
    error = {"type": kind, "message": message, "code": given.get("code"), "param": given.get("param")}
    return {"type": "error", "error": error} | ({"request_id": request_id} if request_id else {})


def error_event(status: int, body: Mapping[str, Any], request_id: str = "") -> bytes:
    """The last event of a stream that has begun and cannot continue, in ASCII."""
    data = json.dumps(error_of(status, body, request_id), separators=(",", ":"))
    return b"event: error\ndata: " + data.encode("ascii") + b"\n\n"


def _details(body: Mapping[str, Any]) -> Mapping[str, Any]:
    found = body.get("error")
    return found if isinstance(found, dict) else {}
