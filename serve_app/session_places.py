"""How a request of an agent session runs without waiting for any other: its place in the batch, and its tokens.

Rules
- An engine runs more sequences than its line is granted (`session_slots`), one for each session that may be open on it.
  So a session's request never waits for a slot, and a session that waits for a tool keeps nobody from one. Going to the
  front of the line instead would cost it the rest of somebody's answer each time.
- A session has one such place in each router. A second request beside the first, and one of several sequences, go the
  way of all others: it is one agent's, and an agent takes its steps one after another.
- Inside the engine it comes before all others, and is the last to be preempted: its tokens are promised.
- It draws on the session's tokens first. What these do not cover it needs an ordinary budget for; where that is not to
  be had at once it goes the way of all others, too: those who wait in the line for the same tokens come before it.

Invariant: place and tokens are given back once, however the request ends.
"""

from __future__ import annotations

import msgspec

from serve_app.core.memory.sessions import Session
from serve_app.desk import Desk
from serve_app.engine.protocol import Submit
from serve_app.errors import Overloaded
from serve_app.types import RequestClass

LEAD = len(RequestClass)  # in vLLM's priority, lower being sooner: above every class, in the order of classes
# For tokens that are free, which the actor gives in milliseconds. If it is away, or the session's are in use by another
# request of it, an ordinary budget is to be had meanwhile; and after that a place in the line.
TOKENS_WAIT_S = 0.25


def ahead(submit: Submit) -> Submit:
    """The request as the engine gets it in a session."""
    return msgspec.structs.replace(submit, priority=submit.priority - LEAD)


class SessionPlaces:
    """Which sessions have a request beside the line, in one router."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}

    @property
    def taken(self) -> int:
        """Requests that run in a session's place."""
        return len(self._taken)

    def enter(self, session: str, request_id: str) -> bool:
        """Take the session's place; False: another request of it has it."""
        return self._taken.setdefault(session, request_id) == request_id

    def leave(self, session: str, request_id: str) -> None:
        """Give it back; of a request that does not have it, nothing changes."""
        if self._taken.get(session) == request_id:
            del self._taken[session]


class Draw:
    """The KV tokens of one request of a session: what the session has, and an ordinary budget for the rest.

    Args:
        desk: of this router.
        session: whose request it is, on whose engine it will run.
    """

    def __init__(self, desk: Desk, request_id: str, session: Session) -> None:
        self._desk = desk
        self._session = session
        self._inside, self._beside = f"{request_id}@session", request_id

    async def take(self, tokens: int) -> None:
        """Get so many tokens.

        Raises:
            Overloaded: the part beside the session's is not to be had at once.
        """
        inside = min(tokens, self._session.tokens)
        self._desk.demand(self._session.session_id)
        try:
            await self._desk.acquire(self._inside, self._session.session_id, inside, TOKENS_WAIT_S)
            tokens -= inside
        except Overloaded:
            pass  # all of it is beside the session then, as the rules say
        if tokens:
            self._desk.demand(self._session.pool)
            await self._desk.acquire(self._beside, self._session.pool, tokens, TOKENS_WAIT_S)

    def grow(self, request_id: str, tokens: int) -> bool:
        """More for a request that runs; see `Desk.grow`."""
        if self._desk.held(self._beside):
            return self._desk.grow(self._beside, tokens)
        if self._desk.grow(self._inside, tokens, owe=False):
            return True
        self._desk.demand(self._session.pool)
        return self._desk.begin(self._beside, self._session.pool, tokens)

    def release(self) -> None:
        """The request has ended; again changes nothing."""
        self._desk.release(self._inside)
        self._desk.release(self._beside)
