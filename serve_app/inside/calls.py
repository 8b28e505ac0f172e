"""A Python call in HTTP's terms, and an HTTP answer in Python's; both ends of a call by handle use it.

Nothing is judged here but what has no form in HTTP: a keyword nobody knows, a value JSON does not have. All else is
left to the edge, so that a call by handle and one over HTTP cannot differ.

Invariant: pure; whatever the arguments or the answer, every failure is a `ServeAppError`.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from serve_app.errors import (
    AnswerNotKept,
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    EngineFailed,
    EngineUnreachable,
    Forbidden,
    InsufficientMemory,
    LeaseConflict,
    LeaseNotFound,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    ServeAppError,
    Unauthorized,
    Unavailable,
)
from serve_app.http.contract import CONSUMED, FORWARDED, REFUSED, STRIPPED

Headers = list[tuple[bytes, bytes]]
Piece = tuple[int, Headers, bytes] | bytes  # status, headers and first bytes of an answer, then bytes

# Codes of `Unavailable` for what has no counterpart in an HTTP answer: there the connection is refused or reset.
NO_ROUTER = "no_router"  # no router took the call
DROPPED = "connection_lost"  # the router, or the client here, ended while the call ran
EVENT_END = b"\n\n"
SHOWN_BODY_CHARS = 200  # of an error that is not in OpenAI's form: enough to see who wrote it
NEAR_ENOUGH = 0.75  # of `difflib`: `max_token` finds `max_tokens`, `prio` finds nothing

# Keywords that become headers; all others are fields of the body.
_HEADER_OF = {"session": b"x-session-id", "idempotency_key": b"idempotency-key"}
_OURS = frozenset({"api_key", "deadline_s", "extra_body", *_HEADER_OF})
_KNOWN = FORWARDED | CONSUMED | STRIPPED.keys() | REFUSED.keys()


@dataclass(frozen=True, slots=True)
class Kind:
    """A method of the handle: its name, its route, the field of its first argument, whether its answer is a stream."""

    name: str
    path: str
    subject: str
    streamed: bool = False


CHAT = Kind("chat", "/v1/chat/completions", "messages")
STREAM = Kind("stream", "/v1/chat/completions", "messages", streamed=True)
COMPLETE = Kind("complete", "/v1/completions", "prompt")
STREAM_COMPLETE = Kind("stream_complete", "/v1/completions", "prompt", streamed=True)
EMBED = Kind("embed", "/v1/embeddings", "input")


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request as the edge takes it. `headers` as in ASGI's scope: names in lower case."""

    method: str
    path: str
    headers: Headers
    body: bytes


def ask(kind: Kind, arguments: Mapping[str, Any]) -> Asked:
    """The request of one call. `arguments` are its keywords; one that is None counts as not given.

    `api_key`, `session`, `deadline_s` and `idempotency_key` become headers, `extra_body` is laid over the body
    unchecked, all others are the body's fields.

    Raises:
        BadRequest: an unknown keyword, or a value that JSON or a header cannot hold; `param` names it.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    headers = _headers(given)
    extra = given.get("extra_body", {})
    if not isinstance(extra, Mapping):
        raise BadRequest("`extra_body` must be a mapping of field names to values", param="extra_body")
    body = {name: value for name, value in given.items() if name not in _OURS}
    for name in body:
        if name not in _KNOWN:
            raise BadRequest(f"{kind.name}() knows no `{name}`{_hint(name)}", param=name)
    if "stream" in body:
        raise BadRequest("`stream` is not an argument: stream() and stream_complete() are methods", param="stream")
    body |= extra
    if kind.streamed:
        body["stream"] = True
    return Asked("POST", kind.path, headers, _encoded(body))


def ask_models(api_key: str | None) -> Asked:
    """The request for the list of models."""
    return Asked("GET", "/v1/models", _headers({} if api_key is None else {"api_key": api_key}), b"")


@dataclass(frozen=True, slots=True)
class SessionWay:
    """A call of an agent session: the method, the path after /v1/sessions, the body's fields."""

    method: str
    path: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def ask_session(api_key: str | None, way: SessionWay) -> Asked:
    """The request of it. Raises BadRequest: a value that JSON cannot hold."""
    given = {name: value for name, value in way.fields.items() if value is not None}
    headers = _headers({} if api_key is None else {"api_key": api_key})
    return Asked(way.method, f"/v1/sessions{way.path}", headers, _encoded(given) if given else b"")


def error_of(status: int, headers: Headers, body: bytes) -> ServeAppError:
    """The error that an answer with a status of 400 or more stands for: class, code, param and Retry-After as raised
    at the edge."""
    try:
        said = msgspec.json.decode(body)["error"]
        message, param, code = said["message"], said.get("param"), said.get("code")
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        message, param, code = body[:SHOWN_BODY_CHARS].decode(errors="replace"), None, None
    retry = dict(headers).get(b"retry-after-ms")
    return _error(status, str(message), param, code, None if retry is None else int(retry) / 1000)


