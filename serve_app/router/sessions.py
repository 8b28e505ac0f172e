"""The agent sessions as a router knows them: those of all tenants, opened through any router.

The quota actor reports the open sessions to all routers, so finding an id needs no call. Calls to the actor open,
renew, show and close a session.

Invariant: a tenant's id never finds another tenant's session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from serve_app.core.memory import Session, SessionEntry, SessionRequest, session_name
from serve_app.core.quota import RECOVERING
from serve_app.core.times import ACTOR_RETRY_S, MIN_OPEN_WAIT_S, SESSION_ANSWER_S
from serve_app.errors import QUOTA_AWAY, ServeAppError, Unavailable
from serve_app.ray_adapter import AWAY

RETRY_AFTER_S = 1.0  # reported to a client whose call got no answer

CallActor = Callable[..., Awaitable[Any]]


class SessionClient:
    """Finds the open sessions and calls the quota actor for changes.

    Args:
        call: calls a method of the quota actor by name, with its arguments; raises `AWAY` while it is unavailable.
        sessions: the open sessions by name; a live view.
    """

    def __init__(self, call: CallActor, sessions: Mapping[str, SessionEntry]) -> None:
        self._call = call
        self._sessions = sessions
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, tenant: str, session_id: str, model: str) -> SessionEntry | None:
        """The tenant's open session of this id on this model; None: there is none."""
        session = self._sessions.get(session_name(tenant, session_id))
        return session if session is not None and session.request.model == model else None

    async def open(self, ask: SessionRequest, wait_s: float) -> Session:
        """Open a session; wait for free capacity up to `wait_s` seconds. A cancelled caller withdraws its request.

        Raises:
            As the actor's session admission (`core.shared_queue.session_admission`); Unavailable: the actor stays
            unavailable, or no engine runs.
        """
        began = time.monotonic()
        while True:
            left_s = max(0.0, began + wait_s - time.monotonic())
            asked = dataclasses.replace(ask, wait_until=left_s or None)
            try:
                return await self._call_actor(SESSION_ANSWER_S + left_s, "open_session", asked)
            except Unavailable as error:
                late = time.monotonic() >= began + max(wait_s, MIN_OPEN_WAIT_S)
                if error.code not in (QUOTA_AWAY, RECOVERING) or late:
                    raise
                await asyncio.sleep(ACTOR_RETRY_S)
            except asyncio.CancelledError:
                task = asyncio.get_running_loop().create_task(self._withdraw(ask.session_id), name="session-withdrawn")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                raise

    async def renew(self, tenant: str, session_id: str) -> Session:
        """Extend the session's life. Raises NotFound, Unavailable; so do `get` and `close`."""
        return await self._call_actor(SESSION_ANSWER_S, "renew_session", session_name(tenant, session_id))

    async def get(self, tenant: str, session_id: str) -> Session:
        """The session's present state; does not renew it."""
        return await self._call_actor(SESSION_ANSWER_S, "look_session", session_name(tenant, session_id))

    async def close(self, tenant: str, session_id: str) -> None:
        """Close the session and release its tokens; its running requests go on."""
        await self._call_actor(SESSION_ANSWER_S, "close_session", session_name(tenant, session_id))

    async def _withdraw(self, name: str) -> None:
        with contextlib.suppress(ServeAppError):  # it no longer waits, or the actor restarted and lost it
            await self._call_actor(SESSION_ANSWER_S, "close_session", name)

    async def _call_actor(self, timeout_s: float, method: str, argument: SessionRequest | str) -> Session:
        """Call the actor; errors of its method are raised as they were raised there."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(method, argument)  # type: ignore[no-any-return]
        except ServeAppError as error:
            raise getattr(error, "cause", error) from None  # Ray's own class around ours
        except AWAY as error:
            raise Unavailable(
                f"the quota actor does not answer: {type(error).__name__}", code=QUOTA_AWAY, retry_after_s=RETRY_AFTER_S
            ) from None
