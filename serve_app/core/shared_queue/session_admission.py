"""Session admission: a session to open waits in its model's queue like a request of one slot and its KV tokens.

Rules
- An opening has the class and the tenant of its caller. When granted, its tokens become the session's, and its slot is
  returned at once. While no request waits it needs no slot and takes free tokens without the queue.
- Opened tokens are charged to the tenant's fair-share counter of that class as input tokens, and again for every
  `HELD_TOKEN_S` for which they are held: who renews sessions for ever is behind others that wait.
- An engine can open a session if it has one session slot left, and enough tokens besides its open sessions. An opening
  that only the end of another session makes possible waits outside the queue and delays no request. Openings are
  reviewed when a session has begun or ended, or the engines or shares have changed: in the order of their classes, then
  of what their tenants' sessions hold for their weights, a part in each event.
- The sessions of one tenant hold at most a part of the model's KV tokens (`SessionRequest.max_share`), and none of what
  is guaranteed to other tenants (`core.shared_queue.session_shares`). An opening above that waits for an end, too.
  Closed sessions count until their running request ends, in these bounds and in the number that a tenant may have.
- An opening that can never fit is refused at once, with its own error code. So is one that does not wait, unless enough
  of the tokens are unused credit of routers, or its tenant has closed sessions: then it waits until what they hold is
  returned (`RECALL_S`): the end of a request may arrive after the closing that followed it.

Invariant: an opening ends as exactly one of opened, refused, withdrawn, or still waits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from serve_app.core.memory import SESSIONS_OWNER, Ledger, Session, SessionLeases, SessionRequest, tenant_session_id
from serve_app.core.queue import Action, Arrival, Grant, RefusalReason, Refuse, refusal_error
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.messages import Done
from serve_app.core.shared_queue.model_queues import ModelQueues
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.core.shared_queue.scope import StepScope, lost
from serve_app.core.shared_queue.session_reclaim import SessionReclaim
from serve_app.core.shared_queue.session_shares import SessionRoom, session_room
from serve_app.errors import BadRequest, InsufficientMemory, LeaseConflict, Overloaded, ServeAppError, Unavailable
from serve_app.types import RequestClass

RECALL_S = 1.0  # a router returns credit within a round trip, or is silent: then its time to live must end first
# A KV token that a session holds for so long costs as much as an input token: about as long as a short answer holds it.
HELD_TOKEN_S = 10.0
REVIEW_S = 1.0  # between charges for held tokens, and looks for what is to be taken back: a second late at most
REVIEWED_AT_ONCE = 16  # pending openings that are reviewed in one event: milliseconds with hundreds of engines
SESSION_TOO_LARGE = "session_too_large"  # error code of a session that can never fit


@dataclass(slots=True)
class _PendingSession:
    ask: SessionRequest
    waiting_since: float
    candidate_engines: tuple[str, ...] = ()  # engines that can open it
    ticket: str = ""  # empty: it waits outside the queue


class _Capacity(NamedTuple):
    """What a model has for sessions, at one version of these: KV tokens and the number of sessions that are open, by
    engine. `total`: all its KV tokens."""

    version: int
    total: int
    engines: dict[str, tuple[int, int]]


class SessionAdmission:
    """Pending openings. O(engines) and O(n log n) for n pending openings when a session is opened or ends, otherwise as
    `ActorRequests`.

    Args:
        ledger: has the engines' KV tokens.
        sessions: the open sessions.
        accounts: has what routers do not use.
        models: the queues.
        requests: has an opening that waits in its queue, by a ticket of its own.
        engines_of: returns the running engines of a model.
        scope: runs each step that concerns one opening.
    """

    def __init__(
        self,
        ledger: Ledger,
        sessions: SessionLeases,
        accounts: ActorCredit,
        models: ModelQueues,
        requests: ActorRequests,
        engines_of: Callable[[str], list[str]],
        scope: StepScope,
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._accounts = accounts
        self._models = models
        self._requests = requests
        self._engines_of = engines_of
        self._scope = scope
        self.pending_sessions: dict[str, _PendingSession] = {}  # in order of arrival
        self._numbers = itertools.count(1)
        self.decisions: list[Action] = []  # of the queue on openings; `settle` carries them out
        self._seen_version = sessions.version
        self._seen_capacities: dict[str, object] = {}  # of models with pending openings, at the last tick
        self._to_review: list[str] = []  # pending openings, the first last
        self._capacities: dict[str, _Capacity] = {}  # of this event, by model
        self._outcomes: dict[str, Session | ServeAppError] = {}
        self._reviewed_at = math.inf  # infinite: not yet
        self._reclaim = SessionReclaim(sessions, lambda: self._requests.used_sessions)

    def open_session(self, ask: SessionRequest, now: float) -> Session | None:
        """Open a session; None: it waits, and `take_outcomes` returns its outcome. Repeating it renews the session.

        Raises:
            LeaseConflict: the session is open with another model or size.
            BadRequest: it is larger than the largest engine allows.
            InsufficientMemory: it does not fit now and does not wait.
            Overloaded: its tenant has reached its number of sessions, or the queue is full.
            Unavailable: no engine of this model runs.
        """
        known = self._sessions.by_session_id.get(ask.session_id)
        if known is not None:
            had = known.request
            if (had.model, had.tokens) != (ask.model, ask.tokens):
                raise LeaseConflict(
                    f"session {tenant_session_id(ask.session_id)!r} is open with {had.tokens} KV tokens of {had.model};"
                    f" close it to have {ask.tokens} of {ask.model}"
                )
            return self._sessions.renew(ask.session_id, now)
        self._capacities.clear()
        engines = self._check(ask)
        before = self.withdraw(ask.session_id, now)
        waiting = self.pending_sessions[ask.session_id] = _PendingSession(ask, now if before is None else before)
        if not self._open_at_once(waiting, now):
            if ask.wait_until is None or ask.wait_until <= now:
                free = (
                    self._ledger.free(one) + self._accounts.unused_tokens(one) for one in self._candidate_engines(ask)
                )
                returns_soon = self._sessions.has_closed(ask.model, ask.tenant) or any(
                    one >= ask.tokens for one in free
                )
                if ask.wait_until is not None or not returns_soon:
                    del self.pending_sessions[ask.session_id]
                    raise InsufficientMemory(self._shortage(ask, engines))
                waiting.ask = replace(ask, wait_until=now + RECALL_S)
            self._enqueue(waiting, now)
        self.settle(now)
        outcome = self._outcomes.pop(ask.session_id, None)
        if isinstance(outcome, ServeAppError):
            raise outcome
        return outcome

    def withdraw(self, session_id: str, now: float) -> float | None:
        """Withdraw a pending opening; returns since when it waited, None: it did not."""
        waiting = self.pending_sessions.pop(session_id, None)
        if waiting is None:
            return None
        self._requests.cancel(waiting.ticket, now)
        return waiting.waiting_since

    def restart(self, models: ModelQueues, requests: ActorRequests) -> None:
        """The queues are new and empty; pending openings are queued again by the next review."""
        self._models = models
        self._requests = requests
        self._accounts.remove_router(SESSIONS_OWNER)
        self.decisions.clear()
        for waiting in self.pending_sessions.values():
            waiting.candidate_engines = ()
            waiting.ticket = ""
        self._begin_review()

    @property
    def is_unfinished(self) -> bool:
        """Whether the last event has left openings to review for the next one."""
        return bool(self._to_review) or self._seen_version != self._sessions.version

    def settle(self, now: float) -> None:
        """Carry out decisions, and review pending openings if the free capacity for sessions has changed; at most
        `REVIEWED_AT_ONCE`."""
        self._capacities.clear()
        left = REVIEWED_AT_ONCE
        if self._seen_version != self._sessions.version:
            self._begin_review()
        while self.decisions or (left and self.is_unfinished):
            decisions, self.decisions = self.decisions, []
            for action in decisions:
                waiting = next((one for one in self.pending_sessions.values() if one.ticket == action.request_id), None)
                if waiting is not None:  # else it was withdrawn; the cancellation returned the grant
                    self._step(waiting, partial(self._carry_out, waiting, action, now), now)
            if self._to_review and left:
                left -= 1
                waiting = self.pending_sessions.get(self._to_review.pop())
                if waiting is not None:
                    self._step(waiting, partial(self._review, waiting, now), now)
            elif self._seen_version != self._sessions.version:
                self._begin_review()  # of the openings that were reviewed before others were opened

    def on_tick(self, now: float) -> None:
        """End openings that waited too long outside the queue, follow started and ended engines, charge what sessions
        hold, and take back what others wait for. O(sessions) once in `REVIEW_S`."""
        elapsed_s = now - self._reviewed_at
        if not 0.0 <= elapsed_s < REVIEW_S:
            self._reviewed_at = now
            self._charge_held(max(0.0, elapsed_s))
            for model in list(self._sessions.held_by_tenant):
                self._take_back(model, now)
        self._look_at_engines()
        for waiting in [one for one in self.pending_sessions.values() if not one.ticket]:
            if waiting.ask.wait_until is not None and waiting.ask.wait_until <= now:
                del self.pending_sessions[waiting.ask.session_id]
                self._outcomes[waiting.ask.session_id] = self._wait_over_error(waiting.ask)
        self.settle(now)

    def take_outcomes(self) -> dict[str, Session | ServeAppError]:
        """The outcomes of pending openings since the last call."""
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def waiting(self) -> list[SessionRequest]:
        """The pending openings, the oldest first."""
        return [one.ask for one in self.pending_sessions.values()]

    def _check(self, ask: SessionRequest) -> list[str]:
        """Refuse what cannot be opened even by waiting. Returns the model's engines."""
        engines = self._engines_of(ask.model)
        if not engines:
            raise Unavailable(f"no engine of {ask.model!r} runs")
        largest = max(map(self._ledger.limit, engines))
        if ask.tokens > largest:
            raise BadRequest(
                f"session {tenant_session_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, no engine of "
                f"{ask.model} has more than {largest} to give",
                code=SESSION_TOO_LARGE,
            )
        waiting = (one.ask for name, one in self.pending_sessions.items() if name != ask.session_id)
        opened = (one.request for one in self._sessions.by_session_id.values())
        having = sum(one.tenant == ask.tenant for one in itertools.chain(opened, waiting))
        if having >= ask.per_tenant:
            raise Overloaded(
                f"this key's tenant has {having} sessions, open or waiting, of {ask.per_tenant} it may have; close one",
                code="too_many_sessions",
            )
        return engines

    def _candidate_engines(self, ask: SessionRequest) -> tuple[str, ...]:
        """The engines that can open a session once all their requests have ended."""
        if self._room(ask).tokens < ask.tokens or self._sessions.count_by_tenant[ask.tenant] >= ask.per_tenant:
            return ()
        engines = self._capacity(ask.model).engines
        most = ask.per_engine
        return tuple(name for name, (tokens, count) in engines.items() if tokens >= ask.tokens and count < most)

    def _room(self, ask: SessionRequest) -> SessionRoom:
        """The KV tokens that its tenant may have in more sessions of the model. O(engines + tenants with sessions)."""
        admission = self._models.admission(ask.model)
        shares = {} if admission is None else admission.scheduler.shares
        held: Mapping[str, int] = self._sessions.held_by_tenant.get(ask.model, {})
        return session_room(ask.tenant, held, shares, self._capacity(ask.model).total, ask.max_share)

    def _capacity(self, model: str) -> _Capacity:
        """O(engines) once in an event, and again when a session has begun or ended."""
        found = self._capacities.get(model)
        sessions = self._sessions
        if found is None or found.version != sessions.version:
            limits = {engine: self._ledger.limit(engine) for engine in self._engines_of(model)}
            engines = {
                engine: (limit - sessions.reserved_tokens[engine], sessions.count_on(engine))
                for engine, limit in limits.items()
            }
            found = self._capacities[model] = _Capacity(sessions.version, sum(limits.values()), engines)
        return found

    def _open_at_once(self, waiting: _PendingSession, now: float) -> bool:
        """Open a session if its tokens are free and no request waits for the model; returns whether it did."""
        ask = waiting.ask
        best = max(self._candidate_engines(ask), key=self._ledger.free, default=None)
        admission = self._models.admission(ask.model)
        if best is None or self._ledger.free(best) < ask.tokens or (admission is not None and admission.waiting):
            return False
        del self.pending_sessions[ask.session_id]
        self._outcomes[ask.session_id] = self._sessions.reserve(ask, best, now)
        if admission is not None:
            admission.on_uncounted_usage(ask.request_class, ask.tenant, ask.tokens, 0)
        return True

    def _enqueue(self, waiting: _PendingSession, now: float, *, accepted: bool = False) -> None:
        """Queue an opening for its candidate engines; without any it waits outside the queue."""
        ask = waiting.ask
        waiting.candidate_engines = self._candidate_engines(ask)
        waiting.ticket = ""
        if not waiting.candidate_engines or self._open_at_once(waiting, now):
            return
        waiting.ticket = f"{SESSIONS_OWNER}:{next(self._numbers)}"
        queue = self._models.by_name.get(ask.model)
        engines = {*self._capacity(ask.model).engines, *(() if queue is None else queue.engines)}
        arrival = Arrival(
            waiting.ticket,
            ask.request_class,
            ask.tenant,
            cost_tokens=ask.tokens,
            prompt_tokens=ask.tokens,
            deadline=ask.wait_until,
            accepted=accepted,
            avoid_replicas=frozenset(engines.difference(waiting.candidate_engines)),
        )
        self._requests.enter(SESSIONS_OWNER, ask.model, arrival, waiting.waiting_since, now)

    def _look_at_engines(self) -> None:
        """Begin a review if the engines or shares of a model with pending openings have changed. O(engines)."""
        self._capacities.clear()
        found: dict[str, object] = {}
        for model in {one.ask.model for one in self.pending_sessions.values()}:
            admission = self._models.admission(model)
            capacity = self._capacity(model)
            shares = {} if admission is None else dict(admission.scheduler.shares)
            found[model] = capacity.total, capacity.engines.keys(), shares
        if found != self._seen_capacities:
            self._seen_capacities = found
            self._begin_review()

    def _begin_review(self) -> None:
        self._seen_version = self._sessions.version
        self._to_review = sorted(self.pending_sessions, key=self._order)[::-1]  # of equal ones the oldest is last, too

    def _review(self, waiting: _PendingSession, now: float) -> None:
        """Queue an opening again if its candidate engines have changed."""
        if waiting.candidate_engines != self._candidate_engines(waiting.ask):
            self._requests.cancel(waiting.ticket, now)
            self._enqueue(waiting, now, accepted=True)

    def _order(self, session_id: str) -> tuple[float, ...]:
        waiting = self.pending_sessions[session_id]
        ask = waiting.ask
        admission = self._models.admission(ask.model)
        weight = 1.0 if admission is None else admission.scheduler.policy.weight(ask.tenant)
        return -ask.request_class, self._sessions.held_tokens(ask.model, ask.tenant) / weight, waiting.waiting_since

    def _charge_held(self, elapsed_s: float) -> None:
        held = Counter[tuple[str, RequestClass, str]]()
        for entry in self._sessions.by_session_id.values():
            held[entry.request.model, entry.request.request_class, entry.request.tenant] += entry.request.tokens
        for (model, request_class, tenant), tokens in held.items():
            if (admission := self._models.admission(model)) is not None:
                used = round(tokens * elapsed_s / HELD_TOKEN_S)
                admission.on_uncounted_usage(request_class, tenant, used, 0)

    def _take_back(self, model: str, now: float) -> None:
        """Take back sessions of a model for what waits, as `SessionReclaim` says."""
        admission = self._models.admission(model)
        if admission is None:
            return
        total = self._capacity(model).total
        demand = {level: Counter(waits) for level, waits in admission.kv_demand().items()}
        for pending in self.pending_sessions.values():
            ask = pending.ask
            has = self._sessions.held_tokens(model, pending.ask.tenant)
            if ask.model == model and not pending.ticket and has + ask.tokens <= ask.max_share * total:
                demand.setdefault(ask.request_class, Counter())[ask.tenant] += ask.tokens
        for name in self._reclaim.due(model, total, demand, admission.scheduler.policy, now):
            one_open = self._sessions.by_session_id[name]
            held = self._sessions.held_tokens(model, one_open.request.tenant)
            self._sessions.take_back(
                name,
                f"session {tenant_session_id(name)!r} was taken back: others waited for KV tokens of {model}, of whose "
                f"{total} its tenant's sessions held {held}, more than its part; it can be opened again",
            )

    def _step(self, waiting: _PendingSession, act: Callable[[], object], now: float) -> None:
        """A step of an opening; if it fails, it ends that one."""
        self._scope.run("an opening of a session", waiting.ask, act, partial(self._lose, waiting, now))

    def _lose(self, waiting: _PendingSession, now: float) -> None:
        name = waiting.ask.session_id
        if self.pending_sessions.get(name) is waiting:
            self.withdraw(name, now)
        self._requests.cancel(waiting.ticket, now)
        opened = self._sessions.by_session_id.get(name)
        if opened is not None:  # nobody is told that it is open
            self._sessions.close(name)
        self._outcomes[name] = refusal_error(lost(name))

    def _carry_out(self, waiting: _PendingSession, action: Action, now: float) -> None:
        ask = waiting.ask
        session_id = waiting.ask.session_id
        if isinstance(action, Refuse):
            del self.pending_sessions[session_id]
            late = action.reason in (RefusalReason.DEADLINE, RefusalReason.TIMEOUT, RefusalReason.SESSIONS)
            self._outcomes[session_id] = self._wait_over_error(ask) if late else refusal_error(action)
            return
        assert isinstance(action, Grant)
        if action.replica_id not in self._candidate_engines(ask):  # another session was opened there meanwhile
            self._requests.cancel(action.request_id, now)
            self._enqueue(waiting, now, accepted=True)
            return
        del self.pending_sessions[session_id]
        self._requests.hand_over(action.request_id)  # no request gets it before the session
        self._outcomes[session_id] = self._sessions.reserve(ask, action.replica_id, now)
        self._requests.done(SESSIONS_OWNER, Done(action.request_id, ask.tokens, 0), now)

    def _wait_over_error(self, ask: SessionRequest) -> InsufficientMemory:
        return InsufficientMemory(f"{self._shortage(ask, self._engines_of(ask.model))}; its wait is over")

    def _shortage(self, ask: SessionRequest, engines: list[str]) -> str:
        """The reason why a session does not fit now, with the figures."""
        free = max(map(self._ledger.free, engines), default=0)
        text = f"session {tenant_session_id(ask.session_id)!r}: {ask.tokens} KV tokens asked, {free} free"
        fullest = min(map(self._sessions.count_on, engines), default=0)
        places = f"; {fullest} sessions are open there, {ask.per_engine} at most" if fullest >= ask.per_engine else ""
        room = self._room(ask)
        shares = f"; {room.why}, {room.tokens} are left of that" if room.tokens < ask.tokens else ""
        has = self._sessions.count_by_tenant[ask.tenant]
        most = ask.per_tenant
        number = f"; its tenant has {has} of {most} sessions, some closed ones in use" if has >= most else ""
        return f"{text} on the best engine of {ask.model}{places}{shares}{number}"
