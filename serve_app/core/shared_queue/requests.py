"""The queues' state and their requests, by ticket: each waits in its model's queue or runs in its router's account.

Rules
- A grant is charged to its router's account before it is sent to the router, and returned when the request ends.
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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from serve_app.core.memory import SESSIONS_OWNER, SessionLeases
from serve_app.core.queue import Action, Admission, Arrival, Grant, Refuse, WaitReason
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.messages import DEFAULT_POLICY, ActorAction, CreditUsage, SessionDraw
from serve_app.core.shared_queue.model_state import ActorRequest, ModelState
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound

AT_ONCE = 64  # waiting requests that are queued again in one event: about 5 ms of the actor's time


class ActorRequests:
    """Requests that wait or run. O(log n) per event, unless stated.

    Args:
        accounts: the routers' accounts in the ledger.
        kv_debt: KV tokens owed to running requests.
        send: sends an action to a router.
        sync: updates the free capacity of an engine.
    """

    def __init__(
        self,
        accounts: ActorCredit,
        sessions: SessionLeases,
        kv_debt: KvDebt,
        send: Callable[[str, ActorAction], None],
        sync: Callable[[str, float], None],
    ) -> None:
        self.accounts, self._sessions, self._kv_debt, self._send, self._sync = accounts, sessions, kv_debt, send, sync
        self.models: dict[str, ModelState] = {}
        self.closed_engines: frozenset[str] = frozenset()  # engines on which the routers' holdings are unknown
        self.touched_models: set[str] = set()  # models with a decision since the last event
        self.by_ticket: dict[str, ActorRequest] = {}
        self.tickets: dict[str, dict[str, None]] = {}  # by router, in order of arrival
        self.grants_to_retry: list[str] = []  # tickets whose grant could not be charged or reached
        self.waiting_for_session: dict[str, dict[str, None]] = {}  # tickets that wait for a session's slot, by lease
        # By router: its tickets that avoid some engines, and when these arrived.
        self._avoiding: dict[str, dict[str, float]] = {}
        self._to_requeue: OrderedDict[str, None] = (
            OrderedDict()
        )  # tickets that avoid engines which their routers reach now
        self._moves_left = AT_ONCE  # in this event
        self.is_unfinished = False  # whether the last event has left requests for the next one

    def arrive(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """Queue a request, or begin it in its session; its deadline is in this clock."""
        model_state = self.model_state(model)
        request = self.by_ticket[arrival.request_id] = ActorRequest(router, model_state, arrival, arrived_s)
        self.tickets.setdefault(router, {})[arrival.request_id] = None
        self._set_avoided(request, arrival)
        if arrival.session is not None:
            self._draw_on_session(request, now)
        if not request.runs_in_session_slot:
            self.apply_actions(model_state, model_state.admission.on_arrive(request.arrival, now, now - arrived_s))

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

    def progress(self, ticket: str, output: int, prompt: int, now: float) -> None:
        """A request has used this many more tokens (`TokenProgress`)."""
        request = self.by_ticket.get(ticket)
        if request is not None:
            self._charge_use(request, output, prompt and prompt - request.arrival.prompt_tokens)
            self.apply_actions(request.queue, request.queue.admission.on_progress(ticket, output, now, prompt or None))

    def report_status(self, router: str, ticket: str, now: float) -> None:
        """Send the queue position of a ticket, if it waits."""
        request = self.by_ticket.get(ticket)
        status = None if request is None else request.queue.admission.status(ticket, now)
        if status is not None:
            self._send(router, status)

    def add_usage(self, usage: CreditUsage) -> None:
        """Count requests that a router granted on its own credit."""
        admission = self.model_state(usage.model).admission
        admission.on_uncounted_usage(usage.request_class, usage.tenant, usage.prompt_tokens, usage.output_tokens)

    def retry_grants(self, now: float) -> None:
        """Queue requests again, with their arrival time, whose grant could not be charged or whose router cannot reach
        the engine, and those that avoid an engine which their router reaches now. At most `AT_ONCE`: until its turn,
        one of the former keeps what the queue has granted it, so no other request is granted it. The last step of an
        event."""
        again, self.grants_to_retry = self.grants_to_retry, []
        while again:
            for at, ticket in enumerate(again):
                if not self._moves_left:
                    self.grants_to_retry += again[at:]
                    break
                request = self.by_ticket.get(ticket)
                if request is None or request.engine:  # queued again and granted since
                    continue
                if not self._is_avoid_outdated(ticket):
                    for engine in list(request.queue.engines):
                        self._sync(engine, now)
                self._requeue(ticket, now)
            if not self._moves_left:
                break
            again = [one for one in self.grants_to_retry if self._is_avoid_outdated(one)]  # each at most once
            self.grants_to_retry = [one for one in self.grants_to_retry if not self._is_avoid_outdated(one)]
        self._requeue_next(now)
        self.is_unfinished, self._moves_left = not self._moves_left, AT_ONCE

    def model_state(self, model: str) -> ModelState:
        """The queue of a model; created if there is none."""
        model_state = self.models.get(model)
        if model_state is None:
            admission = Admission(DEFAULT_POLICY, partial(self._sessions.held_tokens, model))
            model_state = self.models[model] = ModelState(model, admission)
        return model_state

    def grant_freed_sessions(self, now: float) -> None:
        """Grant a session's returned slot to the first waiting request that fits into the session's tokens."""
        freed, self.accounts.freed = self.accounts.freed, set()
        for lease in sorted(freed & self.waiting_for_session.keys()):
            one, (slots, tokens) = self._sessions.open_by_lease(lease), self.accounts.free(lease)
            if one is None or not slots or one.engine in self.closed_engines:
                continue
            for ticket in self.waiting_for_session.get(lease, ()):
                request = self.by_ticket[ticket]
                drawn, avoids = request.drawn, request.arrival.avoid_replicas
                whole = replace(request.original_arrival or request.arrival, avoid_replicas=avoids)
                enough = tokens + (0 if drawn is None else drawn.tokens) >= whole.cost
                if enough and one.engine not in avoids:
                    self._take_from_queue(ticket, now)
                    if drawn is not None:
                        self.accounts.give_back(request.router, lease, 0, drawn.tokens)
                    request.arrival, request.original_arrival, request.drawn = whole, None, None
                    self._draw_on_session(request, now)
                    self._end_session_wait(request)
                    break  # a session has one slot

    def forget_routers(self, routers: Sequence[str], now: float) -> None:
        """Routers' incarnations have ended: cancel their waiting requests; running ones stay only in the accounts."""
        tickets = [ticket for router in routers for ticket in self.tickets.pop(router, ()) if ticket in self.by_ticket]
        running = [ticket for ticket in tickets if self.by_ticket[ticket].engine]
        for ticket in [one for one in tickets if not self.by_ticket[one].engine]:
            self.cancel(ticket, now)  # first: none is granted what the end of a running one frees
        for ticket in running:
            request = self.by_ticket.pop(ticket)
            self._forget_avoiding(request.router, ticket)
            self._release(request, now)
            self._leave_queue(request, now)

    def requeue_router(self, router: str, now: float) -> None:
        """A router reaches other engines: queue its requests again that avoid them, the oldest first. O(its requests
        that avoid some engine)."""
        avoiding = self._avoiding.get(router, {}).items()
        self._to_requeue.update((ticket, None) for ticket, _ in sorted(avoiding, key=itemgetter(1)))
        self._requeue_next(now)

    def _requeue_next(self, now: float) -> None:
        while self._to_requeue and self._moves_left:
            ticket, _ = self._to_requeue.popitem(last=False)
            if self._is_avoid_outdated(ticket):
                self._requeue(ticket, now)

    def drop_engine(self, engine: str, routers: Iterable[str]) -> None:
        """An engine is gone: forget the requests of these routers there."""
        for router in routers:
            tickets = self.tickets.get(router, {})
            for ticket in [one for one in tickets if self.by_ticket[one].engine == engine]:
                tickets.pop(ticket, None)
                self._forget_avoiding(router, ticket)
                del self.by_ticket[ticket]

    def _is_avoid_outdated(self, ticket: str) -> bool:
        """Whether a ticket waits, and the engines that it avoids are not those that its router cannot reach."""
        request = self.by_ticket.get(ticket)
        if request is None or request.engine:
            return False
        return request.arrival.avoid_replicas != self._engines_to_avoid(request)

    def _engines_to_avoid(self, request: ActorRequest) -> frozenset[str]:
        """Engines that a request may not be granted; the session admission sets its own."""
        if request.router == SESSIONS_OWNER:
            return request.arrival.avoid_replicas
        return request.queue.to_avoid(request.router, request.arrival.fingerprint)

    def _set_avoided(self, request: ActorRequest, arrival: Arrival) -> None:
        """Set a request's arrival, with the engines that it avoids from now on."""
        avoided = self._engines_to_avoid(request)
        request.arrival = replace(arrival, avoid_replicas=avoided)
        if avoided:
            self._avoiding.setdefault(request.router, {})[arrival.request_id] = request.arrived_s
        else:
            self._forget_avoiding(request.router, arrival.request_id)

    def _forget_avoiding(self, router: str, ticket: str) -> None:
        avoiding = self._avoiding.get(router)
        if avoiding is not None and ticket in avoiding:
            del avoiding[ticket]
            if not avoiding:
                del self._avoiding[router]

    def _requeue(self, ticket: str, now: float) -> None:
        """Queue a waiting request again with its original arrival time."""
        self._moves_left = max(0, self._moves_left - 1)
        request = self._take_from_queue(ticket, now)
        self._set_avoided(request, replace(request.arrival, accepted=True))
        actions = request.queue.admission.on_arrive(request.arrival, now, now - request.arrived_s)
        for at, action in enumerate(actions):
            if isinstance(action, Grant) and action.request_id == ticket:  # for the queue it has just arrived
                actions[at] = replace(action, waited_for=action.waited_for or WaitReason.PLACEMENT)
        self.apply_actions(request.queue, actions)

    def _take_from_queue(self, ticket: str, now: float) -> ActorRequest:
        """Remove a request from its model's queue without ending it."""
        request = self.by_ticket.pop(ticket)  # decisions during its removal do not apply to it
        self._leave_queue(request, now)
        self.by_ticket[ticket] = request
        return request

    def _leave_queue(self, request: ActorRequest, now: float) -> None:
        """Cancel a request in its model's queue, and carry out the other decisions that follow."""
        ticket = request.arrival.request_id
        actions = request.queue.admission.on_cancel(ticket, now)
        self.apply_actions(request.queue, [one for one in actions if one.request_id != ticket])

    def _draw_on_session(self, request: ActorRequest, now: float) -> None:
        """Begin an arriving request in its session, or have it wait in the queue for the missing tokens."""
        arrival, router = request.arrival, request.router
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
        self._sync(one.engine, now)
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
        tickets = [ticket for router in routers for ticket in self.tickets.get(router, ())]
        for ticket in tickets:
            request = self.by_ticket.get(ticket)
            if request is None or (drawn := request.drawn) is None or drawn.lease not in leases:
                continue
            if request.engine or request.original_arrival is None:
                continue
            self.accounts.give_back(request.router, drawn.lease, drawn.slots, drawn.tokens)
            request.arrival, request.drawn = replace(request.original_arrival, session=None), None
            self._send(request.router, drawn._replace(tokens=0))
            self._requeue(ticket, now)

    def _charge_use(self, request: ActorRequest, output: int, prompt: int = 0) -> None:
        """Charge more tokens of a request in a session's slot to its tenant."""
        request.reported_tokens += output
        if request.runs_in_session_slot and (output or prompt):
            arrival = request.arrival
            request.queue.admission.on_uncounted_usage(arrival.request_class, arrival.tenant, prompt, output)

    def _end(self, ticket: str, now: float) -> ActorRequest | None:
        request = self.by_ticket.pop(ticket, None)
        if request is None:
            return None
        self.tickets.get(request.router, {}).pop(ticket, None)
        self._forget_avoiding(request.router, ticket)
        if request.owed is not None:
            self._kv_debt.end(request.engine, request.owed)
        self._end_session_wait(request)
        if request.drawn is not None:
            self.accounts.give_back(request.router, request.drawn.lease, request.drawn.slots, request.drawn.tokens)
            self._sessions.touch(request.drawn.lease, now)
        if request.engine:
            self.accounts.give_back(request.router, request.engine, request.slots, request.tokens)
            self._release(request, now)
        return request

    def apply_actions(self, queue: ModelState, actions: Iterable[Action]) -> None:
        """Carry out a queue's decisions."""
        self.touched_models.add(queue.name)
        for action in actions:
            request = self.by_ticket.get(action.request_id)
            if request is None:
                continue  # to be stopped on an engine that is gone
            if isinstance(action, Refuse):
                if request.drawn is not None:
                    self._send(request.router, request.drawn._replace(slots=0, tokens=0))
                self._end(action.request_id, -math.inf)
            elif isinstance(action, Grant) and not self._charge(request, action.replica_id):
                self.grants_to_retry.append(action.request_id)
                continue
            self._send(request.router, action)

    def _charge(self, request: ActorRequest, engine: str) -> bool:
        """Charge a grant to its router's account; False: the request avoids the engine, or it is not free there while
        several requests end at once."""
        arrival, one = request.arrival, request.queue.engines[engine]
        if request.router != SESSIONS_OWNER and not one.may_take(request.router, arrival.fingerprint):
            return False
        try:
            self.accounts.charge(request.router, engine, arrival.slots, arrival.cost)
        except (InsufficientMemory, LeaseNotFound, LeaseConflict):
            return False
        request.engine, request.slots, request.tokens = engine, arrival.slots, arrival.cost
        self._end_session_wait(request)
        one.granted_slots += arrival.slots
        one.granted_tokens += arrival.cost
        return True

    def _release(self, request: ActorRequest, now: float) -> None:
        """Remove a request's grant from its engine's sums; the caller informs `Admission` next."""
        one = request.queue.engines.get(request.engine)
        if one is not None:
            if not request.runs_in_session_slot:
                one.granted_slots = max(0, one.granted_slots - request.arrival.slots)
                one.granted_tokens = max(0, one.granted_tokens - request.arrival.cost)
            self._sync(request.engine, now)
