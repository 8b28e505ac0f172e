"""The queues' state and their requests, by ticket: each waits in its model's queue or runs in its router's account.

Rules
- The queue charges a grant to its router's account, and returns it when the request ends.
- A request avoids the engines that its router cannot reach or that may not continue it. When these change it is
  queued again with its original arrival time: at once if there are more for it, else when it would be granted one that
  it avoids.
- A request of a session may take the session's place (`core.queue.session_place`) while its router reaches the engine;
  else it waits for the engine itself, or for any if that is too small beside its sessions (`.placements`).

Invariant: a ticket is known from its arrival to its end; no state of it remains afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from serve_app.core.memory import SESSIONS_OWNER, SessionLeases
from serve_app.core.queue import Action, Admission, Arrival, BegunRun, Grant, Refuse, SessionPlace, WaitReason
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.incarnations import ActorRequest, Incarnations
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.messages import DEFAULT_POLICY, ActorAction, CreditUsage, Done, SessionDraw
from serve_app.core.shared_queue.model_state import ModelState
from serve_app.core.shared_queue.placements import Placements
from serve_app.core.shared_queue.scope import AT_ONCE, StepScope, lost


class ActorRequests:
    """Requests that wait or run. O(log n) per event, unless stated.

    Args:
        accounts: the routers' accounts.
        kv_debt: KV tokens owed to running requests.
        send: sends an action to a router.
        scope: runs each step that follows from events.
    """

    def __init__(
        self,
        accounts: ActorCredit,
        sessions: SessionLeases,
        kv_debt: KvDebt,
        send: Callable[[str, ActorAction], None],
        scope: StepScope,
    ) -> None:
        self._scope = scope
        self.accounts = accounts
        self._sessions = sessions
        self._kv_debt = kv_debt
        self._send = send
        self.models: dict[str, ModelState] = {}
        self.closed_engines: frozenset[str] = frozenset()  # engines on which the routers' holdings are unknown
        self.touched_models: set[str] = set()  # models with a decision since the last event
        self.by_ticket: dict[str, ActorRequest] = {}
        self.incarnations = Incarnations()
        self._left_models: set[str] = set()  # models of ended incarnations' requests
        self.grants_to_retry: dict[str, Grant] = {}  # that a router cannot reach, by ticket
        self._placements = Placements(self._place_of)
        self.of_sessions: Counter[str] = Counter()  # requests that wait or run, by the lease of their session
        self._moves_left = AT_ONCE  # in this event
        self.is_unfinished = False  # whether the last event has left requests for the next one

    def arrive(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """Queue a request; its deadline is in this clock."""
        model_state = self.model_state(model)
        request = self._known(router, model_state, arrival, arrived_s, now)
        if arrival.session is not None:
            self._sessions.touch(arrival.session, now)
        self._enter_queue(request, now)

    def begun(self, router: str, model: str, run: BegunRun, now: float) -> None:
        """A request runs in its router's account. If its engine is gone, it stays unknown until that returns and the
        router has reported again."""
        model_state = self.models.get(model)
        engine = None if model_state is None else model_state.engines.get(run.replica_id)
        if model_state is None or engine is None:
            return
        if not self.accounts.runs(run.replica_id):
            engine.unreconciled.add(router)
            model_state.avoid_cache.clear()
            return
        pool = self.accounts.pool(run.lease) if run.lease else None
        if run.lease and pool is None:
            return  # its session has ended
        request = self._known(router, model_state, run.arrival, now - run.running_s, now)
        request.engine = run.replica_id
        request.lease = run.lease
        place = None if pool is None else SessionPlace(run.replica_id, pool)
        self.apply_actions(model_state, model_state.admission.on_begun(run, request.incarnation.holder, place, now))

    def _known(
        self, router: str, model_state: ModelState, arrival: Arrival, arrived_s: float, now: float
    ) -> ActorRequest:
        """A new request, known by its ticket."""
        ticket = arrival.request_id
        incarnation = self.incarnations.current(router, self.accounts.holder(router))
        before = self.by_ticket.get(ticket)
        if before is not None and before.incarnation.has_ended:
            self._forget(before, now)  # its router has begun to count its tickets anew
        request = ActorRequest(router, incarnation, model_state, arrival, arrived_s)
        self.by_ticket[ticket] = incarnation.requests[ticket] = request
        if arrival.session is not None:
            self.of_sessions[arrival.session] += 1
        return request

    def done(self, router: str, event: Done, now: float) -> None:
        """A request has ended; its router's account returns what the event says, also if the ticket is unknown."""
        request = self._end(event.ticket, now)
        if request is None:
            self.accounts.give_back(router, event.pool, event.slots, event.tokens)
            return
        returned = (event.slots, event.tokens) if event.pool else None
        if not event.pool:
            self.accounts.give_back(router, request.engine, 0, request.grown_tokens)
        admission = request.queue.admission
        actions = admission.on_done(event.ticket, now, event.prompt_tokens, event.output_tokens, returned)
        self.apply_actions(request.queue, actions)

    def cancel(self, ticket: str, now: float) -> None:
        """Cancel a waiting request, or a grant on its way to its router. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._leave_queue(request, now)

    def discard(self, ticket: str, now: float) -> None:
        """An error at the end of a request: if it is not known by ticket any more, no queue keeps it."""
        for queue in [] if ticket in self.by_ticket else self.models.values():
            self.apply_actions(queue, queue.admission.on_cancel(ticket, now))

    def live(self, ticket: str) -> ActorRequest | None:
        """The request with this ticket; None: it is unknown, or the incarnation of its router has ended."""
        request = self.by_ticket.get(ticket)
        return None if request is None or request.incarnation.has_ended else request

    def progress(self, ticket: str, output: int, prompt: int, now: float) -> None:
        """A request has used this many more tokens (`TokenProgress`)."""
        request = self.live(ticket)
        if request is not None:
            self.apply_actions(request.queue, request.queue.admission.on_progress(ticket, output, now, prompt or None))

    def report_status(self, router: str, ticket: str, now: float) -> None:
        """Send the queue position of a ticket, if it waits."""
        request = self.live(ticket)
        status = None if request is None else request.queue.admission.status(ticket, now)
        if status is not None:
            self._send(router, status)

    def add_usage(self, usage: CreditUsage) -> None:
        """Count requests on a router's credit that have ended before they were announced."""
        admission = self.model_state(usage.model).admission
        admission.on_uncounted_usage(usage.request_class, usage.tenant, usage.prompt_tokens, usage.output_tokens)

    def retry_grants(self, now: float) -> None:
        """Queue requests again, with their arrival time, whose router cannot reach the engine that they were granted;
        forget those of ended incarnations; queue those again that avoid an engine which their router reaches now. At
        most `AT_ONCE`: until its turn, one of the first kind keeps what the queue has granted it. The last step of an
        event."""
        due = list(self.grants_to_retry)
        is_outdated = self._placements.is_outdated
        while due and self._moves_left:
            for ticket in due:
                if not self._moves_left:
                    break
                self.grants_to_retry.pop(ticket, None)
                request = self.by_ticket.get(ticket)
                if request is not None and not request.engine:  # else it was queued again and granted since
                    self._move(request, partial(self._retry, request, now), now)
            due = [one for one in self.grants_to_retry if is_outdated(self.by_ticket.get(one))]  # each at most once
        while self._moves_left and (request := self.incarnations.next_ended()) is not None:
            self._move(request, partial(self._forget, request, now), now)
        self._requeue_next(now)
        self.is_unfinished, self._moves_left = not self._moves_left, AT_ONCE

    def _move(self, request: ActorRequest, act: Callable[[], None], now: float) -> None:
        """One of the moves of an event; if it fails, it ends its own request."""
        router = request.router
        ticket = request.arrival.request_id
        has_ended = request.incarnation.has_ended
        end = partial(self.discard, ticket, now) if has_ended else partial(self.lose, router, ticket, now)
        self._scope.run(f"a move of a request of router {router}", request.arrival, act, end)

    def _retry(self, request: ActorRequest, now: float) -> None:
        if request.incarnation.has_ended:
            self._forget(request, now)
        else:
            self._requeue(request.arrival.request_id, now)

    def lose(self, router: str, ticket: str, now: float) -> None:
        """An error at a request: it is refused. If it was granted before the error, it runs."""
        request = self.live(ticket)
        if request is None or not request.engine:
            self.cancel(ticket, now)
            self.discard(ticket, now)
            self._send(router, lost(ticket))

    def model_state(self, model: str) -> ModelState:
        """The queue of a model; created if there is none."""
        model_state = self.models.get(model)
        if model_state is None:
            held_tokens = partial(self._sessions.held_tokens, model)
            admission = Admission(DEFAULT_POLICY, held_tokens, self._scope.event_grants)
            model_state = self.models[model] = ModelState(model, admission)
        return model_state

    def forget_routers(self, routers: Iterable[str]) -> None:
        """Routers' incarnations have ended: forget their requests, by and by. O(1) per router."""
        for router in routers:
            self.accounts.close(router)
            self.incarnations.end(router)
            self._placements.forget_router(router)

    def take_left_models(self) -> list[str]:
        """The models of the requests of ended incarnations, once all of these are forgotten: some may be unused now."""
        if self.incarnations.ended:
            return []
        found, self._left_models = sorted(self._left_models), set()
        return found

    def _forget(self, request: ActorRequest, now: float) -> None:
        """Forget a request of an ended incarnation, and its place in the queue."""
        self._moves_left = max(0, self._moves_left - 1)
        self._left_models.add(request.queue.name)
        self._remove(request)
        self._leave_queue(request, now)

    def _remove(self, request: ActorRequest) -> None:
        """A request is no longer known by ticket."""
        ticket = request.arrival.request_id
        lease = request.arrival.session
        if self.by_ticket.pop(ticket, None) is not None and lease is not None:
            self.of_sessions[lease] -= 1
            if not self.of_sessions[lease]:
                del self.of_sessions[lease]
        request.incarnation.requests.pop(ticket, None)
        self._placements.forget(request)

    def requeue_router(self, router: str, now: float) -> None:
        """A router reaches other engines: queue its requests again that avoid them, the oldest first. O(n log n) for
        its n requests that avoid some engine."""
        self._placements.on_reachability(router)
        self._requeue_next(now)

    def _requeue_next(self, now: float) -> None:
        while self._moves_left and (request := self._placements.next_outdated()) is not None:
            self._move(request, partial(self._requeue, request.arrival.request_id, now), now)

    def on_opened(self) -> None:
        """Engines are open again: requests that may run there now are queued again, by and by."""
        self._placements.on_opened()

    def on_room(self, leases: Iterable[str]) -> None:
        """The engine of these sessions has other room: what waits for it is queued again, by and by, if it may run
        elsewhere now. O(requests of these sessions)."""
        for lease in leases:
            self._placements.on_session(lease)

    def leave_session(self, queue: ModelState, lease: str, now: float) -> None:
        """A session has ended: queue the requests that waited for it again, as ordinary ones. O(its requests)."""
        queue.admission.end_session(lease)
        self._placements.on_session(lease)
        self._requeue_next(now)

    def drop_engine(self, engine: str) -> set[str]:
        """An engine is gone: forget the requests there; returns their routers. O(requests)."""
        gone = [request for request in self.by_ticket.values() if request.engine == engine]
        for request in gone:
            self._remove(request)
        return {request.router for request in gone if not request.incarnation.has_ended}

    def _requeue(self, ticket: str, now: float) -> None:
        """Queue a waiting request again with its original arrival time."""
        self._moves_left = max(0, self._moves_left - 1)
        self.grants_to_retry.pop(ticket, None)
        request = self._take_from_queue(ticket, now)
        request.arrival = replace(request.arrival, accepted=True)
        self._enter_queue(request, now, WaitReason.PLACEMENT)

    def _enter_queue(self, request: ActorRequest, now: float, waited_for: WaitReason | None = None) -> None:
        """Hand a request to its model's queue. `waited_for`: for what it has waited, if it is granted at once."""
        admission = request.queue.admission
        holder = request.incarnation.holder
        place = self._placements.set(request)
        actions = admission.on_arrive(request.arrival, now, now - request.arrived_s, holder, place)
        for at, action in enumerate(actions):
            if waited_for and isinstance(action, Grant) and action.request_id == request.arrival.request_id:
                actions[at] = replace(action, waited_for=action.waited_for or waited_for)
        self.apply_actions(request.queue, actions)

    def _place_of(self, request: ActorRequest) -> SessionPlace | None:
        """The place of a request's open session, if its router can send it there."""
        session = self._sessions.open_by_lease(request.arrival.session or "")
        if session is None or session.engine in self.closed_engines:
            return None
        pool = self.accounts.pool(session.lease)
        engine = request.queue.engines.get(session.engine)
        takes = engine is not None and engine.may_take(request.router, request.arrival.fingerprint)
        if pool is None or not takes or not request.queue.is_open(session.engine):
            return None
        return SessionPlace(session.engine, pool)

    def _take_from_queue(self, ticket: str, now: float) -> ActorRequest:
        """Remove a request from its model's queue without ending it."""
        request = self.by_ticket.pop(ticket)  # decisions during its removal do not apply to it
        try:
            self._leave_queue(request, now)
        finally:
            self.by_ticket[ticket] = request
        return request

    def _leave_queue(self, request: ActorRequest, now: float) -> None:
        """Cancel a request in its model's queue, and carry out the other decisions that follow."""
        ticket = request.arrival.request_id
        actions = request.queue.admission.on_cancel(ticket, now)
        self.apply_actions(request.queue, [one for one in actions if one.request_id != ticket])

    def _end(self, ticket: str, now: float) -> ActorRequest | None:
        request = self.live(ticket)
        if request is None:
            return None
        self._remove(request)
        if request.owed is not None:
            self._kv_debt.end(request.engine, request.owed)
        if request.arrival.session is not None:
            self._sessions.touch(request.arrival.session, now)
        if request.engine in self._kv_debt.debts:
            self.accounts.returned[request.engine] = None  # debt is paid from what its grant returns, too
        return request

    def apply_actions(self, queue: ModelState, actions: Iterable[Action]) -> None:
        """Carry out a queue's decisions."""
        self.touched_models.add(queue.name)
        for action in actions:
            request = self.by_ticket.get(action.request_id)
            if request is None:
                continue  # to be stopped on an engine that is gone
            if request.incarnation.has_ended:
                if isinstance(action, Refuse):
                    self._left_models.add(request.queue.name)
                    self._remove(request)
                elif isinstance(action, Grant):
                    self.grants_to_retry[action.request_id] = action  # it is forgotten in its turn
                continue
            if isinstance(action, Refuse):
                self._end(action.request_id, -math.inf)
            elif isinstance(action, Grant) and not self._begin(request, action):
                self.grants_to_retry[action.request_id] = action
                continue
            if request.lease:  # a router of release 0.5.0 knows by this that it has the place
                self._send(request.router, SessionDraw(action.request_id, request.lease, 1, request.arrival.cost))
            self._send(request.router, action)

    def _begin(self, request: ActorRequest, grant: Grant) -> bool:
        """A request is granted; False: it avoids the engine, or that has ended, and its queue has not heard of it."""
        engine = grant.replica_id
        one = request.queue.engines[engine]
        avoids = request.router != SESSIONS_OWNER and not one.may_take(request.router, request.arrival.fingerprint)
        if avoids or engine in self.closed_engines or not self.accounts.runs(engine):
            return False
        request.engine = engine
        request.lease = grant.lease
        return True
