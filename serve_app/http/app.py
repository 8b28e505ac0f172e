"""The ASGI application of a router replica: finds the route of a request, and answers it.

Invariant: nothing is answered without a key; a request refused here is counted, and leaves no receipt, or strangers
could push the others out. Of a header sent twice, the last one counts.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from serve_app.errors import TASK_ENDS, ServeAppError, Unauthorized
from serve_app.http.api import ApiRoutes, RouterParts, not_an_operator, permitted, resolve
from serve_app.http.asgi_bridge import ROW_OWNER
from serve_app.http.body import Receive
from serve_app.http.cors import Handler, with_cors
from serve_app.http.engine_calls import EngineCalls
from serve_app.http.keys import KeyRing
from serve_app.http.malformed_requests import check_headers
from serve_app.http.response import HttpExchange, PieceAnswer, Send
from serve_app.settings import Settings
from serve_app.types import Identity, Operation

logger = logging.getLogger("ray.serve")

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
        self.api = ApiRoutes(parts, lambda: self.keys, lambda: self.settings)
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        self.keys = KeyRing(settings.auth, self.parts.follower.stored)
        self.settings = settings
        self._calls.configure(settings)
        self.parts.metrics.configure(settings.metrics.named_tenants, self.keys.count_tenants)
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
            await send({"type": "lifespan.shutdown.complete"})
        else:  # a websocket: not supported
            await send({"type": "websocket.close", "code": 1000})

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(send)
        try:
            headers = dict(scope["headers"])
            identity = self.keys.identify(headers, scope.get(ROW_OWNER))
            check_headers(scope, headers)
            route = permitted(resolve(scope["method"], scope["path"]), identity)
            if isinstance(route.target, Operation):
                query = self._operator_s_query(identity, scope) if route.target is Operation.TOKENIZER_INFO else None
                await self._calls.run(route.target, identity, headers, receive, exchange, query)
                return
            answer = await self.api.answer(route, identity, headers, scope.get("query_string", b""), receive)
            if isinstance(answer, PieceAnswer):
                await exchange.send_pieces(answer, is_head=scope["method"] == "HEAD")
            else:
                await exchange.send_answer(*answer, is_head=scope["method"] == "HEAD")
        except Unauthorized as error:
            self.parts.metrics.count_unauthorized()
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

    def _operator_s_query(self, identity: Identity, scope: Scope) -> dict[str, Any]:
        """The fields of the query; without `model`, the only model there is. Raises Forbidden."""
        if not identity.admin:
            raise not_an_operator()
        query: dict[str, Any] = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        return {"model": next(iter(self.parts.models)), **query} if len(self.parts.models) == 1 else query
