"""Sessions that are to be opened: each waits in its model's queue like a request of one slot and as many KV tokens.

Rules
- An opening has the class and the tenant of its caller. Granted, its tokens become the session's, and its slot goes
  back at once. While nobody waits it needs no slot, so it takes tokens that are free without the queue.
- An engine can open a session if it has a place for one more, and enough tokens beside the sessions that it has. What
  only the end of another session can give an opening waits for aside, out of the queue, and costs nobody anything.
- One that could never fit is refused at once, by name. So is one that will not wait, unless routers have the tokens as
  credit and use them not: it waits for that to come back (`RECALL_S`).

Invariant: an opening ends as exactly one of opened, refused, withdrawn, or still waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_app.core.memory import KEEPER, Ledger, Session, SessionAsk, Sessions, own_id
from serve_app.core.queue import Action, Arrival, Grant, Reason, Refuse, refusal_error
from serve_app.core.shared_queue.granting import Places
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, Overloaded, ServeAppError, Unavailable

RECALL_S = 1.0  # a router gives credit back within a round trip, or it is silent and its time to live has to end first
TOO_LARGE = "session_too_large"  # the code of a session that could never fit


@dataclass(slots=True)
class _Waiting:
    ask: SessionAsk
    since: float
    able: tuple[str, ...] = ()  # engines that could open it
    ticket: str = ""  # empty: it waits aside


class Openings:
    """Who waits for a session. O(openings that wait) when a session is opened or ends, else as `Places`.

    Args:
        engines_of: the engines of a model that run.
    """

    def __init__(
        self, ledger: Ledger, sessions: Sessions, places: Places, engines_of: Callable[[str], list[str]]
    ) -> None:
        self._ledger, self._sessions, self._places, self._engines_of = ledger, sessions, places, engines_of
        self._waiting: dict[str, _Waiting] = {}  # in the order they came
        self._tickets: dict[str, str] = {}  # the sessions that have them
        self._numbers = itertools.count(1)
        self._said: list[Action] = []
        self._seen = sessions.version
        self._outcomes: dict[str, Session | ServeAppError] = {}

    def ask(self, ask: SessionAsk, now: float) -> Session | None:
        """Open a session; None: it waits, and `take_outcomes` will tell. The same again is the same one, renewed.

        Raises:
            LeaseConflict: it is open, and asks for something else now.
            BadRequest: it is larger than what any engine has to give.
            InsufficientMemory: it does not fit now and will not wait.
            Overloaded: its tenant has as many as it may, or the queue has no room.
            Unavailable: no engine of this model runs.
        """
        known = self._sessions.get(ask.session_id)
        if known is not None:
            had = known.ask
            if (had.model, had.tokens) != (ask.model, ask.tokens):
                raise LeaseConflict(
                    f"session {own_id(ask.session_id)!r} is open with {had.tokens} KV tokens of {had.model}; "
                    f"close it to have {ask.tokens} of {ask.model}"
                )
            return self._sessions.renew(ask.session_id, now)
        engines = self._check(ask)
        before = self.withdraw(ask.session_id, now)
        waiting = self._waiting[ask.session_id] = _Waiting(ask, now if before is None else before)
        if not self._open_at_once(waiting, now):
            if ask.wait_until is None or ask.wait_until <= now:
                free = (self._ledger.free(one) + self._places.accounts.idle(one) for one in self._able(ask))
                if ask.wait_until is not None or not any(one >= ask.tokens for one in free):
                    del self._waiting[ask.session_id]
                    raise InsufficientMemory(self._shortage(ask, engines))
                waiting.ask = replace(ask, wait_until=now + RECALL_S)
            self._offer(waiting, now)
        self.settle(now)
        outcome = self._outcomes.pop(ask.session_id, None)
        if isinstance(outcome, ServeAppError):
            raise outcome
        return outcome

    def withdraw(self, session_id: str, now: float) -> float | None:
        """Nobody waits for this session any more; since when somebody did, None: nobody."""
        waiting = self._waiting.pop(session_id, None)
        if waiting is None:
            return None
        self._take_back(waiting, now)
        return waiting.since

    def begin_anew(self, places: Places) -> None:
        """The queues are others, and know of nobody; who waits comes in again with the next review."""
        self._places = places
        places.accounts.leave(KEEPER)
        self._tickets.clear()
        self._said.clear()
        for waiting in self._waiting.values():
            waiting.able, waiting.ticket = (), ""

    def decided(self, action: Action) -> None:
        """What the queue has decided of an opening; `settle` carries it out."""
        self._said.append(action)

    def settle(self, now: float) -> None:
        """Carry out what was decided, and look again at who waits if there is other room now."""
        while self._said or self._seen != self._sessions.version:
            said, self._said = self._said, []
            for action in said:
                self._carry_out(action, now)
            if self._seen != self._sessions.version:
                self._seen = self._sessions.version
                self._review(now)

    def on_tick(self, now: float) -> None:
        """Time has passed: who waits aside for too long is told, and engines may have come or gone."""
        self._review(now)
        for waiting in [one for one in self._waiting.values() if not one.ticket]:
            if waiting.ask.wait_until is not None and waiting.ask.wait_until <= now:
                del self._waiting[waiting.ask.session_id]
                self._outcomes[waiting.ask.session_id] = self._too_late(waiting.ask)
        self.settle(now)

    def take_outcomes(self) -> dict[str, Session | ServeAppError]:
        """What has become of openings that waited, since this was last asked."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def waiting(self) -> list[SessionAsk]:
        """Those that wait, the first first."""
        return [one.ask for one in self._waiting.values()]

    def _check(self, ask: SessionAsk) -> list[str]:
        """What is refused whether it waits or not. Returns the model's engines."""
        engines = self._engines_of(ask.model)
        if not engines:
            raise Unavailable(f"no engine of {ask.model!r} runs")
        largest = max(map(self._ledger.limit, engines))
        if ask.tokens > largest:
            raise BadRequest(
                f"session {own_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, no engine of {ask.model} has more "
                f"than {largest} to give",
                code=TOO_LARGE,
            )
        others = (one for name, one in self._waiting.items() if name != ask.session_id)
        having = self._sessions.having(ask.tenant) + sum(one.ask.tenant == ask.tenant for one in others)
        if having >= ask.per_tenant:
            raise Overloaded(
                f"this key's tenant has {having} sessions, open or waiting, of {ask.per_tenant} it may have; close one",
                code="too_many_sessions",
            )
        return engines

    def _able(self, ask: SessionAsk) -> tuple[str, ...]:
        """The engines that could open a session if all their requests ended."""
        sessions = self._sessions
        return tuple(
            engine
            for engine in self._engines_of(ask.model)
            if self._ledger.limit(engine) - sessions.reserved(engine) >= ask.tokens
            and len(sessions.on(engine)) < ask.per_engine
        )

    def _open_at_once(self, waiting: _Waiting, now: float) -> bool:
        """Open a session where its tokens are free and nobody waits for the model; whether that could be done."""
        ask = waiting.ask
        best = max(self._able(ask), key=self._ledger.free, default=None)
        if best is None or self._ledger.free(best) < ask.tokens or self._places.requests.waiting(ask.model):
            return False
        del self._waiting[ask.session_id]
        self._outcomes[ask.session_id] = self._sessions.reserve(ask, best, now)
        self._places.sync(best, now)
        return True

    def _offer(self, waiting: _Waiting, now: float, *, again: bool = False) -> None:
        """Let an opening wait in the queue for the engines that can have it, or aside if none can."""
        ask = waiting.ask
        waiting.able, waiting.ticket = self._able(ask), ""
        if not waiting.able or self._open_at_once(waiting, now):
            return
        waiting.ticket = f"{KEEPER}:{next(self._numbers)}"
        self._tickets[waiting.ticket] = ask.session_id
        avoid = frozenset((*self._engines_of(ask.model), *self._places.engines(ask.model))).difference(waiting.able)
        arrival = Arrival(
            waiting.ticket,
            ask.request_class,
            ask.tenant,
            cost_tokens=ask.tokens,
            deadline=ask.wait_until,
            accepted=again,
            avoid=avoid,
        )
        self._places.requests.arrive(KEEPER, ask.model, arrival, waiting.since, now)

    def _take_back(self, waiting: _Waiting, now: float) -> None:
        if self._tickets.pop(waiting.ticket, None) is not None:
            self._places.requests.cancel(waiting.ticket, now)

    def _review(self, now: float) -> None:
        """Where other engines can open a session now, it waits for those."""
        for waiting in list(self._waiting.values()):
            if waiting.able != self._able(waiting.ask):
                self._take_back(waiting, now)
                self._offer(waiting, now, again=True)

    def _carry_out(self, action: Action, now: float) -> None:
        session_id = self._tickets.pop(action.request_id, "")
        waiting = self._waiting.get(session_id)
        if waiting is None or waiting.ticket != action.request_id:
            return  # withdrawn; what it was granted went back with that
        if isinstance(action, Refuse):
            del self._waiting[session_id]
            late = action.reason in (Reason.DEADLINE, Reason.TIMEOUT, Reason.SESSIONS)
            self._outcomes[session_id] = self._too_late(waiting.ask) if late else refusal_error(action)
            return
        assert isinstance(action, Grant)
        if action.replica_id not in self._able(waiting.ask):  # another one was opened there in the same moment
            self._places.requests.cancel(action.request_id, now)
            self._offer(waiting, now, again=True)
            return
        del self._waiting[session_id]
        ask = waiting.ask
        self._places.requests.take_over(action.request_id)  # of which the queue hears last
        self._outcomes[session_id] = self._sessions.reserve(ask, action.replica_id, now)
        self._places.requests.done(action.request_id, 0, 0, now)

    def _too_late(self, ask: SessionAsk) -> InsufficientMemory:
        return InsufficientMemory(f"{self._shortage(ask, self._engines_of(ask.model))}; its wait is over")

    def _shortage(self, ask: SessionAsk, engines: list[str]) -> str:
        """Why a session does not fit now, with the figures."""
        free = max(map(self._ledger.free, engines), default=0)
        text = f"session {own_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, {free} free"
        fullest = min((len(self._sessions.on(one)) for one in engines), default=0)
        places = f"; {fullest} sessions are open there, {ask.per_engine} at most" if fullest >= ask.per_engine else ""
        return f"{text} on the best engine of {ask.model}{places}"
