"""Gives a request for a route that needs no engine to the routes of its subject."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from serve_app.http.api.batch_lane import BatchLane
from serve_app.http.api.batch_routes import BatchRoutes
from serve_app.http.api.file_routes import FileRoutes
from serve_app.http.api.key_routes import KeyRoutes
from serve_app.http.api.local_routes import LocalRoutes
from serve_app.http.api.routes import BatchCall, FileCall, HttpRoute, KeyCall, SessionCall
from serve_app.http.api.session_routes import SessionRoutes
from serve_app.http.body import BodyThread, HeaderMap, Receive, read_object
from serve_app.http.error_responses import Answer
from serve_app.http.keys import KeyRing
from serve_app.http.multipart import FormReader
from serve_app.http.response import PieceAnswer
from serve_app.http.stored_keys import KeyFollower
from serve_app.router import ModelRouter, SessionClient
from serve_app.settings import Settings
from serve_app.types import Identity


class ApiRoutes:
    """All of them.

    Args:
        session_client: finds and opens agent sessions.
        models: the models served now, by name.
        follower: follows the keys of the store; None: there is none.
        batches: where batches and their files are; None: nowhere.
        local_routes: what the router answers by itself.
        body_thread: of this router.
        keys, settings: those that hold now.
    """

    def __init__(
        self,
        session_client: SessionClient,
        models: Mapping[str, ModelRouter],
        follower: KeyFollower | None,
        batches: BatchLane | None,
        local_routes: LocalRoutes,
        body_thread: BodyThread,
        keys: Callable[[], KeyRing],
        settings: Callable[[], Settings],
    ) -> None:
        self._sessions = SessionRoutes(session_client, models)
        self._keys = KeyRoutes(follower, keys, settings)
        self._files = FileRoutes(batches, settings, body_thread)
        self._batches = BatchRoutes(batches, settings)
        self._local = local_routes
        self._body_thread = body_thread
        self._settings = settings

    async def answer(
        self, route: HttpRoute, identity: Identity, headers: HeaderMap, query: bytes, receive: Receive
    ) -> Answer | PieceAnswer:
        """The answer; raises as the routes of its subject, and as `read_object`."""
        settings = self._settings()
        read_body = functools.partial(read_object, headers, receive, settings.http, self._body_thread)
        if isinstance(route.target, SessionCall):
            body = (await read_body())[0] if route.target is SessionCall.OPEN else {}
            session_id = headers.get(b"x-session-id")
            return await self._sessions.answer(route, identity, session_id, body, settings.sessions.per_tenant)
        if isinstance(route.target, KeyCall):
            changes = route.target is KeyCall.UPDATE
            return await self._keys.answer(route, identity, functools.partial(read_body, with_nulls=changes))
        if isinstance(route.target, FileCall):
            open_form = functools.partial(FormReader, headers, receive)
            return await self._files.answer(route, identity, query, open_form)
        if isinstance(route.target, BatchCall):
            return await self._batches.answer(route, identity, query, headers, read_body)
        return await self._local.answer(route, identity, query)
