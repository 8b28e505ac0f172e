"""Maps method and path to a route: the whole public surface in one table.

Invariant: `resolve` returns a route for exactly the methods in the table (and HEAD wherever GET is); everything else
is a 404, or a 405 that names the allowed methods.

Decided here: one trailing slash is ignored and not redirected (a redirect would lose the body of a POST). A model's id
is the rest of the path, slashes included. OPTIONS is not supported: there are no CORS headers, since a key in a web
page is public, so a browser's preflight is refused.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from serve_app.errors import MethodNotAllowed, NotFound
from serve_app.types import Operation

MODEL_PREFIX = "/v1/models/"
SESSION_PREFIX = "/v1/sessions/"
REQUEST_PREFIX = "/admin/requests/"
RENEW_SUFFIX = "/renew"
SHOWN_PATH_CHARS = 200  # of an unknown path in the error: enough to see the mistake


class LocalCall(enum.StrEnum):
    """Routes that the router answers without an engine."""

    MODELS = "models"
    MODEL = "model"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"


class SessionCall(enum.StrEnum):
    """Calls on agent sessions."""

    OPEN = "open"
    GET = "look"
    RENEW = "renew"
    CLOSE = "close"


class AdminCall(enum.StrEnum):
    """Calls for operators."""

    QUOTA = "quota"
    REQUEST = "request"


RouteTarget = Operation | LocalCall | SessionCall | AdminCall


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """The target of a request. `argument` is the model's id for `LocalCall.MODEL`, the session's id for calls on one
    session, the request's id for `AdminCall.REQUEST`, else empty; `is_head`: send no body."""

    target: RouteTarget
    argument: str = ""
    is_head: bool = False


class WrongMethod(MethodNotAllowed):
    """A 405 with the allowed methods of the path, for the `Allow` header."""

    allow: tuple[str, ...] = ()


ROUTES: tuple[tuple[str, str, RouteTarget], ...] = (
    ("POST", "/v1/chat/completions", Operation.CHAT),
    ("POST", "/v1/completions", Operation.COMPLETION),
    ("POST", "/v1/responses", Operation.RESPONSES),
    ("POST", "/v1/embeddings", Operation.EMBEDDING),
    ("POST", "/tokenize", Operation.TOKENIZE),
    ("POST", "/detokenize", Operation.DETOKENIZE),
    ("POST", "/v1/sessions", SessionCall.OPEN),
    ("GET", "/v1/models", LocalCall.MODELS),
    ("GET", "/health", LocalCall.HEALTH),
    ("GET", "/ready", LocalCall.READY),
    ("GET", "/metrics", LocalCall.METRICS),
    ("GET", "/admin/quota", AdminCall.QUOTA),
)


def _build() -> dict[tuple[str, str], HttpRoute]:
    table: dict[tuple[str, str], HttpRoute] = {}
    for method, path, target in ROUTES:
        table[method, path] = HttpRoute(target)
        if method == "GET":
            table["HEAD", path] = HttpRoute(target, is_head=True)
    return table


_TABLE = _build()
_METHODS: dict[str, tuple[str, ...]] = {
    path: tuple(method for method, known in _TABLE if known == path) for _, path, _ in ROUTES
}
_PREFIX_TARGETS: dict[str, RouteTarget] = {
    MODEL_PREFIX: LocalCall.MODEL,
    REQUEST_PREFIX: AdminCall.REQUEST,
}  # by the rest
_PREFIX_METHODS = ("GET", "HEAD")
_SESSION_METHODS = {"GET": SessionCall.GET, "HEAD": SessionCall.GET, "DELETE": SessionCall.CLOSE}


def resolve(method: str, path: str) -> HttpRoute:
    """The route for method and path. `path` is decoded and without the query, as in ASGI's scope.

    Raises:
        NotFound: no such path; code "unknown_url".
        WrongMethod: the path exists, but not with this method.
    """
    route = _TABLE.get((method, path))
    return route if route is not None else _resolve_by_prefix(method, path)


def _resolve_by_prefix(method: str, path: str) -> HttpRoute:
    plain = path[:-1] if len(path) > 1 and path.endswith("/") else path
    route = _TABLE.get((method, plain))
    if route is not None:
        return route
    allow = _METHODS.get(plain)
    prefix = next((one for one in _PREFIX_TARGETS if plain.startswith(one)), None)
    if allow is None and prefix is not None:
        allow = _PREFIX_METHODS
        if method in allow:
            return HttpRoute(_PREFIX_TARGETS[prefix], argument=plain.removeprefix(prefix), is_head=method == "HEAD")
    if allow is None and plain.startswith(SESSION_PREFIX):
        name = plain.removeprefix(SESSION_PREFIX)
        renewed = name.removesuffix(RENEW_SUFFIX)
        calls = {"POST": SessionCall.RENEW} if renewed != name else _SESSION_METHODS
        allow = tuple(calls)
        if method in calls:
            return HttpRoute(calls[method], argument=renewed, is_head=method == "HEAD")
    if allow is not None:
        error = WrongMethod(f"{method[:20]} is not a method of {plain[:SHOWN_PATH_CHARS]}, it has {', '.join(allow)}")
        error.allow = allow
        raise error
    near = "/v1" + plain
    hint = f"; did you mean {near}?" if near in _METHODS else ""
    raise NotFound(f"there is no {path[:SHOWN_PATH_CHARS]} here{hint}", code="unknown_url")
