"""The agent sessions as a router knows them: every one of its tenants', whichever router it was opened through.

The quota actor tells all routers which sessions are open, so an id costs no question, whatever it is. What is asked of
the actor here is to open a session, to renew, to show and to close it.

Invariant: a tenant's id never finds another tenant's session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from serve_app.core.memory import Session, SessionAsk, name_of
from serve_app.core.quota import RECOVERING, RECOVERY_S
from serve_app.core.shared_queue import SessionOpened
from serve_app.errors import ServeAppError, Unavailable

ANSWER_S = 5.0  # for all else; the actor answers in milliseconds
AGAIN_S = 1.0  # when a caller may try again after no answer
RETRY_S = 0.25  # between attempts to open a session while the actor is away
PATIENCE_S = RECOVERY_S + 3.0  # of an opening that would not wait otherwise: Ray restarts the actor, it asks everybody
AWAY = "quota_away"

Call = Callable[..., Awaitable[Any]]


class SessionBook:
    """See the module.

    Args:
        call: a method of the quota actor by name, and its arguments.
        sessions: those that are open, by name; always the present ones.
        away: what `call` raises while the actor is away.
    """

    def __init__(
        self, call: Call, sessions: Mapping[str, SessionOpened], away: tuple[type[BaseException], ...]
    ) -> None:
        self._call, self._sessions = call, sessions
        self._away: tuple[type[BaseException], ...] = (TimeoutError, *away)
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, tenant: str, session_id: str, model: str) -> SessionOpened | None:
        """The tenant's open session of this id with this model; None: there is none."""
        session = self._sessions.get(name_of(tenant, session_id))
        return session if session is not None and session.model == model else None

    async def open(self, ask: SessionAsk, wait_s: float) -> Session:
        """Open a session, waiting for room so many seconds. A caller that leaves meanwhile takes the question back.

        Raises:
            What `core.shared_queue.session_admission.Openings.ask` does; Unavailable: the actor stays away, or no
            engine runs.
        """
        began = time.monotonic()
        while True:
            left_s = max(0.0, began + wait_s - time.monotonic())
            asked = dataclasses.replace(ask, wait_until=left_s or None)
            try:
                opened: Session = await self._speak(ANSWER_S + left_s, "open_session", asked)
                return opened
            except Unavailable as error:
                late = time.monotonic() >= began + max(wait_s, PATIENCE_S)
                if error.code not in (AWAY, RECOVERING) or late:
                    raise
                await asyncio.sleep(RETRY_S)
            except asyncio.CancelledError:
                task = asyncio.get_running_loop().create_task(self._withdraw(ask.session_id), name="session-withdrawn")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                raise

    async def renew(self, tenant: str, session_id: str) -> Session:
        """Raises NotFound, Unavailable; so do the others."""
        session: Session = await self._speak(ANSWER_S, "renew_session", name_of(tenant, session_id))
        return session

    async def look(self, tenant: str, session_id: str) -> Session:
        """The session as it is; that does not renew it."""
        session: Session = await self._speak(ANSWER_S, "look_session", name_of(tenant, session_id))
        return session

    async def close(self, tenant: str, session_id: str) -> None:
        """Give its tokens back; requests of it that run go on."""
        await self._speak(ANSWER_S, "close_session", name_of(tenant, session_id))

    async def _withdraw(self, name: str) -> None:
        with contextlib.suppress(ServeAppError):  # it did not wait any more, or the actor has forgotten with its death
            await self._speak(ANSWER_S, "close_session", name)

    async def _speak(self, answer_s: float, method: str, *arguments: Any) -> Any:
        """A call of the actor; its own errors come as they were raised there."""
        try:
            async with asyncio.timeout(answer_s):
                return await self._call(method, *arguments)
        except ServeAppError as error:
            raise getattr(error, "cause", error) from None  # Ray's own class around ours
        except self._away as error:
            raise Unavailable(
                f"the quota actor does not answer: {type(error).__name__}", code=AWAY, retry_after_s=AGAIN_S
            ) from None
