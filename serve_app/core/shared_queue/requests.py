"""The requests of all routers at the actor, by ticket: each waits in its model's queue or runs in its router's account.

Rules
- The queue charges a grant to its router's account, and returns it when the request ends.
- A request that arrives while its model recovers is queued when it has recovered (`.postponed`).
- A request avoids the engines that its router cannot reach or that may not continue it. When these change it is
  queued again with its original arrival time: at once if there are more for it, else when it would be granted one that
  it avoids.
- A request of a session may take the session's place (`core.queue.session_place`) while its router reaches the engine;
  else it waits for the engine itself, or for any if that is too small beside its sessions (`.placements`).
- Many requests are moved a part in each event (`ActorRequests.move`).

Invariant: a ticket is known from its arrival to its end; no state of it remains afterwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from functools import partial

from serve_app.core.memory import SessionEntry, SessionLeases
from serve_app.core.queue import Action, Arrival, BegunRun, Grant, Refuse, SessionPlace, WaitReason
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.incarnations import ActorRequest, Incarnations
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.messages import ActorAction, CreditUsage, Done, SessionDraw, TokenProgress
from serve_app.core.shared_queue.model_queues import ModelQueues
from serve_app.core.shared_queue.model_state import ModelState
from serve_app.core.shared_queue.placements import Placements
from serve_app.core.shared_queue.postponed import PostponedRequests
from serve_app.core.shared_queue.scope import AT_ONCE, StepScope, lost
from serve_app.core.shared_queue.states import TicketState


class ActorRequests:
    """Requests that wait or run. O(log n) per event, unless stated.

    Args:
        models: the queues.
        accounts: the routers' accounts.
        sessions: a request of one renews it.
        kv_debt: KV tokens owed to running requests.
        send: sends an action to a router, or to what opens sessions.
        scope: runs each step that follows from events.
    """

    def __init__(
        self,
        models: ModelQueues,
        accounts: ActorCredit,
        sessions: SessionLeases,
        kv_debt: KvDebt,
        send: Callable[[str, ActorAction], None],
        scope: StepScope,
    ) -> None:
        self._models = models
        self._accounts = accounts
        self._sessions = sessions
        self._kv_debt = kv_debt
        self._send = send
        self._scope = scope
        self.by_ticket: dict[str, ActorRequest] = {}
        self.incarnations = Incarnations()
        self.placements = Placements(models.place_of)
        self.postponed = PostponedRequests()
        self.grants_to_retry: dict[str, Grant] = {}  # that their routers cannot use, by ticket: for the queue they run
        self._moves_left = AT_ONCE  # in this event
        self.is_unfinished = False  # whether the last event has left requests for the next one

    # Events of routers

    def arrive(self, router: str, model: str, arrival: Arrival, waited_s: float, now: float) -> None:
        """A request arrives that has waited so long, and may wait as long as its deadline says."""
        if arrival.deadline is not None:
            arrival = replace(arrival, deadline=arrival.deadline + now)
        if self.postponed.gathers(model, now):
            self.postponed.add(router, model, arrival, now - waited_s)
        else:
            self.enter(router, model, arrival, now - waited_s, now)

    def begun(self, router: str, model: str, run: BegunRun, now: float) -> None:
        """A request runs in its router's account. If its engine is gone, it stays unknown until that returns and the
        router has reported again."""
        queue = self._models.by_name.get(model)
        if queue is None or run.replica_id not in queue.engines:
            return
        if not self._accounts.runs(run.replica_id):
            queue.wait_for_reports(run.replica_id, [router])
            return
        pool = self._accounts.pool(run.lease) if run.lease else None
        if run.lease and pool is None:
            return  # its session has ended
        request = self._known(router, queue, run.arrival, now - run.running_s, now)
        request.engine = run.replica_id
        request.lease = run.lease
        self.placements.add_to_session(request)
        place = None if pool is None else SessionPlace(run.replica_id, pool)
        self.apply_actions(queue, queue.admission.on_begun(run, request.incarnation.holder, place, now))

    def done(self, router: str, event: Done, now: float) -> None:
        """A request has ended; its router's account returns what the event says, also if the ticket is unknown."""
        request = self._end(event.ticket, now)
        if request is None:
            self._accounts.give_back(router, event.pool, event.slots, event.tokens)
            return
        returned = (event.slots, event.tokens) if event.pool else None
        if not event.pool:
            self._accounts.give_back(router, request.engine, 0, request.grown_tokens)
        admission = request.queue.admission
        actions = admission.on_done(event.ticket, now, event.prompt_tokens, event.output_tokens, returned)
        self.apply_actions(request.queue, actions)

    def leave(self, router: str, ticket: str, now: float) -> None:
        """The caller of a request is gone, wherever it waits or runs."""
        self.postponed.forget(router, ticket)
        self.cancel(ticket, now)

    def progress(self, event: TokenProgress, now: float) -> None:
        """A request has used this many more tokens."""
        ticket, output, prompt = event
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
        admission = self._models.of_model(usage.model).admission
        admission.on_uncounted_usage(usage.request_class, usage.tenant, usage.prompt_tokens, usage.output_tokens)

    # Requests

    def live(self, ticket: str) -> ActorRequest | None:
        """The request with this ticket; None: it is unknown, or the incarnation of its router has ended."""
        request = self.by_ticket.get(ticket)
        return None if request is None or request.incarnation.has_ended else request

    @property
    def used_sessions(self) -> Container[str]:
        """The leases of sessions with a request that waits or runs."""
        return self.placements.by_session

    def state_of(self, router: str, ticket: str) -> TicketState:
        """The state of a request, by its ticket."""
        request = self.live(ticket)
        if request is not None:
            return TicketState.RUNNING if request.engine else TicketState.WAITING
        return TicketState.POSTPONED if self.postponed.has(router, ticket) else TicketState.ENDED

    def enter(self, router: str, model: str, arrival: Arrival, arrived_s: float, now: float) -> None:
        """Queue a request; its deadline is in this clock."""
        request = self._known(router, self._models.of_model(model), arrival, arrived_s, now)
        if arrival.session is not None:
            self._sessions.touch(arrival.session, now)
        self._enter_queue(request, now)

    def cancel(self, ticket: str, now: float) -> None:
        """Cancel a waiting request, or a grant on its way to its router. An unknown ticket changes nothing."""
        request = self._end(ticket, now)
        if request is not None:
            self._leave_queue(request, now)

    def cancel_on(self, router: str, engine: str, now: float) -> None:
        """Cancel what a router runs on an engine. O(its requests)."""
        requests = self.incarnations.requests(router).items()
        for ticket in [ticket for ticket, request in requests if request.engine == engine]:
            self.cancel(ticket, now)

    def hand_over(self, ticket: str) -> None:
        """Return what a granted request holds, and grant it to nobody: the caller takes it now."""
        self.by_ticket[ticket].queue.admission.hand_over(ticket)

    def lose(self, router: str, ticket: str, now: float) -> None:
        """An error at a request: it is refused. If it was granted before the error, it runs."""
        request = self.live(ticket)
        if request is None or not request.engine:
            self.cancel(ticket, now)
            self.discard(ticket, now)
            self._send(router, lost(ticket))

    def discard(self, ticket: str, now: float) -> None:
        """An error at the end of a request: if it is not known by ticket any more, no queue keeps it."""
        for queue in [] if ticket in self.by_ticket else self._models.by_name.values():
            self.apply_actions(queue, queue.admission.on_cancel(ticket, now))

    def apply_actions(self, queue: ModelState, actions: Iterable[Action]) -> None:
        """Carry out a queue's decisions."""
        self._models.touched.add(queue.name)
        for action in actions:
            request = self.by_ticket.get(action.request_id)
            if request is None:
                continue  # to be stopped on an engine that is gone
            if request.incarnation.has_ended:  # it is granted nothing, and its router reads nothing
                if isinstance(action, Refuse):
                    self._remove(request)
                continue
            if isinstance(action, Refuse):
                self._end(action.request_id, -math.inf)
            elif isinstance(action, Grant) and not self._begin(request, action):
                self.grants_to_retry[action.request_id] = action
                continue
            if request.lease:
                self._send(request.router, SessionDraw(action.request_id, request.lease, 1, request.arrival.cost))
            self._send(request.router, action)

    def has_any(self, queue: ModelState) -> bool:
        """Whether a request of a queue is known. O(requests)."""
        return any(request.queue is queue for request in self.by_ticket.values())

    def agree(self) -> bool:
        """Whether the queues know exactly the requests that are known by ticket. O(requests)."""
        waiting = defaultdict[int, set[str]](set)
        running = defaultdict[int, set[str]](set)
        retried = self.grants_to_retry.keys()
        for ticket, request in self.by_ticket.items():
            if ticket not in retried:
                (running if request.engine else waiting)[id(request.queue)].add(ticket)
        for queue in self._models.by_name.values():
            admission = queue.admission
            if (
                admission.queue.by_id.keys() != waiting[id(queue)]
                or admission.scheduler.running.keys() - retried != running[id(queue)]
            ):
                return False
        return True

    # Moves

    def move(self, now: float) -> None:
        """Queue requests again, with their arrival time, that were granted an engine which their router cannot reach;
        forget those of ended incarnations; queue those again that avoid an engine which their router reaches now. At
        most `AT_ONCE`: until its turn, one of the first kind keeps what the queue has granted it. The last step of an
        event."""
        due = list(self.grants_to_retry)
        while due and self._moves_left:
            for ticket in due:
                request = self.live(ticket)
                if self._moves_left and request is not None and ticket in self.grants_to_retry:
                    self._move(request, partial(self._requeue, request, now), now)
            # each of these once, since it is up to date then
            due = [one for one in self.grants_to_retry if self.placements.is_outdated(self.by_ticket[one])]
        while self._moves_left and (request := self.incarnations.next_ended()) is not None:
            self._move(request, partial(self._forget, request, now), now)
        self._requeue_next(now)
        self.is_unfinished = not self._moves_left
        self._moves_left = AT_ONCE

    def next_due(self) -> float | None:
        """When an event has more to move or to admit; None: nothing is scheduled. O(models)."""
        return -math.inf if self.is_unfinished else self.postponed.next_due()

    def admit_postponed(self, now: float) -> None:
        """Queue requests whose models have recovered, a part in each event."""
        for router, model, arrival, arrived_s in self.postponed.take(now):
            act = partial(self.enter, router, model, arrival, arrived_s, now)
            end = partial(self.lose, router, arrival.request_id, now)
            self._scope.run(f"a postponed request of router {router}", arrival, act, end)

    def requeue_router(self, router: str, now: float) -> None:
        """A router reaches other engines: queue its requests again that avoid them, the oldest first. O(n log n) for
        its n requests that avoid some engine."""
        self.placements.on_reachability(router)
        self._requeue_next(now)

    def end_session(self, session: SessionEntry, now: float) -> None:
        """A session has ended: the requests that waited for it are queued again, as ordinary ones. O(these)."""
        admission = self._models.admission(session.request.model)
        if admission is not None:
            admission.end_session(session.lease)
            self.placements.on_session(session.lease)
            self._requeue_next(now)

    def forget_routers(self, routers: Iterable[str]) -> None:
        """Routers' incarnations have ended: forget their requests, by and by. O(1) per router."""
        for router in routers:
            self._accounts.close(router)
            self.incarnations.end(router)
            self.placements.forget_router(router)
            self.postponed.forget_router(router)

    def drop_engine(self, engine: str) -> set[str]:
        """An engine is gone: forget the requests there; returns their routers. O(requests)."""
        gone = [request for request in self.by_ticket.values() if request.engine == engine]
        for request in gone:
            self._remove(request)
        return {request.router for request in gone if not request.incarnation.has_ended}

    # Inside

    def _known(self, router: str, queue: ModelState, arrival: Arrival, arrived_s: float, now: float) -> ActorRequest:
        """A new request, known by its ticket."""
        ticket = arrival.request_id
        incarnation = self.incarnations.current(router, self._accounts.holder(router))
        before = self.by_ticket.get(ticket)
        if before is not None and before.incarnation.has_ended:
            self._forget(before, now)  # its router has begun to count its tickets anew
        request = ActorRequest(router, incarnation, queue, arrival, arrived_s, ignorant=arrival.avoid_replicas)
        self.by_ticket[ticket] = incarnation.requests[ticket] = request
        return request

    def _remove(self, request: ActorRequest) -> None:
        """A request is no longer known by ticket."""
        ticket = request.arrival.request_id
        self.by_ticket.pop(ticket, None)
        self.grants_to_retry.pop(ticket, None)
        request.incarnation.requests.pop(ticket, None)
        self.placements.forget(request)

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
            self._accounts.mark_returned(request.engine)  # debt is paid from what its grant returns, too
        return request

    def _forget(self, request: ActorRequest, now: float) -> None:
        """Forget a request of an ended incarnation, and its place in the queue."""
        self._moves_left = max(0, self._moves_left - 1)
        self._remove(request)
        self._leave_queue(request, now)

    def _move(self, request: ActorRequest, act: Callable[[], None], now: float) -> None:
        """One of the moves of an event; if it fails, it ends its own request."""
        router = request.router
        ticket = request.arrival.request_id
        has_ended = request.incarnation.has_ended
        end = partial(self.discard, ticket, now) if has_ended else partial(self.lose, router, ticket, now)
        self._scope.run(f"a move of a request of router {router}", request.arrival, act, end)

    def _requeue_next(self, now: float) -> None:
        while self._moves_left and (request := self.placements.next_outdated()) is not None:
            self._move(request, partial(self._requeue, request, now), now)

    def _requeue(self, request: ActorRequest, now: float) -> None:
        """Queue a waiting request again with its original arrival time."""
        self._moves_left = max(0, self._moves_left - 1)
        self.grants_to_retry.pop(request.arrival.request_id, None)
        self._leave_queue(request, now)
        request.arrival = replace(request.arrival, accepted=True)
        self._enter_queue(request, now, WaitReason.PLACEMENT)

    def _enter_queue(self, request: ActorRequest, now: float, waited_for: WaitReason | None = None) -> None:
        """Hand a request to its model's queue. `waited_for`: for what it has waited, if it is granted at once."""
        admission = request.queue.admission
        holder = request.incarnation.holder
        place = self.placements.set(request)
        actions = admission.on_arrive(request.arrival, now, now - request.arrived_s, holder, place)
        for at, action in enumerate(actions):
            if waited_for and isinstance(action, Grant) and action.request_id == request.arrival.request_id:
                actions[at] = replace(action, waited_for=action.waited_for or waited_for)
        self.apply_actions(request.queue, actions)

    def _leave_queue(self, request: ActorRequest, now: float) -> None:
        """Cancel a request in its model's queue, and carry out the other decisions that follow."""
        ticket = request.arrival.request_id
        actions = request.queue.admission.on_cancel(ticket, now)
        self.apply_actions(request.queue, [one for one in actions if one.request_id != ticket])

    def _begin(self, request: ActorRequest, grant: Grant) -> bool:
        """A request is granted; False: it avoids the engine, or that has ended, and its queue has not heard of it."""
        engine = grant.replica_id
        if engine in self._models.closed_engines or not self._accounts.runs(engine) or not request.may_run_on(engine):
            return False
        request.engine = engine
        request.lease = grant.lease
        return True
