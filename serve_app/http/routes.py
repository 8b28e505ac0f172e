"""Which path means what: the whole public surface in one table.

Invariant: `resolve` gives a route for exactly the methods the table lists (and HEAD wherever GET is); everything else
is a 404, or a 405 that names the methods there are.

Decided here: one trailing slash is as good as none and is not redirected (a redirect would lose the body of a POST). A
model's id is the rest of the path, slashes included. OPTIONS is no method of ours: there are no CORS headers, since a
key in a web page is a key given away, so a browser's preflight is refused and the browser stays out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from serve_app.errors import MethodNotAllowed, NotFound
from serve_app.types import Operation

MODEL_PREFIX = "/v1/models/"
SESSION_PREFIX = "/v1/sessions/"
REQUEST_PREFIX = "/admin/requests/"
RENEW_SUFFIX = "/renew"
SHOWN_PATH_CHARS = 200  # of an unknown path in the error: enough to see the mistake


class Local(enum.StrEnum):
    """Routes the router answers itself, without an engine."""

    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"


class SessionCall(enum.StrEnum):
    """What can be asked of agent sessions."""

    OPEN = "open"
    LOOK = "look"
    RENEW = "renew"
    CLOSE = "close"


class AdminCall(enum.StrEnum):
    """What operators ask."""

    QUOTA = "quota"
    REQUEST = "request"


Target = Operation | Local | SessionCall | AdminCall


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. `argument` is the model's id for `Local.MODEL`, the session's for the calls of one, that of
    the request for `AdminCall.REQUEST`, else empty; `head`: send no body."""

    target: Target
    argument: str = ""
    head: bool = False


class WrongMethod(MethodNotAllowed):
    """A 405 that knows which methods the path has; they become the `Allow` header."""

    allow: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"allow": self.allow})


ROUTES: tuple[tuple[str, str, Target], ...] = (
    ("POST", "/v1/chat/completions", Operation.CHAT),
    ("POST", "/v1/completions", Operation.COMPLETION),
    ("POST", "/v1/responses", Operation.RESPONSES),
    ("POST", "/v1/embeddings", Operation.EMBEDDING),
    ("POST", "/tokenize", Operation.TOKENIZE),
    ("POST", "/detokenize", Operation.DETOKENIZE),
    ("POST", "/v1/sessions", SessionCall.OPEN),
    ("GET", "/v1/models", Local.MODELS),
    ("GET", "/health", Local.HEALTH),
    ("GET", "/ready", Local.READY),
    ("GET", "/metrics", Local.METRICS),
    ("GET", "/admin/quota", AdminCall.QUOTA),
)


def _build() -> dict[tuple[str, str], Route]:
    table: dict[tuple[str, str], Route] = {}
    for method, path, target in ROUTES:
        table[method, path] = Route(target)
        if method == "GET":
            table["HEAD", path] = Route(target, head=True)
    return table


_TABLE = _build()
_METHODS: dict[str, tuple[str, ...]] = {
    path: tuple(method for method, known in _TABLE if known == path) for _, path, _ in ROUTES
}
_LOOKED_UP: dict[str, Target] = {MODEL_PREFIX: Local.MODEL, REQUEST_PREFIX: AdminCall.REQUEST}  # by the rest
_LOOKUP_METHODS = ("GET", "HEAD")
_OF_A_SESSION = {"GET": SessionCall.LOOK, "HEAD": SessionCall.LOOK, "DELETE": SessionCall.CLOSE}


def resolve(method: str, path: str) -> Route:
    """The route of a request line. `path` is decoded and without the query, as in ASGI's scope.

    Raises:
        NotFound: no such path; code "unknown_url".
        WrongMethod: the path exists, but not with this method.
    """
    route = _TABLE.get((method, path))
    return route if route is not None else _resolve_rarely(method, path)


def _resolve_rarely(method: str, path: str) -> Route:
    plain = path[:-1] if len(path) > 1 and path.endswith("/") else path
    route = _TABLE.get((method, plain))
    if route is not None:
        return route
    allow = _METHODS.get(plain)
    prefix = next((one for one in _LOOKED_UP if plain.startswith(one)), None)
    if allow is None and prefix is not None:
        allow = _LOOKUP_METHODS
        if method in allow:
            return Route(_LOOKED_UP[prefix], argument=plain.removeprefix(prefix), head=method == "HEAD")
    if allow is None and plain.startswith(SESSION_PREFIX):
        name = plain.removeprefix(SESSION_PREFIX)
        renewed = name.removesuffix(RENEW_SUFFIX)
        calls = {"POST": SessionCall.RENEW} if renewed != name else _OF_A_SESSION
        allow = tuple(calls)
        if method in calls:
            return Route(calls[method], argument=renewed, head=method == "HEAD")
    if allow is not None:
        error = WrongMethod(f"{method[:20]} is not a method of {plain[:SHOWN_PATH_CHARS]}, it has {', '.join(allow)}")
        error.allow = allow
        raise error
    near = "/v1" + plain
    hint = f"; did you mean {near}?" if near in _METHODS else ""
    raise NotFound(f"there is no {path[:SHOWN_PATH_CHARS]} here{hint}", code="unknown_url")
