"""Gives a request for a route that needs no engine to the routes of its subject."""

from __future__ import annotations

import functools
from collections.abc import Callable

from serve_app.http.api.audit_routes import AuditRoutes
from serve_app.http.api.batch_routes import BatchRoutes
from serve_app.http.api.file_routes import FileRoutes
from serve_app.http.api.key_routes import KeyRoutes
from serve_app.http.api.operator_routes import OperatorRoutes
from serve_app.http.api.router_parts import RouterParts
from serve_app.http.api.routes import AuditCall, BatchCall, FileCall, HttpRoute, KeyCall, OperatorCall, SessionCall
from serve_app.http.api.session_routes import SessionRoutes
from serve_app.http.body import HeaderMap, Receive, read_object
from serve_app.http.error_responses import Answer
from serve_app.http.keys import KeyRing
from serve_app.http.multipart import FormReader
from serve_app.http.response import PieceAnswer
from serve_app.settings import Settings
from serve_app.types import Identity


class ApiRoutes:
    """All of them.

    Args:
        keys, settings: those that hold now.
    """

    def __init__(self, parts: RouterParts, keys: Callable[[], KeyRing], settings: Callable[[], Settings]) -> None:
        self._sessions = SessionRoutes(parts.sessions, parts.models)
        self._keys = KeyRoutes(parts.follower, keys, settings)
        self.audit = AuditRoutes(lambda: parts.follower.store, settings)
        self._operators = OperatorRoutes(parts.cluster, lambda: parts.follower.store)
        self._files = FileRoutes(parts.batches, settings, parts.body_thread)
        self._batches = BatchRoutes(parts.batches, settings)
        self._parts = parts
        self._settings = settings

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
            return await self.audit.answer(identity, query)
        if isinstance(route.target, OperatorCall):
            return await self._operators.answer(route, identity, query, read_body)
        if isinstance(route.target, FileCall):
            open_form = functools.partial(FormReader, headers, receive)
            return await self._files.answer(route, identity, query, open_form)
        if isinstance(route.target, BatchCall):
            return await self._batches.answer(route, identity, query, headers, read_body)
        return await self._parts.local_routes.answer(route, identity, query, headers.get(b"accept", b""))