def error_in(event: bytes) -> ServeAppError | None:
    """The error that an event of a stream stands for; None where it is a chunk."""
    if not event.startswith((b'{"error":', b'{"error" :')):
        return None
    said = msgspec.json.decode(event)["error"]
    kind, code = said.get("type"), said.get("code")
    status = code if type(code) is int else _STATUS_OF_TYPE.get(kind, ServeAppError.status)
    return _error(status, str(said.get("message")), said.get("param"), code, None)


class Reader:
    """Reads one answer as its pieces come. `feed` each of them, then `end`."""

    __slots__ = ("_error", "_headers", "_kept", "_status", "_streamed")

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._status = 0
        self._headers: Headers = []
        self._kept: list[bytes] = []
        self._error: ServeAppError | None = None

    def feed(self, piece: Piece) -> list[bytes]:
        """The events that the piece completes, each as JSON; none of an answer that is whole.

        Raises:
            ServeAppError: an earlier event said that the answer ends with it.
        """
        if self._error is not None:
            raise self._error
        if isinstance(piece, tuple):
            self._status, self._headers, piece = piece
        if not self._streamed or self._status >= 400:
            self._kept.append(piece)
            return []
        events = b"".join([*self._kept, piece]).split(EVENT_END)
        self._kept = [events.pop()]
        told: list[bytes] = []
        for event in events:
            data = event.removeprefix(b"data:").strip()
            self._error = error_in(data)
            if self._error is not None:
                break
            if data != b"[DONE]":
                told.append(data)
        return told

    def end(self) -> bytes:
        """The body of a whole answer.

        Raises:
            ServeAppError: the answer is an error.
        """
        if self._error is not None:
            raise self._error
        body = b"".join(self._kept)
        if self._status >= 400:
            raise error_of(self._status, self._headers, body)
        return body


_CLASS_OF_CODE: dict[str, type[ServeAppError]] = {
    EngineUnreachable.code: EngineUnreachable,
    EngineFailed.code: EngineFailed,
    InsufficientMemory.code: InsufficientMemory,
    LeaseNotFound.code: LeaseNotFound,
    AnswerNotKept.code: AnswerNotKept,
    "session_not_found": LeaseNotFound,
    "slow_client": EngineFailed,
}
_CLASS_OF_STATUS: dict[int, type[ServeAppError]] = {
    found.status: found
    for found in (
        BadRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        LeaseConflict,
        MethodNotAllowed,
        BodyTooLarge,
        BodyTooSlow,
        Overloaded,
        EngineFailed,
        Unavailable,
    )
}
_STATUS_OF_TYPE: dict[Any, int] = {
    found.type: found.status for found in (BadRequest, Forbidden, Overloaded, Unavailable)
}  # an error event in a stream has no status


def _error(status: int, message: str, param: Any, code: Any, retry_after_s: float | None) -> ServeAppError:
    code = code if type(code) is str else None
    found = _CLASS_OF_CODE.get(code or "") or _CLASS_OF_STATUS.get(status)
    if found is None:
        found = BadRequest if 400 <= status < 500 else ServeAppError
    return found(message, param=param, retry_after_s=retry_after_s, code=code)


def _headers(given: Mapping[str, Any]) -> Headers:
    headers: Headers = []
    if "api_key" in given:
        headers.append((b"authorization", b"Bearer " + _text("api_key", given["api_key"])))
    for name, header in _HEADER_OF.items():
        if name in given:
            headers.append((header, _text(name, given[name])))
    if "deadline_s" in given:
        headers.append((b"x-deadline-ms", _milliseconds(given["deadline_s"])))
    return headers


def _text(name: str, value: Any) -> bytes:
    if type(value) is not str:
        raise BadRequest(f"`{name}` must be a string", param=name)
    return value.encode("utf-8", "surrogatepass")  # whether these bytes will do is the edge's to say


def _milliseconds(seconds: Any) -> bytes:
    if type(seconds) not in (int, float) or not math.isfinite(seconds):
        raise BadRequest("`deadline_s` must be a number of seconds from now", param="deadline_s")
    return b"%d" % math.ceil(seconds * 1000)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return _json(body)
    except (TypeError, ValueError, RecursionError) as error:
        name, said = _culprit(body), str(error)
    raise BadRequest(f"`{name}` cannot be written as JSON: {said}", param=name)


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False).encode("ascii")


def _culprit(body: Mapping[str, Any]) -> str:
    for name, value in body.items():
        try:
            _json({name: value})
        except (TypeError, ValueError, RecursionError):
            return str(name)
    return "extra_body"


def _plain(value: Any) -> Any:
    """An object of the `openai` package, an answer's message for instance, as a field of the next request."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return dump(mode="json", exclude_unset=True, exclude_none=True)


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name, _KNOWN | _OURS, n=1, cutoff=NEAR_ENOUGH)
    return f"; did you mean `{near[0]}`?" if near else ""
