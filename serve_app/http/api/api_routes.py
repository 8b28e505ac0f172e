"""Gives a request for a route that needs no engine to the routes of its subject."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.http.api.audit_routes import AuditRoutes
from serve_app.http.api.batch_routes import BatchRoutes
from serve_app.http.api.deploy_routes import DeployRoutes
from serve_app.http.api.file_routes import FileRoutes
from serve_app.http.api.key_routes import KeyRoutes
from serve_app.http.api.operator_routes import OperatorRoutes
from serve_app.http.api.record_routes import RecordRoutes
from serve_app.http.api.response_routes import ResponseRoutes
from serve_app.http.api.router_parts import RouterParts
from serve_app.http.api.routes import (
    AuditCall,
    BatchCall,
    DeployCall,
    FileCall,
    HttpRoute,
    KeyCall,
    OperatorCall,
    RecordCall,
    ResponseCall,
    SessionCall,
)
from serve_app.http.api.session_routes import SessionRoutes
from serve_app.http.api.store_sweep import StoreSweep
from serve_app.http.body import HeaderMap, Receive, read_object
from serve_app.http.error_responses import Answer
from serve_app.http.keys import KeyRing
from serve_app.http.multipart import FormReader
from serve_app.http.response import HttpExchange, PieceAnswer
from serve_app.settings import Settings
from serve_app.types import Identity


class ApiRoutes:
    """All of them.

    Args:
        keys, settings: those that hold now.
    """

    def __init__(self, parts: RouterParts, keys: Callable[[], KeyRing], settings: Callable[[], Settings]) -> None:
        self._sessions = SessionRoutes(parts.sessions, parts.models, parts.names)
        self._keys = KeyRoutes(parts.follower, keys, settings)
        self._audit = AuditRoutes(lambda: parts.follower.store)
        self.sweep = StoreSweep(lambda: parts.follower.store, settings)
        self._responses = ResponseRoutes(lambda: parts.follower.store)
        self._operators = OperatorRoutes(parts.cluster, lambda: parts.follower.store)
        self._records = RecordRoutes(parts.cluster, parts.ask_routers)
        self._deploys = DeployRoutes(parts.cluster)
        self._files = FileRoutes(parts.batches, settings, parts.body_thread)
        self._batches = BatchRoutes(parts.batches, settings)
        self._parts = parts
        self._settings = settings

    async def has_streamed(
        self, route: HttpRoute, identity: Identity, scope: Mapping[str, Any], exchange: HttpExchange
    ) -> bool:
        """Answer a request for the stream of a stored response; False: it is no such request. Raises as `answer`."""
        if route.target is not ResponseCall.GET or scope["method"] != "GET":
            return False
        return await self._responses.has_streamed(route.argument, identity, scope.get("query_string", b""), exchange)

    async def answer(
        self, route: HttpRoute, identity: Identity, headers: HeaderMap, query: bytes, receive: Receive
    ) -> Answer | PieceAnswer:
        """The answer; raises as the routes of its subject, and as `read_object`."""
        settings = self._settings()
        read_body = functools.partial(read_object, headers, receive, settings.http, self._parts.body_thread)
        if isinstance(route.target, SessionCall):
            body = (await read_body())[0] if route.target is SessionCall.OPEN else {}
            session_id = headers.get(b"x-session-id")
            return await self._sessions.answer(route, identity, session_id, body, settings.sessions.per_tenant)
        if isinstance(route.target, KeyCall):
            changes = route.target is KeyCall.UPDATE
            return await self._keys.answer(route, identity, functools.partial(read_body, with_nulls=changes))
        if isinstance(route.target, AuditCall):
            return await self._audit.answer(identity, query)
        if isinstance(route.target, OperatorCall):
            return await self._operators.answer(route, identity, query, read_body)
        if isinstance(route.target, RecordCall):
            return await self._records.answer(route, identity, query)
        if isinstance(route.target, DeployCall):
            return await self._deploys.answer(route, identity, functools.partial(read_body, with_nulls=True))
        if isinstance(route.target, FileCall):
            open_form = functools.partial(FormReader, headers, receive)
            return await self._files.answer(route, identity, query, open_form)
        if isinstance(route.target, BatchCall):
            return await self._batches.answer(route, identity, query, headers, read_body)
        if isinstance(route.target, ResponseCall):
            return await self._responses.answer(route, identity, query)
        return await self._parts.local_routes.answer(route, identity, query, headers.get(b"accept", b""))
