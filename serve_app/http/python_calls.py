"""Converts a Python call to an HTTP request, and an HTTP answer to Python data; both ends of a call by handle use it.

It refuses only what has no form in HTTP: an unknown keyword, a value that JSON cannot hold. The ASGI app checks the
rest, so that a call by handle and one over HTTP cannot differ.

Invariant: for any arguments and any answer, every failure is a `ServeAppError`; an answer, also an error, is read to
its end or closed.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import json
import math
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from serve_app import errors
from serve_app.errors import DROPPED, BadRequest, ConfigError, EngineFailed, LeaseNotFound, ServeAppError, Unavailable
from serve_app.http.contract import CONSUMED, FORWARDED, REFUSED, STRIPPED
from serve_app.http.error_responses import Answer, Headers
from serve_app.transport import NOT_CONTINUABLE

AnswerPiece: TypeAlias = Answer | bytes  # an answer is a head with its first bytes, then bytes

EVENT_END = b"\n\n"
SHOWN_BODY_CHARS = 200  # of an error that is not in OpenAI's format: enough to see its origin
NEAR_ENOUGH = 0.75  # of `difflib`: `max_token` finds `max_tokens`, `prio` finds nothing

# Keywords sent as headers; all others are fields of the body.
_HEADER_OF = {"api_key": b"authorization", "session": b"x-session-id", "idempotency_key": b"idempotency-key"}
_CONTRACT_KEYWORDS = frozenset({"deadline_s", "extra_body", *_HEADER_OF})
_KNOWN_FIELDS = FORWARDED | CONSUMED | STRIPPED.keys() | REFUSED.keys()


class CallKind(enum.Enum):
    """A method of the handle: its route, the field of its first argument, whether its answer is a stream."""

    CHAT = "/v1/chat/completions", "messages", False
    STREAM = "/v1/chat/completions", "messages", True
    COMPLETE = "/v1/completions", "prompt", False
    STREAM_COMPLETE = "/v1/completions", "prompt", True
    EMBED = "/v1/embeddings", "input", False

    def __init__(self, path: str, first_field: str, streamed: bool) -> None:
        self.path = path
        self.first_field = first_field
        self.streamed = streamed


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One HTTP request for the ASGI app. `headers` and `query` as in ASGI's scope: names in lower case, not decoded."""

    method: str
    path: str
    headers: Headers
    body: bytes
    query: bytes = b""


def make_request(kind: CallKind, arguments: Mapping[str, Any]) -> HttpRequest:
    """The request of one call. `arguments` are its keywords; one that is None counts as not given.

    `api_key`, `session`, `deadline_s` and `idempotency_key` become headers, `extra_body` is merged over the body
    unchecked, all others are fields of the body.

    Raises:
        BadRequest: an unknown keyword, or a value that JSON or a header cannot hold; `param` names it.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    headers = _headers(given)
    extra = given.get("extra_body", {})
    if not isinstance(extra, Mapping):
        raise BadRequest("`extra_body` must be a mapping of field names to values", param="extra_body")
    body = {name: value for name, value in given.items() if name not in _CONTRACT_KEYWORDS}
    require_known(kind.name.lower(), body)
    if "stream" in body:
        raise BadRequest("`stream` is not an argument: stream() and stream_complete() are methods", param="stream")
    body |= extra
    if kind.streamed:
        body["stream"] = True
    return HttpRequest("POST", kind.path, headers, _encoded(body))


def require_known(method: str, names: Iterable[str]) -> None:
    """Raises BadRequest: one of these is no keyword of a call; `param` names it."""
    for name in names:
        if name not in _KNOWN_FIELDS and name not in _CONTRACT_KEYWORDS:
            near = difflib.get_close_matches(name, _KNOWN_FIELDS | _CONTRACT_KEYWORDS, n=1, cutoff=NEAR_ENOUGH)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise BadRequest(f"{method}() has no argument `{name}`{hint}", param=name)


def make_route_request(
    api_key: str | None, method: str, path: str, fields: Mapping[str, Any] | None = None
) -> HttpRequest:
    """The request of any other route; a field that is None counts as not given.

    Raises:
        BadRequest: a value that JSON cannot hold; `param` names it.
    """
    given = {name: value for name, value in (fields or {}).items() if value is not None}
    return HttpRequest(method, path, _headers({} if api_key is None else {"api_key": api_key}), _encoded(given))


async def read_head(pieces: AsyncGenerator[AnswerPiece, None]) -> Answer:
    """Status, headers and first bytes of an answer."""
    head = await anext(pieces, None)
    if not isinstance(head, tuple):
        raise Unavailable("the answer ended before it began", code=DROPPED)
    return head


async def read_body(pieces: AsyncGenerator[AnswerPiece, None]) -> bytes:
    """The body of an answer.

    Raises:
        ServeAppError: the answer is an error.
    """
    async with contextlib.aclosing(pieces):
        return await _read_rest(await read_head(pieces), pieces)


async def read_events(pieces: AsyncGenerator[AnswerPiece, None]) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer, each as JSON.

    Raises:
        ServeAppError: the answer is an error, or an event of the stream is one.
    """
    async with contextlib.aclosing(pieces):
        head = await read_head(pieces)
        if head[0] >= 400:
            await _read_rest(head, pieces)
        rest = head[2]
        more: AnswerPiece | None = b""
        while isinstance(more, bytes):
            *ended, rest = (rest + more).split(EVENT_END)
            for event in ended:
                data = event.removeprefix(b"data:").strip()
                error = error_in(data)
                if error is not None:
                    await _read_rest(head, pieces)  # so that the router ends the request normally
                    raise error
                if data != b"[DONE]":
                    yield data
            more = await anext(pieces, None)


