"""A router's side of the queue: grants on credit at once while no request waits, and asks the quota actor otherwise.

The same style as `core.queue.admission`: events in, `Grant` and `Refuse` out, by the request's own id. A shell carries
`next_message` and `watch_message` to the quota actor and passes the answers to `on_reply`.

Rules
- A request is granted here if its model is not contended in the actor's last state, no request of this router waits for
  the model, and an engine has enough credit; otherwise it is submitted, and the actor's order applies.
- A request of a session is submitted whenever the actor is reachable, because the actor has all sessions' places. The
  actor sends the open sessions; while it is away, the last known ones count, and such a request runs on credit of its
  session's engine.
- The actor is away from the first failed call until its next answer. Meanwhile the router grants waiting requests on
  its credit, by class, then by age. Requests queued at the actor are cancelled first, so none is granted twice.
- No request begins on credit later than `FENCE_S` after the last answered message was sent: the credit may belong to
  another router by then. It is not claimed from the next actor, either.
- After a new epoch, or if the actor does not know the incarnation, the router reports its accounts and submits waiting
  requests again, with the time already waited.
- Requests are submitted as earlier events are acknowledged, higher classes first. While the actor is away, the model's
  own bounds limit the requests that wait here.
- Requests that cannot be served in time, or find the queue full, by the actor's last figures are refused here.

Invariant: every arrival ends as exactly one of granted, refused, cancelled while waiting, or still waits.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from serve_app.core.limits import LimitAction, LimitDecision, LimitedRequest, RouterLimits
from serve_app.core.memory import NodeProcesses
from serve_app.core.queue import Action, Arrival, Grant, QueuePolicy, QueueStatus, RefusalReason, Refuse, WaitReason
from serve_app.core.receipts import ServiceLevel
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.applied_actions import AppliedActions
from serve_app.core.shared_queue.class_counts import ClassCounts, class_counts
from serve_app.core.shared_queue.delivery import RouterSession
from serve_app.core.shared_queue.early_refusal import EarlyRefusal
from serve_app.core.shared_queue.messages import DEFAULT_POLICY, ActorAction, Amount
from serve_app.core.shared_queue.router_credit import RouterCredit
from serve_app.core.shared_queue.router_pending import PendingRequest, PendingRequests
from serve_app.core.shared_queue.router_running import InFlight
from serve_app.core.shared_queue.states import (
    REQUEST,
    REQUEST_ACTIONS,
    RequestState,
    RequestStep,
    RouterSessionReply,
    RouterSessionState,
)
from serve_app.core.times import FENCE_S
from serve_app.types import RequestClass


class RouterQueue:
    """The queues of all models, for one router: `pending` has its waiting requests, `in_flight` its running ones.

    Args:
        router, process: its name, unique among routers, and its process.
        incarnation: at least the last one used under this name.
    """

    def __init__(self, router: str, incarnation: int = 0, process: NodeProcesses | None = None) -> None:
        self.router_session = RouterSession(router, incarnation)
        self._process = process
        self.accounts = RouterCredit()
        self._policies: dict[str, QueuePolicy] = {}
        self.pending = PendingRequests()
        self.in_flight = InFlight(self.accounts, self.router_session)
        self.limits = RouterLimits(router, lambda event: self.router_session.put(event))
        self.applied = AppliedActions(self.pending, self.in_flight, self.limits, self.router_session)
        self._store: messages.StoreAddress | None = None
        self.early_refusal = EarlyRefusal(self.router_session, self._policies)
        self.credit_valid_until = -math.inf
        self._unmatched: dict[str, object] = {}  # requests that differed between both sides at the last check
        self.sessions = self.in_flight.sessions  # open sessions, by name
        self.begin_incarnation(0, 0.0)

    def serve(self, model: str, policy: QueuePolicy) -> None:
        """Serve a model, with these bounds."""
        self._policies[model] = policy
        self.router_session.put(messages.ModelPolicy(model, policy))

    def set_store(self, url: str | None) -> None:
        """Tell the actor where the store is: it asks there what was used of quotas."""
        self._store = messages.StoreAddress(url)
        self.router_session.put(self._store)

    def retire(self, model: str) -> None:
        """Stop serving a model; its waiting requests have been refused already."""
        if self._policies.pop(model, None) is not None:
            self.router_session.put(messages.ModelPolicy(model, None))

    def set_reachability(
        self, model: str, engine: str, usable: bool, now: float, *, single_request: bool = False
    ) -> list[Action]:
        """Set whether requests can be sent to an engine. `single_request`: one only, until this is called again."""
        self.in_flight.set_reachability(model, engine, usable, single_request)
        return self._serve_alone(now, model)

    @property
    def alone(self) -> bool:
        """Whether the actor does not answer, or has not booked this router's accounts."""
        return self.router_session.standing is not RouterSessionState.BOOKED

    def decides_alone(self, model: str) -> bool:
        """Whether this router grants waiting requests on its credit: the actor is away, or does not know yet what all
        routers hold on this model's engines."""
        return self.alone or model in self.router_session.state.recovering

    # Requests

    def on_arrive(self, model: str, arrival: Arrival, now: float) -> list[Action]:
        """Grant, refuse or queue a request. Raises ValueError if one of this id waits or runs."""
        if arrival.request_id in self.pending.by_request_id or arrival.request_id in self.in_flight.running:
            raise ValueError(f"{arrival.request_id!r} waits or runs already")
        if arrival.deadline is not None and arrival.deadline <= now:
            return [self.early_refusal.refusal(model, arrival, RefusalReason.DEADLINE)]
        waiting = PendingRequest(model, arrival, now)
        alone = self.decides_alone(model)
        if arrival.session is not None and not alone:
            self._add_pending(waiting, now)
            return []
        asks = not alone and model in self.router_session.state.contended
        if not asks and model not in self.pending.queues:
            granted = self._grant_on_credit(waiting, now)
            if granted is not None:
                self._balance_credit(now)
                return [granted]
        if not alone:
            reason = self.early_refusal.refusal_reason(model, arrival, now)
            full = self.early_refusal.full(model) if reason is RefusalReason.QUEUE_FULL else ""
        else:
            full = self.pending.exceeded(model, self._policies.get(model, DEFAULT_POLICY), arrival.request_class)
            reason = RefusalReason.QUEUE_FULL if full and not arrival.accepted else None
        if reason is not None:
            return [self.early_refusal.refusal(model, arrival, reason, full)]
        self._add_pending(waiting, now)
        return self._serve_alone(now, model)

    def charge(self, request: LimitedRequest, now: float) -> LimitDecision | None:
        """Charge a request against its limits; None: the decision comes later (`RouterLimits.decided`)."""
        is_fenced = now >= self.credit_valid_until
        may_ask = not self.alone and self.router_session.arrivals_left > 0
        return self.limits.on_arrive(request, now, is_fenced=is_fenced, may_ask=may_ask)

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """Cancel a waiting or running request; its generated tokens count. An unknown id changes nothing."""
        REQUEST.require(self.state_of(request_id), RequestStep.CANCELLED)
        if self._withdraw(request_id) is not None or (run := self.in_flight.running.get(request_id)) is None:
            return []
        return self.on_done(request_id, now, None, run.output_tokens)

    def on_done(
        self, request_id: str, now: float, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> list[Action]:
        """A granted request has ended after this many tokens; None: unknown, its estimate counts. An unknown id changes
        nothing.

        Raises:
            UnexpectedEvent: it waits.
        """
        REQUEST.require(self.state_of(request_id), RequestStep.DONE)
        run = self.in_flight.end(request_id, prompt_tokens, output_tokens, is_alone=self.alone)
        if run is None:
            return []
        actions = self._serve_alone(now, run.model)
        self._balance_credit(now)
        return actions

    def on_tick(self, now: float) -> list[Action]:
        """Refuse requests whose wait is over, submitted ones included. The wait of one that has begun counts here only
        while the actor does not answer: the actor knows whether its class is served (`core.queue.admission`)."""
        self.limits.on_tick(now, is_away=self.alone)
        actions: list[Action] = []
        while (late := self.pending.first_overdue(now)) is not None:
            deadline = late.arrival.deadline
            ends_s = self.credit_valid_until + self._longest_wait_s(late)
            if late.arrival.has_begun and now < ends_s and (deadline is None or now < deadline):
                self.pending.set_wait_end(late, ends_s)
                continue
            self._withdraw(late.request_id)
            served = any(one.usable for one in self.accounts.by_engine.values() if one.model == late.model)
            reason = RefusalReason.TIMEOUT if served else RefusalReason.NO_REPLICA
            if deadline is not None and deadline <= now:
                reason = RefusalReason.DEADLINE
            actions.append(self.early_refusal.refusal(late.model, late.arrival, reason))
        return actions

    def ahead(self, model: str, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """The number of waiting requests ahead of a request of this class, by requested class: of all routers in the
        actor's last figures, or of this router where that is more."""
        waiting = self.pending.count_by_class(model)
        router_session = self.router_session
        if model in router_session.figures and model in router_session.state.contended:
            classes = router_session.figures[model].classes
            waiting = {level: max(classes[level].waiting, waiting[level]) for level in RequestClass}
        return tuple((who, waiting[who]) for who in reversed(RequestClass) if who >= request_class and waiting[who])

    def others_wait(self, model: str, tenant: str) -> bool:
        """Whether a request of a tenant other than this one waits: at any router in the actor's last figures, or here.
        O(this router's waiting requests of the tenant + tenants in the figures)."""
        if self.pending.has_others(model, tenant):
            return True
        router_session = self.router_session
        if model not in router_session.figures or model not in router_session.state.contended:
            return False
        classes = router_session.figures[model].classes
        return any(one.waiting and set(one.tenant_slots or ()) != {tenant} for one in classes)  # None: many tenants

    def by_class(self, model: str, levels: Mapping[RequestClass, ServiceLevel], now: float) -> tuple[ClassCounts, ...]:
        """This router's requests by class (`shared_queue.class_counts`)."""
        figures = self.router_session.figures.get(model)
        return class_counts(model, self.pending, self.in_flight, figures, levels, now)

    def ticket_of(self, request_id: str) -> str:
        """The id of a waiting request at the actor; empty: it has none yet."""
        waiting = self.pending.by_request_id.get(request_id)
        return "" if waiting is None else waiting.ticket

    def status(self, request_id: str) -> QueueStatus | None:
        """The queue position of a request by the actor's last answer, or before that by its last figures; requests a
        new answer. None: it does not wait, or the actor has yet to take it and may refuse it."""
        waiting = self.pending.by_request_id.get(request_id)
        router_session = self.router_session
        if waiting is None or (
            waiting.ticket and not self.alone and waiting.submitted_in > router_session.sending.last_acked
        ):
            return None
        if waiting.ticket and not waiting.status_requested and router_session.arrivals_left:
            waiting.status_requested = True
            router_session.put(messages.StatusRequest(waiting.ticket))
        if waiting.status is not None:
            return waiting.status
        level = waiting.arrival.request_class
        ahead = sum(count for _, count in self.ahead(waiting.model, level))  # includes the request
        start_s = self.early_refusal.expected_wait_s(waiting.model, waiting.arrival)
        return QueueStatus(request_id, level, max(1, ahead), start_s)

    def next_message(self, now: float, *, beat: bool = False) -> messages.RouterMessage | None:
        """The next message; None: nothing to send before the next heartbeat. `beat`: a heartbeat, with usage."""
        if self.router_session.is_overfull:
            self.begin_incarnation(self.router_session.epoch, now)
        self._balance_credit(now, every=beat)
        if beat and not self.alone:
            self.limits.on_heartbeat(now)
        wanted = self.router_session.reports_wanted
        found = self.router_session.next_message(self.in_flight.announcements(now), beat=beat)
        self.router_session.reports_wanted = wanted and self.has_reports  # one message may not take them all
        return found

    @property
    def has_reports(self) -> bool:
        """Whether a heartbeat would carry more than the accounts."""
        return self.router_session.has_reports or bool(self.in_flight.unannounced)

    def reconcile(self, alive: Mapping[str, bool], now: float) -> tuple[list[Action], list[str]]:
        """At a heartbeat: reconcile requests between this queue and its process, and report the accounts to the actor.

        Args:
            alive: the requests of this process, and whether each of them runs.

        Returns:
            Resulting actions; and requests known on one side only, or in another state there, at two heartbeats in a
            row, which are ended here. O(requests).
        """
        known: dict[str, object] = {**self.pending.by_request_id, **self.in_flight.running}
        ours = {request_id: request_id in self.in_flight.running for request_id in known}
        odd = {one: known.get(one) for one in known.keys() | alive.keys() if ours.get(one) is not alive.get(one)}
        lost = [one for one, what in odd.items() if one in self._unmatched and self._unmatched[one] is what]
        self._unmatched = odd
        actions = [action for request_id in lost for action in self.on_cancel(request_id, now)]
        places = self.in_flight.places()
        in_use = (*map(self.in_flight.held, self.accounts.by_engine), *places)
        accounts = (*map(self.in_flight.account, self.accounts.by_engine), *places)
        self.router_session.report_accounts(_not_empty(in_use), _not_empty(accounts))
        return actions, lost

    def account(self, engine: str) -> tuple[int, Amount]:
        """Slots that requests hold on an engine, and this router's account there in the actor's last report."""
        return self.in_flight.held(engine).slots, self.router_session.ledger_accounts.get(engine, Amount(engine, 0, 0))

    def on_lost(self, now: float) -> list[Action]:
        """A call to the actor has failed or timed out; the actor may have received it."""
        self.router_session.on_lost()
        return self._serve_alone(now, *self.pending.queues)

    def on_reply(self, reply: messages.ActorReply, sent_at: float, now: float) -> list[Action]:
        """Process the answer to a message sent at `sent_at`; watch messages included."""
        router_session = self.router_session
        if reply.epoch < router_session.epoch or (
            reply.epoch == router_session.epoch and reply.incarnation != router_session.incarnation
        ):
            return []  # from an older actor epoch, or to an older incarnation
        router_session.takes_begun = reply.takes_begun
        if reply.is_stale or reply.epoch > router_session.epoch:
            self.begin_incarnation(reply.epoch, now)
            return []
        if now >= sent_at + FENCE_S:
            return self.on_lost(now)
        before = router_session.state
        taken = router_session.on_reply(reply)
        actions = self.applied.apply(taken, self.on_action, now)
        if self.applied.take_unsure():
            self.begin_incarnation(reply.epoch, now)
            return actions
        is_booked = any(isinstance(action, messages.Booked) for action in taken)
        router_session.advance(RouterSessionReply.BOOKED if is_booked else RouterSessionReply.OTHER)
        if router_session.is_booked:
            self.credit_valid_until = max(self.credit_valid_until, sent_at + FENCE_S)
        self.early_refusal.on_reply(sent_at, reply.last_taken_event)
        actions += self._serve_alone(now, *self.pending.queues)
        if self.alone:
            return actions
        for waiting in self.pending.not_handed_in(router_session.arrivals_left, self.decides_alone):
            self._hand_in(waiting, now)
        self.limits.ask_pending(router_session.arrivals_left)
        changed = (router_session.state.contended, router_session.state.recovering) != (
            before.contended,
            before.recovering,
        )
        router_session.reports_wanted |= changed and self.has_reports  # what runs may have to stop for those that wait
        self._balance_credit(now, every=changed)
        return actions

    def begin_incarnation(self, epoch: int, now: float) -> None:
        """Begin an incarnation: report the full state again; running requests get other tickets."""
        self.pending.forget_tickets()
        self.early_refusal.reset()
        self.in_flight.dropped_engines.clear()
        to_be_known = self.in_flight.begin_incarnation(now)
        self.accounts.begin_incarnation(credit_valid=now < self.credit_valid_until)
        accounts = tuple(map(self.in_flight.account, self.accounts.by_engine))
        engines = self.accounts.by_engine.items()
        self.router_session.begin(
            epoch,
            (
                messages.Hello(accounts + self.in_flight.places(), self._process),
                *([] if self._store is None else [self._store]),  # first: it is asked for what is told next
                self.limits.begin_incarnation(now),
                *(messages.ModelPolicy(model, policy) for model, policy in self._policies.items()),
                *(messages.EngineReachability(one.model, engine, one.usable) for engine, one in engines),
                *to_be_known,
            ),
        )

    def state_of(self, request_id: str) -> RequestState:
        """The state of a request."""
        waiting = self.pending.by_request_id.get(request_id)
        if waiting is not None:
            return RequestState.SUBMITTED if waiting.ticket else RequestState.WAITING
        return RequestState.RUNNING if request_id in self.in_flight.running else RequestState.ENDED

    def _state_of_ticket(self, ticket: str) -> RequestState:
        if ticket in self.pending.tickets:
            return RequestState.SUBMITTED
        return RequestState.RUNNING if ticket in self.in_flight.by_ticket else RequestState.ENDED

    def on_action(self, action: ActorAction, now: float) -> list[Action]:
        about_request = REQUEST_ACTIONS.get(type(action))
        if about_request is not None:
            ticket = action.ticket if isinstance(action, messages.KvTokenGrant) else action.request_id  # type: ignore[union-attr]
            REQUEST.require(self._state_of_ticket(ticket), about_request)
        match action:
            case Grant():
                return self._on_grant(action, now)
            case Refuse(ticket, reason, retry_after_s, full):
                waiting = self.pending.take_ticket(ticket)
                if waiting is not None:
                    return [Refuse(waiting.request_id, reason, retry_after_s, full)]
            case QueueStatus(ticket):
                waiting = self.pending.tickets.get(ticket)
                if waiting is not None:
                    waiting.status = replace(action, request_id=waiting.request_id)
                    waiting.status_requested = False
            case messages.EngineDropAcknowledged(engine):
                again = self.in_flight.dropped_engines.pop(engine, None)
                if again is not None:
                    return self.set_reachability(again[0], engine, again[1], now, single_request=again[2])
            case _ if isinstance(action, LimitAction):
                self.limits.on_action(action, now)
            case _:
                return self.in_flight.on_action(action, now)
        return []

    def _on_grant(self, granted: Grant, now: float) -> list[Action]:
        ticket = granted.request_id
        engine = granted.replica_id
        waiting = self.pending.take_ticket(ticket)
        if waiting is None:
            return []  # withdrawn; the cancellation returns the grant
        arrival = waiting.arrival
        account = self.accounts.by_engine.get(engine)
        if account is None or not account.usable:
            if account is None and engine not in self.in_flight.dropped_engines:
                # otherwise the actor was informed
                self.router_session.put(messages.EngineReachability(waiting.model, engine, False))
            pool = (granted.lease, 1, arrival.cost) if granted.lease else (engine, arrival.slots, arrival.cost)
            self.router_session.end_request(messages.Done(ticket, 0, 0, *pool))
            again = replace(arrival, accepted=True, session=None)
            self._add_pending(PendingRequest(waiting.model, again, waiting.arrived_s), now)
            return []
        self.in_flight.begin_granted(waiting, granted, now)
        waited_for = granted.waited_for or (WaitReason.QUOTA_ACTOR if granted.waited_s else None)  # before its hand-in
        return [Grant(arrival.request_id, engine, now - waiting.arrived_s, waited_for)]

    def _grant_on_credit(self, waiting: PendingRequest, now: float) -> Grant | None:
        """Grant on credit; None: there is not enough, or it may belong to another router by now."""
        engine = None if now >= self.credit_valid_until else self.in_flight.begin_on_credit(waiting, now)
        if engine is None:
            return None
        waited_s = now - waiting.arrived_s
        return Grant(waiting.request_id, engine, waited_s, WaitReason.QUOTA_ACTOR if waited_s else None)

    def _serve_alone(self, now: float, *models: str) -> list[Action]:
        """Grant waiting requests in order while the actor cannot. One that only certain engines may run holds up those
        alone for which the same holds."""
        actions: list[Action] = []
        for model in models:
            held_up = set[tuple[str | None, frozenset[str]]]()  # by fingerprint, and the engines to avoid

            def may_run(
                model: str, fingerprint: str | None, avoid: frozenset[str], held_up: Container[object] = held_up
            ) -> bool:
                return (fingerprint, avoid) not in held_up and self.accounts.may_run(model, fingerprint, avoid)

            while self.decides_alone(model) and (first := self.pending.first(model, may_run)) is not None:
                granted = self._grant_on_credit(first, now)
                if granted is not None:
                    self._withdraw(first.request_id)
                    actions.append(granted)
                    continue
                where = first.arrival.fingerprint, first.arrival.avoid_replicas
                if where == (None, frozenset()):
                    break
                held_up.add(where)
        return actions

    def _add_pending(self, waiting: PendingRequest, now: float) -> None:
        self.pending.add(waiting, self._longest_wait_s(waiting))
        if not self.decides_alone(waiting.model) and self.router_session.arrivals_left:
            self._hand_in(waiting, now)

    def _longest_wait_s(self, waiting: PendingRequest) -> float:
        policy = self._policies.get(waiting.model, DEFAULT_POLICY)
        return policy.longest_wait_s(has_begun=waiting.arrival.has_begun)

    def _hand_in(self, waiting: PendingRequest, now: float) -> None:
        ticket = self.router_session.new_ticket()
        deadline = waiting.arrival.deadline
        left_s = None if deadline is None else deadline - now
        arrival = replace(waiting.arrival, request_id=ticket, deadline=left_s)
        number = self.router_session.put(messages.Arrive(waiting.model, arrival, now - waiting.arrived_s))
        self.pending.hand_in(waiting, ticket, number)
        self.early_refusal.on_handed_in(number, waiting.model, arrival)

    def _withdraw(self, request_id: str) -> PendingRequest | None:
        """Remove a waiting request; cancels its queue entry at the actor."""
        waiting = self.pending.remove(request_id)
        if waiting is not None and waiting.ticket:
            self.router_session.put(messages.Cancel(waiting.ticket))
        return waiting

    def _balance_credit(self, now: float, *, every: bool = False) -> None:
        """Return surplus credit and request missing credit on engines with changes, or on every engine."""
        if self.alone:
            return
        for engine in self.accounts.by_engine if every else sorted(self.accounts.changed):
            event = self.accounts.balance(engine, self.router_session.state, now)
            if event is not None:
                self.router_session.put(event)
        self.accounts.changed.clear()


def _not_empty(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    return tuple(one for one in amounts if one.slots or one.tokens)
