"""The ASGI application of a router replica: finds the route of a request, and answers it.

Invariant: nothing is answered without a key; a request refused here is counted, and leaves no receipt, or strangers
could push the others out. Of a header sent twice, the last one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from serve_app.core.receipts import Receipts
from serve_app.errors import TASK_ENDS, ServeAppError, Unauthorized
from serve_app.http.api import ApiRoutes, BatchLane, LocalRoutes, not_an_operator, permitted, resolve
from serve_app.http.asgi_bridge import ROW_OWNER
from serve_app.http.body import BodyThread, Receive
from serve_app.http.cors import Handler, with_cors
from serve_app.http.engine_calls import EngineCalls
from serve_app.http.keyed import KeyedRuns
from serve_app.http.keys import KeyRing
from serve_app.http.malformed_requests import check_headers
from serve_app.http.response import HttpExchange, PieceAnswer, Send
from serve_app.http.stored_keys import KeyFollower
from serve_app.router import LimitClient, ModelRouter, RouterMetrics, SessionClient, UsageReporter
from serve_app.settings import Settings
from serve_app.types import Identity, Operation, Outcome, RequestClass

logger = logging.getLogger("ray.serve")

Scope = MutableMapping[str, Any]


class RouterApp:
    """The ASGI callable.

    Args:
        settings: the whole configuration.
        models: the models served now, by name.
        salt_secret: makes each tenant's prefix-cache salt; the same in every router replica.
        session_client: finds and opens agent sessions.
        local_routes: answers the routes that need no engine.
        receipts: keeps the receipts of this router's requests.
        limits: charges requests against the limits of keys and tenants, together with all routers.
        usage: counts what they use.
        keyed_runs: runs the requests with an Idempotency-Key.
        follower: follows the keys of the store; None: there is none.
        batches: where batches and their files are; None: nowhere.

    Raises:
        ConfigError: there is no key; so does `configure`, which changes nothing then.
    """

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ModelRouter],
        metrics: RouterMetrics,
        salt_secret: bytes,
        session_client: SessionClient,
        local_routes: LocalRoutes,
        receipts: Receipts,
        limits: LimitClient,
        usage: UsageReporter,
        keyed_runs: KeyedRuns,
        follower: KeyFollower | None = None,
        batches: BatchLane | None = None,
    ) -> None:
        self.models = models
        self._metrics = metrics
        self._stored = None if follower is None else follower.stored
        self.usage = usage
        self.receipts = receipts
        body_thread = BodyThread()
        self._calls = EngineCalls(
            models,
            metrics,
            salt_secret,
            session_client,
            receipts,
            limits,
            usage,
            keyed_runs,
            body_thread,
            lambda: self.keys,
        )
        self.estimator = self._calls.estimator
        self._api = ApiRoutes(
            session_client,
            models,
            follower,
            batches,
            local_routes,
            body_thread,
            lambda: self.keys,
            lambda: self.settings,
        )
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Apply changed settings to requests that arrive from now on."""
        self.keys = KeyRing(settings.auth, self._stored)
        self.settings = settings
        self._calls.configure(settings)
        origins = settings.http.cors_origins
        self._handler: Handler = with_cors(self._handle_http, origins) if origins else self._handle_http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._handler(scope, receive, send)
        elif scope["type"] == "lifespan":  # the router replica's constructor does the set-up
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()  # Serve sends it once the last request has ended
            await self.usage.close()
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
            answer = await self._api.answer(route, identity, headers, scope.get("query_string", b""), receive)
            if isinstance(answer, PieceAnswer):
                await exchange.send_pieces(answer, is_head=scope["method"] == "HEAD")
            else:
                await exchange.send_answer(*answer, is_head=scope["method"] == "HEAD")
        except Unauthorized as error:
            self._metrics.count_ended("", "", RequestClass.NORMAL, Outcome.UNAUTHORIZED)
            await exchange.send_error(error)
        except ServeAppError as error:
            await exchange.send_error(error)
        except TASK_ENDS:
            raise
        except BaseException:
            logger.exception("request %s failed inside the router", exchange.request_id)
            await exchange.send_error(ServeAppError("the server failed; its log says more"))

    def _operator_s_query(self, identity: Identity, scope: Scope) -> dict[str, Any]:
        """The fields of the query; without `model`, the only model there is. Raises Forbidden."""
        if not identity.admin:
            raise not_an_operator()
        query: dict[str, Any] = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        return {"model": next(iter(self.models)), **query} if len(self.models) == 1 else query
