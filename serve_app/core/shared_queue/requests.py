"""The queues' state and their requests, by ticket: each waits in its model's queue or runs in its router's account.

Rules
- The queue charges a grant to its router's account, and returns it when the request ends.
- A request avoids the engines that its router cannot reach or that may not go on with it. When these change it is
  queued again with its original arrival time: at once if there are more for it, else when it would be granted one that
  it avoids.
- A request of a session draws on the session at arrival: its tokens, and its one slot if these tokens and the free ones
  are enough. Then it begins, and its use is charged to its tenant as usual. Otherwise it waits in the queue for the
  rest, on the session's engine only, or until the session's slot is returned and the session's tokens are enough. If
  the session ends with its engine, the request continues without a session.

Invariant: a ticket is known from its arrival to its end; no state of it remains afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from serve_app.core.memory import SESSIONS_OWNER, SessionLeases
from serve_app.core.queue import Action, Admission, Arrival, Grant, Refuse, WaitReason
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.avoided_engines import AvoidedEngines
from serve_app.core.shared_queue.incarnations import ActorRequest, Incarnations
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.messages import DEFAULT_POLICY, ActorAction, CreditUsage, SessionDraw
from serve_app.core.shared_queue.model_state import ModelState
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
        self.freed_sessions: set[str] = set()  # leases of sessions to which slots were returned
        self.grants_to_retry: dict[str, str] = {}  # tickets whose grant their router cannot reach, and its engine
        self.waiting_for_session: dict[str, dict[str, None]] = {}  # tickets that wait for a session's slot, by lease
        self._avoided = AvoidedEngines()
        self._moves_left = AT_ONCE  # in this event
        self.is_unfinished = False  # whether the last event has left requests for the next one

    def arrive(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """Queue a request, or begin it in its session; its deadline is in this clock."""
        model_state = self.model_state(model)
        incarnation = self.incarnations.current(router, self.accounts.holder(router))
        before = self.by_ticket.get(arrival.request_id)
        if before is not None and before.incarnation.has_ended:
            self._forget(before, now)  # its router has begun to count its tickets anew
        request = ActorRequest(router, incarnation, model_state, arrival, arrived_s)
        self.by_ticket[arrival.request_id] = incarnation.requests[arrival.request_id] = request
        self._avoided.set(request, arrival)
        if arrival.session is not None:
            self._draw_on_session(request, now)
        if not request.runs_in_session_slot:
            self._enter_queue(request, now)

    def done(self, ticket: str, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """A request has ended; return its slots and tokens. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._charge_use(request, max(0, output_tokens - request.reported_tokens))
            actions = request.queue.admission.on_done(ticket, now, prompt_tokens, output_tokens)
            self.apply_actions(request.queue, actions)

    def cancel(self, ticket: str, now: float) -> None:
        """Cancel a waiting or running request. An unknown ticket changes nothing."""
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
            self._charge_use(request, output, prompt and prompt - request.arrival.prompt_tokens)
            self.apply_actions(request.queue, request.queue.admission.on_progress(ticket, output, now, prompt or None))

    def report_status(self, router: str, ticket: str, now: float) -> None:
        """Send the queue position of a ticket, if it waits."""
        request = self.live(ticket)
        status = None if request is None else request.queue.admission.status(ticket, now)
        if status is not None:
            self._send(router, status)

    def add_usage(self, usage: CreditUsage) -> None:
        """Count requests that a router granted on its own credit."""
        admission = self.model_state(usage.model).admission
        admission.on_uncounted_usage(usage.request_class, usage.tenant, usage.prompt_tokens, usage.output_tokens)

    def retry_grants(self, now: float) -> None:
        """Queue requests again, with their arrival time, whose router cannot reach the engine that they were granted;
        forget those of ended incarnations; queue those again that avoid an engine which their router reaches now. At
        most `AT_ONCE`: until its turn, one of the first kind keeps what the queue has granted it. The last step of an
        event."""
        due = list(self.grants_to_retry)
        is_outdated = self._avoided.is_outdated
        while due and self._moves_left:
            for ticket in due:
                if not self._moves_left:
                    break
                del self.grants_to_retry[ticket]
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

    def grant_freed_sessions(self, now: float) -> None:
        """Grant a session's returned slot to the first waiting request that fits into the session's tokens."""
        freed, self.freed_sessions = self.freed_sessions, set()
        for lease in sorted(freed & self.waiting_for_session.keys()):
            one = self._sessions.open_by_lease(lease)
            slots, tokens = self.accounts.free(lease)
            if one is None or not slots or one.engine in self.closed_engines:
                continue
            for ticket in self.waiting_for_session.get(lease, ()):
                request = self.by_ticket[ticket]
                if request.incarnation.has_ended:
                    continue
                drawn = request.drawn
                avoids = request.arrival.avoid_replicas
                whole = replace(request.original_arrival or request.arrival, avoid_replicas=avoids)
                enough = tokens + (0 if drawn is None else drawn.tokens) >= whole.cost
                if enough and one.engine not in avoids:
                    self._move(request, partial(self._begin_in_session, request, whole, lease, now), now)
                    break  # a session has one slot

    def _begin_in_session(self, request: ActorRequest, whole: Arrival, lease: str, now: float) -> None:
        self._take_from_queue(whole.request_id, now)
        if request.drawn is not None:
            self.accounts.give_back(request.router, lease, 0, request.drawn.tokens)
        request.arrival = whole
        request.original_arrival = None
        request.drawn = None
        self._draw_on_session(request, now)
        self._end_session_wait(request)

    def forget_routers(self, routers: Iterable[str]) -> None:
        """Routers' incarnations have ended: forget their requests, by and by. O(1) per router."""
        for router in routers:
            self.accounts.close(router)
            self.incarnations.end(router)
            self._avoided.forget_router(router)

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
        """A request is no longer known by ticket, and waits for no session."""
        ticket = request.arrival.request_id
        self.by_ticket.pop(ticket, None)
        request.incarnation.requests.pop(ticket, None)
        self._end_session_wait(request)

    def requeue_router(self, router: str, now: float) -> None:
        """A router reaches other engines: queue its requests again that avoid them, the oldest first. O(n log n) for
        its n requests that avoid some engine."""
        self._avoided.on_reachability(router)
        self._requeue_next(now)

    def _requeue_next(self, now: float) -> None:
        while self._moves_left and (request := self._avoided.next_outdated()) is not None:
            self._move(request, partial(self._requeue, request.arrival.request_id, now), now)

    def drop_engine(self, engine: str, routers: Iterable[str]) -> None:
        """An engine is gone: forget the requests of these routers there."""
        known = [one.requests for one in self.incarnations.ended] + [*map(self.incarnations.requests, routers)]
        for request in [one for requests in known for one in requests.values() if one.engine == engine]:
            self._avoided.forget(request)
            self._remove(request)

    def _requeue(self, ticket: str, now: float) -> None:
        """Queue a waiting request again with its original arrival time."""
        self._moves_left = max(0, self._moves_left - 1)
        request = self._take_from_queue(ticket, now)
        self._avoided.set(request, replace(request.arrival, accepted=True))
        self._enter_queue(request, now, WaitReason.PLACEMENT)

    def _enter_queue(self, request: ActorRequest, now: float, waited_for: WaitReason | None = None) -> None:
        """Hand a request to its model's queue. `waited_for`: for what it has waited, if it is granted at once."""
        admission = request.queue.admission
        holder = request.incarnation.holder
        actions = admission.on_arrive(request.arrival, now, now - request.arrived_s, holder)
        for at, action in enumerate(actions):
            if waited_for and isinstance(action, Grant) and action.request_id == request.arrival.request_id:
                actions[at] = replace(action, waited_for=action.waited_for or waited_for)
        self.apply_actions(request.queue, actions)

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

    def _draw_on_session(self, request: ActorRequest, now: float) -> None:
        """Begin an arriving request in its session, or have it wait in the queue for the missing tokens."""
        arrival = request.arrival
        router = request.router
        one = self._sessions.open_by_lease(arrival.session or "")
        if one is None or one.request.model != request.queue.name:
            return
        if one.engine in arrival.avoid_replicas | self.closed_engines:
            return
        self._sessions.touch(one.lease, now)
        slots, tokens = self.accounts.free(one.lease)
        if not slots:
            request.awaited_session = one.lease
            self.waiting_for_session.setdefault(one.lease, {})[arrival.request_id] = None
        if not tokens:
            return
        drawn = SessionDraw(arrival.request_id, one.lease, min(1, slots), min(tokens, arrival.cost))
        missing = arrival.cost - drawn.tokens
        if missing and (request.queue.admission.waiting or self.accounts.free(one.engine)[1] < missing):
            drawn = drawn._replace(slots=0)  # waiting requests get free tokens first
        self.accounts.charge(router, one.lease, drawn.slots, drawn.tokens)
        request.drawn = drawn
        self._send(router, drawn)
        if not drawn.slots:
            request.original_arrival = arrival
            request.arrival = replace(arrival, cost_tokens=drawn.remainder(arrival)[1], only_replica=one.engine)
            return
        request.engine, (request.slots, request.tokens) = one.engine, drawn.remainder(arrival)
        self.accounts.charge(router, one.engine, request.slots, request.tokens)
        admission = request.queue.admission
        admission.on_uncounted_usage(arrival.request_class, arrival.tenant, arrival.prompt_tokens, 0)
        waited_s = now - request.arrived_s
        self._send(router, Grant(arrival.request_id, one.engine, waited_s, WaitReason.SESSION if waited_s else None))

    def _end_session_wait(self, request: ActorRequest) -> None:
        """A request runs or has ended: it no longer waits for a session's slot."""
        if request.awaited_session:
            waiting = self.waiting_for_session[request.awaited_session]
            del waiting[request.arrival.request_id]
            if not waiting:
                del self.waiting_for_session[request.awaited_session]
            request.awaited_session = ""

    def detach_from_sessions(self, routers: Iterable[str], leases: Sequence[str], now: float) -> None:
        """Let requests that wait for the engine of these sessions wait for any engine."""
        for ticket in [ticket for router in routers for ticket in self.incarnations.requests(router)]:
            request = self.by_ticket.get(ticket)
            if request is None or (drawn := request.drawn) is None or drawn.lease not in leases:
                continue
            if request.engine or request.original_arrival is None:
                continue
            self.accounts.give_back(request.router, drawn.lease, drawn.slots, drawn.tokens)
            request.arrival = replace(request.original_arrival, session=None)
            request.drawn = None
            self._send(request.router, drawn._replace(tokens=0))
            self._requeue(ticket, now)

    def _charge_use(self, request: ActorRequest, output: int, prompt: int = 0) -> None:
        """Charge more tokens of a request in a session's slot to its tenant."""
        request.reported_tokens += output
        if request.runs_in_session_slot and (output or prompt):
            arrival = request.arrival
            request.queue.admission.on_uncounted_usage(arrival.request_class, arrival.tenant, prompt, output)

    def _end(self, ticket: str, now: float) -> ActorRequest | None:
        request = self.live(ticket)
        if request is None:
            return None
        self._avoided.forget(request)
        self._remove(request)
        if request.owed is not None:
            self._kv_debt.end(request.engine, request.owed)
        if request.drawn is not None:
            self.accounts.give_back(request.router, request.drawn.lease, request.drawn.slots, request.drawn.tokens)
            self._sessions.touch(request.drawn.lease, now)
        if request.engine:
            self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
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
                    self.grants_to_retry[action.request_id] = action.replica_id  # it is forgotten in its turn
                continue
            if isinstance(action, Refuse):
                if request.drawn is not None:
                    self._send(request.router, request.drawn._replace(slots=0, tokens=0))
                self._end(action.request_id, -math.inf)
            elif isinstance(action, Grant) and not self._begin(request, action.replica_id):
                self.grants_to_retry[action.request_id] = action.replica_id
                continue
            self._send(request.router, action)

    def _begin(self, request: ActorRequest, engine: str) -> bool:
        """A request is granted; False: it avoids the engine, or that has ended, and its queue has not heard of it."""
        one = request.queue.engines[engine]
        avoids = request.router != SESSIONS_OWNER and not one.may_take(request.router, request.arrival.fingerprint)
        if avoids or engine in self.closed_engines or not self.accounts.runs(engine):
            return False
        request.engine = engine
        self._end_session_wait(request)
        return True