async def _read_rest(head: Answer, pieces: AsyncGenerator[AnswerPiece, None]) -> bytes:
    status, headers, first = head
    body = b"".join([first, *[piece async for piece in pieces if isinstance(piece, bytes)]])
    if status >= 400:
        raise error_of(status, headers, body)
    return body


def error_of(status: int, headers: Headers, body: bytes) -> ServeAppError:
    """The error for an answer with a status of 400 or more: class, code, param and Retry-After as the ASGI app raised
    them."""
    try:
        details = msgspec.json.decode(body)["error"]
        message = details["message"]
        param = details.get("param")
        code = details.get("code")
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        message = body[:SHOWN_BODY_CHARS].decode(errors="replace")
        param = None
        code = None
    retry = dict(headers).get(b"retry-after-ms")
    found = _BY_STATUS.get(status, BadRequest if status < 500 else ServeAppError)
    return _error(found, str(message), param, code, None if retry is None else int(retry) / 1000)


def error_in(event: bytes) -> ServeAppError | None:
    """The error that an event of a stream carries; None if the event is a chunk. An event has no status, except that an
    engine's event has it as its code."""
    if not event.startswith((b'{"error":', b'{"error" :')):
        return None
    details = msgspec.json.decode(event)["error"]
    code = details.get("code")
    found = _BY_STATUS.get(code) if type(code) is int else _BY_TYPE.get(details.get("type"))
    return _error(found or ServeAppError, str(details.get("message")), details.get("param"), code, None)


def _error(
    found: type[ServeAppError], message: str, param: Any, code: Any, retry_after_s: float | None
) -> ServeAppError:
    """An error of the class with this code; of `found`, if no class has it."""
    code = code if type(code) is str else None
    return _BY_CODE.get(code, found)(message, param=param, retry_after_s=retry_after_s, code=code)


# The last first: of several with one status or type, the base class wins. ConfigError is raised before any request.
_CLASSES = [
    kind
    for kind in reversed(vars(errors).values())
    if isinstance(kind, type) and issubclass(kind, ServeAppError) and kind is not ConfigError
]
_BY_STATUS: dict[Any, type[ServeAppError]] = {kind.status: kind for kind in _CLASSES}
_BY_TYPE: dict[Any, type[ServeAppError]] = {kind.type: kind for kind in _CLASSES}
_BY_CODE: dict[str | None, type[ServeAppError]] = {kind.code: kind for kind in _CLASSES}
_BY_CODE |= {"session_not_found": LeaseNotFound, "slow_client": EngineFailed, NOT_CONTINUABLE: EngineFailed}


def _headers(given: Mapping[str, Any]) -> Headers:
    headers: Headers = []
    for name, header in _HEADER_OF.items():
        if name in given:
            if type(given[name]) is not str:
                raise BadRequest(f"`{name}` must be a string", param=name)
            text = given[name].encode("utf-8", "surrogatepass")  # the ASGI app validates these bytes
            headers.append((header, b"Bearer " + text if name == "api_key" else text))
    seconds = given.get("deadline_s", 0)
    if type(seconds) not in (int, float) or not math.isfinite(seconds):
        raise BadRequest("`deadline_s` must be a number of seconds from now", param="deadline_s")
    if "deadline_s" in given:
        headers.append((b"x-deadline-ms", b"%d" % math.ceil(seconds * 1000)))
    return headers


def _encoded(body: Mapping[str, Any]) -> bytes:
    """The body as JSON; one that is empty is none."""
    try:
        return _json(body) if body else b""
    except (TypeError, ValueError, RecursionError) as error:
        name = _unencodable_field(body)
        reason = str(error)
    raise BadRequest(f"`{name}` cannot be written as JSON: {reason}", param=name)


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False).encode("ascii")


def _unencodable_field(body: Mapping[str, Any]) -> str:
    for name, value in body.items():
        try:
            _json({name: value})
        except (TypeError, ValueError, RecursionError):
            return str(name)
    return "extra_body"


def _plain(value: Any) -> Any:
    """The JSON form of an object of the `openai` package, for instance an answer's message in the next request."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return dump(mode="json", exclude_unset=True, exclude_none=True)
