"""Refusals on the wire, in the form the official OpenAI SDK turns into its typed exceptions.

Invariant: a body is one JSON object `{"error": {"message", "type", "param", "code"}}`, pure ASCII on one line, so that
it is valid as an SSE `data:` field too; and no text of a client's ever reaches a header.

Wait times are told twice, as the SDK reads them: `retry-after-ms` first, `Retry-After` in whole seconds for all others.
Both are rounded up, since a client that comes back a moment early is refused again.
"""

from __future__ import annotations

import json
import math

from serve_app.errors import ServeAppError
from serve_app.http.routes import WrongMethod
from serve_app.types import Operation

Headers = list[tuple[bytes, bytes]]

MAX_RETRY_AFTER_S = 86_400.0  # a day; what we cannot serve sooner is told as that
SSE_DONE = b"data: [DONE]\n\n"


def error_response(error: ServeAppError) -> tuple[int, Headers, bytes]:
    """Status, headers and JSON body of a refusal that comes before any byte of an answer. Whoever sends it adds the
    Content-Length, as for every whole answer."""
    body = _encode(error.body())
    headers: Headers = [(b"content-type", b"application/json")]
    headers += _retry_headers(error.retry_after_s)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, WrongMethod):
        headers.append((b"allow", ", ".join(error.allow).encode()))
    return error.status, headers, body


def sse_error(error: ServeAppError, operation: Operation = Operation.CHAT) -> bytes:
    """The end of a stream that has begun and cannot go on: an error event the SDK raises as `APIError`.

    Chat and completion streams end with `[DONE]`. The Responses API names its events and has no such end; its event
    also carries `code`, `message` and `param` where that API has them. It has no `sequence_number`, since the events
    before it were relayed as ready bytes and not counted.
    """
    if operation is not Operation.RESPONSES:
        return b"data: " + _encode(error.body()) + b"\n\n" + SSE_DONE
    event = {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.body()}
    return b"event: error\ndata: " + _encode(event) + b"\n\n"


def _retry_headers(retry_after_s: float | None) -> Headers:
    if retry_after_s is None or math.isnan(retry_after_s):
        return []
    wait_s = min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S)
    wait_ms = math.ceil(round(wait_s * 1000, 3))  # rounded first: 1.1 s are 1100.0000000000002 ms in binary
    return [(b"retry-after", b"%d" % math.ceil(wait_s)), (b"retry-after-ms", b"%d" % wait_ms)]


def _encode(value: dict[str, object]) -> bytes:
    """ASCII, because a message may quote text that has no UTF-8 form."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
