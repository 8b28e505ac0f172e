"""Maps method and path to a route: the whole public surface in one table.

Invariant: `resolve` returns a route for exactly the methods in the table (and HEAD wherever GET is); everything else
is a 404, or a 405 that names the allowed methods.

Decided here: repeated slashes count as one (a base URL that ends with one gives `//v1`), and a trailing one is ignored;
neither is redirected, which would lose the body of a POST. A model's id is the rest of the path, slashes included.
OPTIONS is answered where CORS is configured (`http.cors_origins`), before the route is looked up.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from serve_app.errors import Forbidden, MethodNotAllowed, NotFound
from serve_app.http.console import ConsoleCall
from serve_app.types import Identity, Operation

SHOWN_PATH_CHARS = 200  # of an unknown path in the error: enough to see the mistake
SHOWN_ID_CHARS = 64  # of an unknown id, in the error
ANTHROPIC_ROOT = "/v1/messages"


class LocalCall(enum.StrEnum):
    """Routes that the router answers without an engine."""

    MODELS = "models"
    MODEL = "model"
    VERSION = "version"
    HEALTH = "health"
    READY = "ready"
    METRICS = "metrics"
    REQUEST = "request"
    USAGE = "usage"


# What is of no tenant; `MODELS` lists those that the key may use.
OPEN_TO_ALL_KEYS = {
    LocalCall.MODELS,
    LocalCall.MODEL,
    LocalCall.VERSION,
    LocalCall.HEALTH,
    LocalCall.READY,
    LocalCall.METRICS,
}


class SessionCall(enum.StrEnum):
    """Calls on agent sessions."""

    OPEN = "open"
    GET = "look"
    RENEW = "renew"
    CLOSE = "close"


class KeyCall(enum.StrEnum):
    """Calls on the keys of the store."""

    LIST = "list"
    CREATE = "create"
    GET = "get"
    UPDATE = "update"
    ROTATE = "rotate"
    REVOKE = "revoke"


class AuditCall(enum.StrEnum):
    """Calls on the audit record."""

    LIST = "audit"


class OperatorCall(enum.StrEnum):
    """What operators ask of a running application and change in it."""

    STATUS = "status"
    QUOTA = "quota"
    DEFRAG_PLAN = "defrag_plan"
    DEFRAG = "defrag"
    DRAIN = "drain"
    DRAIN_LOOK = "drain_look"
    LOGS = "logs"


class RecordCall(enum.StrEnum):
    """What is asked of the request log, the history and the events."""

    REQUESTS = "requests"
    HISTORY = "history"
    EVENTS = "events"


class DeployCall(enum.StrEnum):
    """Deployments that keys ask for."""

    DEPLOY = "deploy"
    LIST = "list_deploys"
    GET = "deploy_look"


class FileCall(enum.StrEnum):
    """Calls on the files of batches."""

    UPLOAD = "upload"
    LIST = "list"
    GET = "get"
    CONTENT = "content"
    DELETE = "delete"


class BatchCall(enum.StrEnum):
    """Calls on batches."""

    CREATE = "create"
    LIST = "list"
    GET = "get"
    CANCEL = "cancel"


class ResponseCall(enum.StrEnum):
    """Calls on stored responses."""

    GET = "response"
    DELETE = "delete_response"
    CANCEL = "cancel_response"
    ITEMS = "response_items"


RouteTarget = (
    Operation
    | LocalCall
    | SessionCall
    | KeyCall
    | AuditCall
    | OperatorCall
    | DeployCall
    | RecordCall
    | FileCall
    | BatchCall
    | ResponseCall
    | ConsoleCall
)


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """The target of a request. `argument` is the id of the model, session, request, key, replica or node,
    deployment, file, batch or response in the path, or the name of a file of the console."""

    target: RouteTarget
    argument: str = ""


ROUTES: tuple[tuple[str, str, RouteTarget], ...] = (
    ("POST", "/v1/chat/completions", Operation.CHAT),
    ("POST", "/v1/completions", Operation.COMPLETION),
    ("POST", "/v1/responses", Operation.RESPONSES),
    ("POST", "/v1/responses/input_tokens", Operation.INPUT_TOKENS),
    ("POST", "/v1/messages", Operation.MESSAGES),  # Anthropic's, as the next
    ("POST", "/v1/messages/count_tokens", Operation.MESSAGE_TOKENS),
    ("POST", "/v1/embeddings", Operation.EMBEDDING),
    ("POST", "/v2/embed", Operation.EMBED),  # Cohere's
    ("POST", "/pooling", Operation.POOLING),
    ("POST", "/classify", Operation.CLASSIFY),
    ("POST", "/v1/score", Operation.SCORE),
    ("POST", "/score", Operation.SCORE),  # vLLM's own place of it
    ("POST", "/v1/rerank", Operation.RERANK),  # Jina's
    ("POST", "/v2/rerank", Operation.RERANK),  # Cohere's
    ("POST", "/rerank", Operation.RERANK),
    ("POST", "/v1/audio/transcriptions", Operation.TRANSCRIPTION),
    ("POST", "/v1/audio/translations", Operation.TRANSLATION),
    ("POST", "/tokenize", Operation.TOKENIZE),
    ("POST", "/detokenize", Operation.DETOKENIZE),
    ("POST", "/v1/sessions", SessionCall.OPEN),
    ("POST", "/v1/files", FileCall.UPLOAD),
    ("GET", "/v1/files", FileCall.LIST),
    ("POST", "/v1/batches", BatchCall.CREATE),
    ("GET", "/v1/batches", BatchCall.LIST),
    ("GET", "/v1/models", LocalCall.MODELS),
    ("GET", "/tokenizer_info", Operation.TOKENIZER_INFO),
    ("GET", "/version", LocalCall.VERSION),
    ("GET", "/health", LocalCall.HEALTH),
    ("GET", "/ready", LocalCall.READY),
    ("GET", "/metrics", LocalCall.METRICS),
    ("GET", "/admin/status", OperatorCall.STATUS),
    ("GET", "/admin/quota", OperatorCall.QUOTA),
    ("GET", "/admin/defrag", OperatorCall.DEFRAG_PLAN),
    ("POST", "/admin/defrag", OperatorCall.DEFRAG),
    ("POST", "/admin/drains", OperatorCall.DRAIN),
    ("GET", "/admin/logs", OperatorCall.LOGS),
    ("GET", "/admin/requests", RecordCall.REQUESTS),
    ("GET", "/admin/history", RecordCall.HISTORY),
    ("GET", "/admin/events", RecordCall.EVENTS),
    ("POST", "/admin/deploys", DeployCall.DEPLOY),
    ("GET", "/admin/deploys", DeployCall.LIST),
    ("GET", "/admin/usage", LocalCall.USAGE),
    ("GET", "/admin/audit", AuditCall.LIST),
    ("GET", "/admin/keys", KeyCall.LIST),
    ("POST", "/admin/keys", KeyCall.CREATE),
    ("GET", "/console", ConsoleCall.FILE),
    ("POST", "/console/session", ConsoleCall.LOGIN),
    ("GET", "/console/session", ConsoleCall.LOGGED_IN),
    ("DELETE", "/console/session", ConsoleCall.LOGOUT),
    ("GET", "/console/live", ConsoleCall.LIVE),
)
_ID_ROUTES: tuple[tuple[str, str, Mapping[str, RouteTarget]], ...] = (  # what comes before and after an id; methods
    ("/v1/models/", "", {"GET": LocalCall.MODEL, "HEAD": LocalCall.MODEL}),
    ("/admin/requests/", "", {"GET": LocalCall.REQUEST, "HEAD": LocalCall.REQUEST}),
    ("/admin/drains/", "", {"GET": OperatorCall.DRAIN_LOOK, "HEAD": OperatorCall.DRAIN_LOOK}),
    ("/admin/deploys/", "", {"GET": DeployCall.GET, "HEAD": DeployCall.GET}),
    ("/admin/keys/", "/rotate", {"POST": KeyCall.ROTATE}),
    (
        "/admin/keys/",
        "",
        {"GET": KeyCall.GET, "HEAD": KeyCall.GET, "POST": KeyCall.UPDATE, "DELETE": KeyCall.REVOKE},
    ),
    ("/v1/files/", "/content", {"GET": FileCall.CONTENT, "HEAD": FileCall.CONTENT}),
    ("/v1/files/", "", {"GET": FileCall.GET, "HEAD": FileCall.GET, "DELETE": FileCall.DELETE}),
    ("/v1/batches/", "/cancel", {"POST": BatchCall.CANCEL}),
    ("/v1/batches/", "", {"GET": BatchCall.GET, "HEAD": BatchCall.GET}),
    ("/v1/responses/", "/input_items", {"GET": ResponseCall.ITEMS, "HEAD": ResponseCall.ITEMS}),
    ("/v1/responses/", "/cancel", {"POST": ResponseCall.CANCEL}),
    (
        "/v1/responses/",
        "",
        {"GET": ResponseCall.GET, "HEAD": ResponseCall.GET, "DELETE": ResponseCall.DELETE},
    ),
    ("/console/", "", {"GET": ConsoleCall.FILE, "HEAD": ConsoleCall.FILE}),
    ("/v1/sessions/", "/renew", {"POST": SessionCall.RENEW}),
    ("/v1/sessions/", "", {"GET": SessionCall.GET, "HEAD": SessionCall.GET, "DELETE": SessionCall.CLOSE}),
)
# Paths of OpenAI's API that no model here can answer, with what can.
NOT_SERVED = {
    "/v1/moderations": "no model here knows OpenAI's categories; a classifier of your own answers /classify",
}
_SLASHES = re.compile("/{2,}")
_TABLE = {
    path: {
        one: HttpRoute(target)
        for method, other, target in ROUTES
        if other == path
        for one in (("GET", "HEAD") if method == "GET" else (method,))
    }
    for _, path, _ in ROUTES
}


def resolve(method: str, path: str) -> HttpRoute:
    """The route for method and path. `path` is decoded and without the query, as in ASGI's scope.

    Raises:
        NotFound: no such path; code "unknown_url".
        MethodNotAllowed: the path exists, but not with this method.
    """
    plain = path
    routes = _TABLE.get(path)
    if routes is None:
        plain = _SLASHES.sub("/", path).removesuffix("/")
        routes = _TABLE.get(plain) or _with_id(plain)
    if method in routes:
        return routes[method]
    if routes:
        error = MethodNotAllowed(
            f"{method[:20]} is not a method of {plain[:SHOWN_PATH_CHARS]}, it has {', '.join(routes)}"
        )
        error.allow = tuple(routes)
        raise error
    if plain in NOT_SERVED:
        raise NotFound(f"{plain} is not served: {NOT_SERVED[plain]}", code="unknown_url")
    near = "/v1" + plain
    hint = f"; did you mean {near}?" if near in _TABLE else ""
    raise NotFound(f"there is no {path[:SHOWN_PATH_CHARS]} here{hint}", code="unknown_url")


def is_anthropic(path: str) -> bool:
    """Whether a path is in Anthropic's API, there or not: its clients read errors in that form."""
    plain = _SLASHES.sub("/", path)
    return plain == ANTHROPIC_ROOT or plain.startswith(f"{ANTHROPIC_ROOT}/")


def permitted(route: HttpRoute, identity: Identity) -> HttpRoute:
    """The route. Raises Forbidden: a scraper's key, which reads metrics alone. Of a model it is told as any key."""
    if identity.deploy and isinstance(route.target, DeployCall):
        return route
    if (
        identity.reads_metrics_alone
        and not isinstance(route.target, Operation)
        and route.target not in OPEN_TO_ALL_KEYS
    ):
        raise Forbidden(
            "this key reads metrics alone: name the models that it may use too (auth.keys[].models)",
            code="model_not_allowed",
        )
    return route


def _with_id(plain: str) -> dict[str, HttpRoute]:
    """The routes by method of a path with an id in it; empty: there are none."""
    for before, after, targets in _ID_ROUTES:
        rest = plain.removeprefix(before)
        if rest != plain and rest.endswith(after):
            return {method: HttpRoute(target, rest.removesuffix(after)) for method, target in targets.items()}
    return {}
