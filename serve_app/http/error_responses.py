"""Refusals as HTTP responses and stream events, in the form that the official OpenAI SDK maps to its typed exceptions.

Invariant: a body is one JSON object `{"error": {"message", "type", "param", "code"}}`, pure ASCII on one line, so that
it is valid as an SSE `data:` field too; and no text of a client ever reaches a header.

Clients of Anthropic's routes get both in that API's form (`core.anthropic`); the translation is made where an answer
leaves (`answer_in_form`, `sse_error`), so all before it knows one form and our own statuses.

Wait times are sent twice: `retry-after-ms`, which the SDK reads first, and `Retry-After` in whole seconds for other
clients. Both are rounded up, since a client that repeats a moment early is refused again.
"""

from __future__ import annotations

import json
import math
from typing import Any

from serve_app.core.anthropic import error_event, error_of, status_of
from serve_app.core.limits import LimitReason
from serve_app.core.queue import RefusalReason
from serve_app.errors import MethodNotAllowed, RateLimited, RequestFailed, ServeAppError
from serve_app.types import Operation

Header = tuple[bytes, bytes]
Headers = list[Header]
Answer = tuple[int, Headers, bytes]  # status, headers and body, or the first bytes of it

JSON: Headers = [(b"content-type", b"application/json")]
CLIENT_ID_HEADER = b"x-request-id"  # the client's, or HAProxy's own; Serve sends it back
# The id inside the OpenAI object; Serve adds `x-request-id`, which echoes the client's header.
REQUEST_ID_HEADER = b"x-serve-app-request-id"
ANTHROPIC_ID_HEADER = b"request-id"  # the same id, where Anthropic's SDKs read it
MODEL_HEADER = b"x-serve-app-model"  # the model that ran, of a request to a name that is no model's own
NO_RETRY = (b"x-should-retry", b"false")  # OpenAI's SDKs read it; by themselves they repeat a 409 and a 429 in vain
MAX_RETRY_AFTER_S = 86_400.0  # a day; longer waits are sent as a day
# The place of the request in its trace, in the form of `traceparent`. A draft of W3C's has this header for answers, and
# OpenTelemetry's libraries send it. A trace that is decided at its end may be sampled although the flag is not set.
TRACE_HEADER = b"traceresponse"
_RETRY_MS = b"retry-after-ms"
_RATE_LIMIT_FIGURES = ("limit", "remaining", "reset")
_RATE_LIMIT_KINDS = ("requests", "tokens")
EXPOSED_HEADERS = (
    b"x-serve-app-wait-ms",
    b"x-serve-app-first-token-ms",
    b"x-idempotent-replay",
    MODEL_HEADER,
    CLIENT_ID_HEADER,
    REQUEST_ID_HEADER,
    ANTHROPIC_ID_HEADER,
    TRACE_HEADER,
    NO_RETRY[0],
    b"retry-after",
    _RETRY_MS,
    *(f"x-ratelimit-{what}-{kind}".encode() for kind in _RATE_LIMIT_KINDS for what in _RATE_LIMIT_FIGURES),
    *(f"anthropic-ratelimit-{kind}-{what}".encode() for kind in _RATE_LIMIT_KINDS for what in _RATE_LIMIT_FIGURES),
)  # to scripts of web pages


def error_response(error: ServeAppError) -> Answer:
    """Status, headers and JSON body of a refusal that comes before any byte of an answer. The caller adds the
    Content-Length, as for every complete answer."""
    headers = JSON + retry_headers(error.retry_after_s)
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    is_in_vain = isinstance(error, RateLimited) and (error.retry_after_s is None or error.code == LimitReason.ALLOWANCE)
    if error.code in (RefusalReason.DEADLINE, RequestFailed.code) or is_in_vain or is_final(error.status):
        headers.append(NO_RETRY)
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers.append((b"allow", ", ".join(error.allow).encode()))
    return error.status, headers, _encode(error.body())


def is_final(status: int) -> bool:
    """Whether a repeat of the request ends with the same status: the request has to change."""
    return 400 <= status < 500 and status not in (408, 429)


def answer_in_form(operation: Operation, status: int, body: bytes, request_id: str) -> tuple[int, bytes]:
    """Status and body of an answer as its client reads them: those of errors differ on Anthropic's routes. An answer
    that has that form stays as it is."""
    if status < 400 or not operation.is_anthropic:
        return status, body
    error = json.loads(body)
    return status_of(status, error), _encode(error_of(status, error, request_id))


def id_headers(operation: Operation, request_id: str) -> Headers:
    """The id of the request, under the names that its client may read."""
    names = (REQUEST_ID_HEADER, ANTHROPIC_ID_HEADER) if operation.is_anthropic else (REQUEST_ID_HEADER,)
    return [(name, request_id.encode()) for name in names]


def sse_error(body: dict[str, Any], operation: Operation, status: int = 500) -> bytes:
    """The end of a stream that has begun and cannot continue, made from the error's body: an event that the SDK raises
    as `APIError`.

    Chat and completion streams end with `[DONE]`. The Responses API names its events and has no such end; its event
    also carries `code`, `message` and `param` where that API has them. It has no `sequence_number`, since the earlier
    events were relayed as bytes and not counted. Anthropic's event has the form of its errors; their type comes from
    `status`.
    """
    if operation.is_anthropic:
        return error_event(status, body)
    if operation is not Operation.RESPONSES:
        return b"data: " + _encode(body) + b"\n\ndata: [DONE]\n\n"
    fields = body["error"]
    event = {"type": "error", "code": fields["code"], "message": fields["message"], "param": fields["param"], **body}
    return b"event: error\ndata: " + _encode(event) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """An SSE comment, which every reader skips; the blank line after it is for readers that split at blank lines."""
    return b": " + text.encode("ascii") + b"\n\n"


def sse_retry_comment(error: ServeAppError) -> bytes:
    """The retry wait as a comment, for a client that received queue comments and so no headers; empty: no wait."""
    waits = dict(retry_headers(error.retry_after_s))
    return sse_comment(f"retry_after_ms={int(waits[_RETRY_MS])}") if waits else b""


def retry_headers(retry_after_s: float | None) -> Headers:
    """When a repeat can succeed, for the SDK and for other clients; none if it is not known."""
    if retry_after_s is None or math.isnan(retry_after_s):
        return []
    wait_s = min(max(retry_after_s, 0.0), MAX_RETRY_AFTER_S)
    wait_ms = math.ceil(round(wait_s * 1000, 3))  # rounded first: 1.1 s are 1100.0000000000002 ms in binary
    return [(b"retry-after", b"%d" % math.ceil(wait_s)), (_RETRY_MS, b"%d" % wait_ms)]


def _encode(value: dict[str, object]) -> bytes:
    """ASCII, because a message may quote text that has no valid UTF-8 encoding."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
