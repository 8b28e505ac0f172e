"""The ASGI application of a router replica: finds the route of a request, and answers it.

Invariant: nothing is answered without a key or token, but for the files of the console and the way to log in there; a
request refused here is counted, and leaves no receipt, or strangers could push the others out. Of a header sent twice,
the last one counts.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from serve_app.errors import TASK_ENDS, NotFound, ServeAppError, Unauthorized
from serve_app.http.api import ApiRoutes, RouterParts, is_anthropic, not_an_operator, permitted, resolve
from serve_app.http.asgi_bridge import ROW_OWNER
from serve_app.http.body import HeaderMap, Receive
from serve_app.http.console import OPEN_CALLS, Console, ConsoleCall, is_of_console
from serve_app.http.cors import Handler, with_cors
from serve_app.http.engine_calls import EngineCalls
from serve_app.http.keys import KeyRing
from serve_app.http.malformed_requests import check_headers
from serve_app.http.response import SSE_HEADERS, HttpExchange, PieceAnswer, Send
from serve_app.settings import Settings
from serve_app.system import RecordBounds
from serve_app.types import Identity, Operation

logger = logging.getLogger("ray.serve")

DAY_S = 86_400.0
Scope = MutableMapping[str, Any]


class RouterApp:
    """The ASGI callable.

    Args:
        settings: the whole configuration.

    Raises:
        ConfigError: there is no key; so does `configure`, which changes nothing then.
    """

    def __init__(self, settings: Settings, parts: RouterParts) -> None:
        self.parts = parts
        self._calls = EngineCalls(parts, lambda: self.keys)
        self.estimator = self._calls.estimator
        self.open_requests = self._calls.open_requests
        self.shadows = self._calls.shadows
        self.api = ApiRoutes(parts, lambda: self.keys, lambda: self.settings)
        self.console = Console(
            parts.salt_secret, parts.live, lambda: self.keys, lambda: self.settings, parts.body_thread
        )
        parts.metrics.count_pending = lambda: parts.usage.meter.pending
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        issuer = self.parts.issuer
        self.keys = KeyRing(settings.auth, self.parts.follower.stored, follower=issuer)
        issuer.configure(settings.auth.jwt)
        self.settings = settings
        self.parts.names.configure(route.route() for route in settings.routes)
        self._calls.configure(settings)
        self.parts.metrics.configure(settings.metrics.named_tenants, self.keys.count_tenants, lambda: issuer.age_s)
        bounds = RecordBounds(settings.records.keep_days * DAY_S, settings.records.max_bytes)
        self.parts.log.configure(bounds, settings.metrics.named_tenants, self.keys.count_tenants)
        origins = settings.http.cors_origins
        self._handler: Handler = with_cors(self._handle_http, origins) if origins else self._handle_http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._handler(scope, receive, send)
        elif scope["type"] == "lifespan":  # the router replica's constructor does the set-up
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()  # Serve sends it once the last request has ended
            await self.parts.usage.close()
            await self._calls.close()
            await self.parts.log.close()
            await send({"type": "lifespan.shutdown.complete"})
        else:  # a websocket: not supported
            await send({"type": "websocket.close", "code": 1000})

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(send)
        if is_anthropic(scope["path"]):
            exchange.operation = Operation.MESSAGES  # a refusal before the route is known has its form, too
        try:
            headers = dict(scope["headers"])
            if is_of_console(scope["path"]) and await self._has_answered_open(scope, headers, receive, exchange):
                return
            identity = await self.keys.settled(lambda: self._identify(scope, headers))
            check_headers(scope, headers)
            route = permitted(resolve(scope["method"], scope["path"]), identity)
            if isinstance(route.target, ConsoleCall):
                await self._answer_console(route.target, identity, scope, headers, exchange)
                return
            if isinstance(route.target, Operation):
                query = self._operator_s_query(identity, scope) if route.target is Operation.TOKENIZER_INFO else None
                owner = scope.get(ROW_OWNER)
                response_id = "" if owner is None else owner.response_id
                await self._calls.run(route.target, identity, headers, receive, exchange, query, response_id)
                return
            if await self.api.has_streamed(route, identity, scope, exchange):
                return
            answer = await self.api.answer(route, identity, headers, scope.get("query_string", b""), receive)
            if isinstance(answer, PieceAnswer):
                await exchange.send_pieces(answer, is_head=scope["method"] == "HEAD")
            else:
                await exchange.send_answer(*answer, is_head=scope["method"] == "HEAD")
        except Unauthorized as error:
            self.parts.metrics.count_unauthorized(error.failure)
            await exchange.send_error(error)
        except ServeAppError as error:
            await exchange.send_error(error)
        except TASK_ENDS:
            raise
        except BaseException:
            logger.exception(
                "Request %s failed inside the router and got a 500. Report this traceback", exchange.request_id
            )
            await exchange.send_error(ServeAppError("the server failed; its log says more"))

    def _identify(self, scope: Scope, headers: HeaderMap) -> Identity:
        return self.console.identify(scope["method"], scope["path"], headers, scope.get(ROW_OWNER))

    async def _has_answered_open(
        self, scope: Scope, headers: HeaderMap, receive: Receive, exchange: HttpExchange
    ) -> bool:
        """Answer a call of the console that needs no key; False: it needs one. Raises NotFound: there is no console."""
        if not self.settings.http.console:
            raise NotFound("there is no console here (http.console)", code="unknown_url")
        route = resolve(scope["method"], scope["path"])
        if not isinstance(route.target, ConsoleCall) or route.target not in OPEN_CALLS:
            return False
        check_headers(scope, headers)
        answer = await self.console.answer_open(route.target, scope["path"], route.argument, headers, receive)
        await exchange.send_answer(*answer, is_head=scope["method"] == "HEAD")
        return True

    async def _answer_console(
        self, call: ConsoleCall, identity: Identity, scope: Scope, headers: HeaderMap, exchange: HttpExchange
    ) -> None:
        if call is ConsoleCall.LIVE and scope["method"] == "GET":
            await self.console.stream_live(lambda: self._identify(scope, headers), exchange)
        elif call is ConsoleCall.LIVE:
            await exchange.send_answer(200, SSE_HEADERS, b"", is_head=True)
        else:
            await exchange.send_answer(*self.console.logged_in(identity), is_head=scope["method"] == "HEAD")

    def _operator_s_query(self, identity: Identity, scope: Scope) -> dict[str, Any]:
        """The fields of the query; without `model`, the only model there is. Raises Forbidden."""
        if not identity.admin:
            raise not_an_operator()
        query: dict[str, Any] = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        return {"model": next(iter(self.parts.models)), **query} if len(self.parts.models) == 1 else query
