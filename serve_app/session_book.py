"""The agent sessions as a router knows them: every one of its tenants', whichever router it was opened through.

Rules
- The quota actor is the truth. A router asks it once about an id it does not know, and remembers the answer: that it
  names a session for `GOOD_S`, that it names none until some session is opened, of which every word of the actor tells.
- The question about a session is its renewal: whoever uses it keeps it.
- While the actor is away, what was known last is taken for true: the tokens are asked for apart from that, and a
  request whose session has ended is an ordinary one.

Invariant: a tenant's id never finds another tenant's session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.core.memory.quota import RECOVERING, RECOVERY_S
from serve_app.core.memory.sessions import Session, SessionAsk, name_of
from serve_app.errors import NotFound, ServeAppError, Unavailable

GOOD_S = 1.0  # a session that was closed or whose engine died is taken for one no longer than that
FIND_S = 0.25  # for the answer about an id, which takes a millisecond; then the request goes on without it
ANSWER_S = 5.0  # for all else; the actor answers in milliseconds
ASIDE_S = 1.0  # after no answer, for which nobody else is made to wait
RETRY_S = 0.25  # between attempts to open a session while the actor is away
PATIENCE_S = RECOVERY_S + 3.0  # of an opening that would not wait otherwise: Ray restarts the actor, it asks everybody
REMEMBERED = 10_000  # ids; beyond that all are forgotten, and asked about again
AWAY = "quota_away"

Call = Callable[..., Awaitable[Any]]


class SessionBook:
    """See the module.

    Args:
        call: a method of the quota actor by name, and its arguments.
        opened: changes whenever a session is opened anywhere, within a beat.
        away: what `call` raises while the actor is away.
    """

    def __init__(self, call: Call, opened: Callable[[], object], away: tuple[type[BaseException], ...]) -> None:
        self._call, self._opened, self._away = call, opened, away
        self._known: dict[str, tuple[Session, float]] = {}  # until when it is good
        self._none: dict[str, object] = {}  # ids that named no session when that many had been opened
        self._aside_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, tenant: str, session_id: str, model: str) -> Session | None:
        """The tenant's open session of this id with this model, renewed; None: there is none. Raises nothing."""
        name, opened, now = name_of(tenant, session_id), self._opened(), time.monotonic()
        session, good_until = self._known.get(name, (None, 0.0))
        if now >= good_until:
            if self._none.get(name) == opened:
                return None
            if now >= self._aside_until:
                session = await self._ask(name, opened, session)
        return session if session is not None and session.model == model else None

    async def _ask(self, name: str, opened: object, known: Session | None) -> Session | None:
        try:
            return self._remember(await self._speak(FIND_S, "renew_session", name))
        except NotFound:
            self._known.pop(name, None)
            if len(self._none) >= REMEMBERED:
                self._none.clear()
            self._none[name] = opened
            return None
        except ServeAppError:
            self._aside_until = time.monotonic() + ASIDE_S
            return known

    async def open(self, ask: SessionAsk, wait_s: float) -> Session:
        """Open a session, waiting for room so many seconds. A caller that leaves meanwhile takes the question back.

        Raises:
            What `core.memory.sessions.Sessions.ask` does; Unavailable: the actor stays away, or no engine runs.
        """
        began = time.monotonic()
        while True:
            left_s = max(0.0, began + wait_s - time.monotonic())
            asked = dataclasses.replace(ask, wait_until=left_s or None)
            try:
                return self._remember(await self._speak(ANSWER_S + left_s, "open_session", asked))
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
        return self._remember(await self._speak(ANSWER_S, "renew_session", name_of(tenant, session_id)))

    async def look(self, tenant: str, session_id: str) -> Session:
        """The session as it is; that does not renew it."""
        session: Session = await self._speak(ANSWER_S, "look_session", name_of(tenant, session_id))
        return session

    async def close(self, tenant: str, session_id: str) -> None:
        """Give its tokens back; requests of it that run go on."""
        name = name_of(tenant, session_id)
        self._known.pop(name, None)
        await self._speak(ANSWER_S, "close_session", name)

    async def _withdraw(self, name: str) -> None:
        with contextlib.suppress(ServeAppError):  # it did not wait any more, or the actor has forgotten with its death
            await self._speak(ANSWER_S, "close_session", name)

    def _remember(self, session: Session) -> Session:
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[session.session_id] = (session, time.monotonic() + GOOD_S)
        self._none.pop(session.session_id, None)
        return session

    async def _speak(self, answer_s: float, method: str, *arguments: Any) -> Any:
        """A call of the actor; its own errors come as they were raised there."""
        try:
            async with asyncio.timeout(answer_s):
                return await self._call(method, *arguments)
        except ServeAppError as error:
            raise getattr(error, "cause", error) from None  # Ray's own class around ours
        except (TimeoutError, *self._away) as error:
            raise Unavailable(
                f"the quota actor does not answer: {type(error).__name__}", code=AWAY, retry_after_s=ASIDE_S
            ) from None
