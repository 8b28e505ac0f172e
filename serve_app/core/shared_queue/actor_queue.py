"""The quota actor's queues: one order of requests per model for all routers.

Rules
- A model with waiting requests is contended: routers get no credit, return unused credit and submit every arrival here
  (`core.shared_queue.granting`). It stays contended for a moment after the queue empties, and always if some requests
  may not wait (`max_queued: 0`): credit of one router would make another refuse while slots are idle.
- After a crash of the actor an engine is closed until every router that may hold part of it has reported. A model whose
  engines are all closed is recovering: its routers grant from credit; then all waiting requests are admitted in order.
- While a running request has KV debt, no router keeps credit on its engine (`core.shared_queue.kv_debt`). On one that
  drains there is neither credit nor a grant.
- All routers receive opened and ended sessions (`core.shared_queue.session_admission`) in their ordered action streams.
- At every heartbeat a router's reported accounts are compared with those here, except engines with an action in
  transit. A difference ends the router's session, as does an error in its event (`applied_events`); one that concerns
  all ends all. The router begins a new incarnation.
- A router that is gone loses its waiting requests and its accounts. One that acknowledges nothing for
  `UNRESPONSIVE_S` is granted nothing more, long before it counts as gone: such grants would stay unused.

Invariant: once a router knows that a model is contended, it begins no request of it without a grant of this queue. A
request overtakes one of a higher class for at most one exchange after the arrival of the latter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial

from serve_app.core.limits import ActorLimits
from serve_app.core.memory import (
    SESSIONS_OWNER,
    EngineGrants,
    Ledger,
    NodeProcesses,
    Session,
    SessionLeases,
    SessionRequest,
)
from serve_app.core.queue import Arrival, Grant, Refuse
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.applied_events import AppliedEvents, agree
from serve_app.core.shared_queue.delivery import ActorSessions
from serve_app.core.shared_queue.granting import Granting
from serve_app.core.shared_queue.messages import ActorAction, ActorReply, Amount, RouterEvent, RouterMessage
from serve_app.core.shared_queue.postponed import PostponedRequests
from serve_app.core.shared_queue.published_state import PublishedState
from serve_app.core.shared_queue.scope import StepScope
from serve_app.core.shared_queue.session_admission import SessionAdmission
from serve_app.core.shared_queue.states import TICKET, TICKET_EVENTS, TicketState


class ActorQueue:
    """See the module. O(log n) per event; O(routers) when a model becomes contended or calm.

    Args:
        epoch: of the actor.
        ledger: has the engines and their slots.
        sessions: the open sessions.
        engines: which run, and what they have reported.
        limits: makes the limits, which answer routers by these sessions, and decide in steps.
    """

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        sessions: SessionLeases,
        engines: EngineGrants,
        limits: Callable[[ActorSessions, StepScope], ActorLimits],
    ) -> None:
        self.actor_sessions = ActorSessions(epoch)
        self.scope = StepScope(lambda: agree(self.granting.requests))
        self.limits = limits(self.actor_sessions, self.scope)
        self.store: messages.StoreAddress | None = None  # as the last router said
        self._sessions = sessions
        self._engines = engines
        self.accounts = ActorCredit(ledger)
        self.granting = Granting(ledger, sessions, self._send, self.accounts, engines, self.scope)
        self.session_admission = SessionAdmission(ledger, sessions, self.granting, engines.running, self.scope)
        self.postponed = PostponedRequests()
        # Engines on which the routers' holdings are unknown. A change takes effect at the end of the next event: a
        # router's report is booked before the rest is granted.
        self.closed_engines: frozenset[str] = frozenset()
        self.draining_engines: frozenset[str] = frozenset()  # these get no requests; takes effect in the same way
        self.published = PublishedState(self.actor_sessions)
        self._ledger = ledger
        self.applied = AppliedEvents(self._send, self.scope)
        self.processes: dict[str, NodeProcesses] = {}  # of routers, by name

    # Routers

    def on_exchange(self, message: RouterMessage, now: float) -> ActorReply:
        """Process a router's message that is not stale; the router is an owner in the ledger."""
        session = self.actor_sessions.sessions.get(message.router)
        if session is None or message.incarnation > session.incarnation:
            with self._reset_on_error(now):
                self._forget([message.router], now)
            session = self.actor_sessions.begin(message)
        with self._reset_on_error(now):
            self._admit_postponed(now)
            events = self.actor_sessions.receive(session, message)
            self._apply_events(message.router, events, now)
            self._end_unsure_sessions(now)
            self._after_event(now, {event.model for event in events if isinstance(event, messages.Arrive)})
            booked = None
            if any(isinstance(event, messages.AccountReport) for event in events):
                booked = self.accounts.amounts(message.router)
            if message.router not in self.actor_sessions.sessions:  # it has ended, and with it what it was granted
                return self.actor_sessions.stale_reply(message)
            return self.actor_sessions.reply(session, booked)

    def remove_routers(self, routers: Sequence[str], now: float) -> None:
        """Remove routers that are gone, with their accounts."""
        with self._reset_on_error(now):
            self._end_sessions(routers, now)
            for router in routers:
                self.processes.pop(router, None)
                self.granting.remove_router(router, now)
                self.limits.remove_router(router, now)
            self._after_event(now)

    def take_notes(self) -> list[str]:
        """The messages for the operator since the last call."""
        notes, self.scope.notes = self.scope.notes, []
        return notes

    @property
    def used_sessions(self) -> Container[str]:
        """The leases of sessions with a request that waits or runs."""
        return self.granting.requests.of_sessions

    def in_use(self, engine: str) -> tuple[int, int]:
        """The queue's slots and the KV tokens in use, by the last report of each router. O(its sessions)."""
        slots, tokens = self.accounts.in_use(engine)
        return slots, tokens + sum(self.accounts.in_use(lease)[1] for lease in self._sessions.leases_on(engine))

    # Engines and sessions

    def drop_engine(self, engine: str, now: float) -> None:
        """See `Granting.drop_engine`."""
        with self._reset_on_error(now):
            self.granting.drop_engine(engine, now)
            self._after_event(now)

    def sync_engines(self, engines: Iterable[str], now: float) -> None:
        """Update the free capacity of these engines."""
        with self._reset_on_error(now):
            for engine in engines:
                self._end_sessions(sorted(self.granting.unreconciled_routers(engine)), now)
                self.granting.changed[engine] = None
            self._after_event(now)

    def open_session(self, ask: SessionRequest, now: float) -> Session | None:
        """See `SessionAdmission.open_session`."""
        try:
            return self.session_admission.open_session(ask, now)
        finally:
            with self._reset_on_error(now):
                self._after_event(now)

    def close_session(self, session_id: str, now: float) -> None:
        """Close a session, or withdraw its pending opening. Raises LeaseNotFound."""
        if self.session_admission.withdraw(session_id, now) is None:
            one = self._sessions.by_session_id.get(session_id)
            self._sessions.close(session_id, self.closed_engines)
            if one is not None:
                self.accounts.returned[one.engine] = None
        with self._reset_on_error(now):
            self._after_event(now)

    def session_ended(self, lease: str, engine: str, now: float) -> None:
        """The ledger has ended the lease of a session that has no running request."""
        self._sessions.forget(lease)
        self.accounts.returned[engine] = None
        with self._reset_on_error(now):
            self._after_event(now)

    def on_tick(self, now: float) -> None:
        """End unresponsive routers and run what is due."""
        with self._reset_on_error(now):
            self._admit_postponed(now)
            self._end_unsure_sessions(now)
            for router in self.actor_sessions.unresponsive(now):
                self._end_sessions([router], now)
            self.granting.on_tick(now)
            self.scope.run("a tick of the limits", "", partial(self.limits.on_tick, now))
            self.scope.run("a tick of the sessions", "", partial(self.session_admission.on_tick, now))
            self._after_event(now)

    def next_due(self) -> float | None:
        """Time of the next `on_tick`; None: nothing is scheduled. O(models)."""
        if self.granting.requests.is_unfinished or self.session_admission.is_unfinished:
            return -math.inf
        queues = (one.admission.next_due() for one in self.granting.models.values())
        dues = (*queues, *self.published.calm_at.values(), self.postponed.next_due(), self.limits.next_due())
        return min((due for due in dues if due is not None), default=None)

    # Inside

    @contextlib.contextmanager
    def _reset_on_error(self, now: float) -> Iterator[None]:
        """After an error, forget all requests and have every router report its full state again."""
        self.scope.begin_event()
        try:
            yield
        except Exception:
            self.actor_sessions.end_all()
            self.postponed = PostponedRequests()
            self.postponed.gather(self.granting.models, now)
            self.granting = Granting(self._ledger, self._sessions, self._send, self.accounts, self._engines, self.scope)
            self.granting.requests.closed_engines = self.closed_engines
            self.session_admission.restart(self.granting)
            self.published.calm_at.clear()
            self.applied.unsure.clear()
            raise

    def _compare(self, router: str, accounts: tuple[Amount, ...], last_action: int) -> None:
        """Compare a router's report with its accounts, except engines with actions it has not received."""
        sending = self.actor_sessions.sessions[router].sending
        if last_action < sending.last_acked:
            return  # the router has received more actions since
        names = ("lease", "engine", "replica_id")
        unheard = {getattr(one, name, "") for one in sending.items_after(last_action) for name in names}
        goes_by = {engine: (slots, tokens) for engine, slots, tokens in accounts}
        known = {engine for engine, _, _ in self.accounts.amounts(router)}
        unheard |= {
            grant.pool for grant in self.granting.requests.grants_to_retry.values()
        }  # of these it does not hear
        for engine in (goes_by.keys() | known) - unheard:
            mine = self.accounts.account(router, engine)
            its = goes_by.get(engine, (0, 0))
            settled = router not in self.granting.unreconciled_routers(engine)
            if mine != its and settled and self._ledger.pool(engine) is not None:
                self.applied.unsure.add(router)
                self.scope.notes.append(f"router {router} reports {its} of {engine}, not {mine}; its session ends")

    def _apply_events(self, router: str, events: Sequence[RouterEvent], now: float) -> None:
        for event in events:
            self.applied.apply(router, event, self._apply_event, self.granting.requests, now)
        for event in events:  # last: credit must not take what a request of the same message needs
            if isinstance(event, messages.CreditRequest):
                self.applied.apply(router, event, self._grant_credit, self.granting.requests, now)

    def _apply_event(self, router: str, event: RouterEvent, now: float) -> None:
        granting = self.granting
        granting.follow(now)  # what the events before it have returned
        about_ticket = TICKET_EVENTS.get(type(event))
        if about_ticket is not None:
            TICKET.require(self.state_of(router, event.ticket), about_ticket)  # type: ignore[union-attr]
        match event:
            case messages.Arrive(model, arrival, waited_s):
                self._arrive(router, model, arrival, waited_s, now)
            case messages.Began(model, run):
                granting.requests.begun(router, model, run, now)
            case messages.Done(ticket):
                self.postponed.forget(router, ticket)
                granting.requests.done(router, event, now)
            case messages.Cancel(ticket):
                self.postponed.forget(router, ticket)
                granting.requests.cancel(ticket, now)
            case messages.GiveBack(engine, slots, tokens):
                self.accounts.give_back(router, engine, slots, tokens)
            case messages.TokenProgress(ticket, output_tokens, prompt_tokens):
                granting.requests.progress(ticket, output_tokens, prompt_tokens, now)
            case messages.CreditUsage():
                granting.requests.add_usage(event)
            case messages.AccountReport(holds, accounts, heard):
                self.accounts.report_in_use(router, holds)
                self._compare(router, accounts, heard)
            case messages.StatusRequest(ticket):
                granting.requests.report_status(router, ticket, now)
            case messages.KvTokenRequest():
                granting.request_kv_tokens(router, event)
            case messages.EngineReachability(model, engine, usable):
                granting.set_reachability(router, model, engine, usable, now)
            case messages.EngineDropped(engine):
                granting.drop_router_on_engine(router, engine, now)
                self.actor_sessions.send(router, messages.EngineDropAcknowledged(engine))
            case messages.ModelPolicy(model, policy):
                granting.set_policy(router, model, policy, now)
            case messages.Hello(holds, process):
                if process is not None:
                    self.processes[router] = process
                self._hello(router, holds)
            case messages.StoreAddress():
                self.store = event
                self.limits.asks_store = True
            case _:
                if not isinstance(event, messages.CreditRequest):
                    self.limits.on_event(router, event, now)

    def state_of(self, router: str, ticket: str) -> TicketState:
        """The state of a request, by its ticket."""
        request = self.granting.requests.live(ticket)
        if request is not None:
            return TicketState.RUNNING if request.engine else TicketState.WAITING
        return TicketState.POSTPONED if self.postponed.has(router, ticket) else TicketState.ENDED

    def _grant_credit(self, router: str, event: RouterEvent, now: float) -> None:
        if isinstance(event, messages.CreditRequest):
            self.granting.grant_credit(router, event, self.actor_sessions.state.contended)

    def _end_unsure_sessions(self, now: float) -> None:
        if self.applied.unsure:
            routers, self.applied.unsure = sorted(self.applied.unsure), set()
            self._end_sessions(routers, now)

    def _arrive(self, router: str, model: str, arrival: Arrival, waited_s: float, now: float) -> None:
        if arrival.deadline is not None:
            arrival = replace(arrival, deadline=arrival.deadline + now)
        if model in self.actor_sessions.state.recovering or self.postponed.gathers(model, now):
            self.postponed.add(router, model, arrival, now - waited_s)
        else:
            self.granting.requests.arrive(router, model, arrival, now - waited_s, now)

    def _admit_postponed(self, now: float) -> None:
        """Admit requests that waited during recovery."""
        for router, model, arrival, arrived_s in self.postponed.take(now):
            event = messages.Arrive(model, arrival, now - arrived_s)
            admit = partial(self._admit, arrived_s)
            self.applied.apply(router, event, admit, self.granting.requests, now)

    def _admit(self, arrived_s: float, router: str, event: RouterEvent, now: float) -> None:
        assert isinstance(event, messages.Arrive)
        self.granting.requests.arrive(router, event.model, event.arrival, arrived_s, now)

    def _forget(self, routers: Sequence[str], now: float) -> None:
        """Routers' incarnations have ended: forget their requests (`core.shared_queue.incarnations`)."""
        if not routers:
            return
        for router in routers:
            self.limits.end_session(router, now)
            self.postponed.forget_router(router)
        self.granting.changed.update(dict.fromkeys(self.granting.kv_debt.forget_routers(routers)))
        self.granting.requests.forget_routers(routers)

    def _end_sessions(self, routers: Sequence[str], now: float) -> None:
        """End routers' sessions; the next message of one that is alive begins a new incarnation."""
        self._forget(routers, now)
        for router in routers:
            self.actor_sessions.end(router)

    def _hello(self, router: str, holds: tuple[Amount, ...]) -> None:
        """A router begins an incarnation: book the accounts it reports, as far as capacity is free."""
        short = self.accounts.book(router, holds)
        self.granting.reconcile(router)
        opened = tuple(self._sessions.by_session_id.values())
        self.actor_sessions.send(router, messages.Booked(tuple(short), opened))

    def _send(self, router: str, action: ActorAction) -> None:
        """Send an action to a router or to the session admission."""
        if router == SESSIONS_OWNER:
            assert isinstance(action, Grant | Refuse)
            self.session_admission.decisions.append(action)
        else:
            self.actor_sessions.send(router, action)

    def _after_event(self, now: float, arrived: Set[str] = frozenset()) -> None:
        """What follows from an event, in steps that fail one by one; `arrived`: models with new requests."""
        steps: tuple[tuple[str, Callable[[], None]], ...] = (
            ("the limits", partial(self.limits.after_event, now)),
            ("closed and draining engines", self._follow_engines),
            ("recovery", partial(self._follow_recovery, now)),
            ("the requests to move", partial(self.granting.retry_grants, now)),
            ("closed sessions", self._end_closed_sessions),
            ("openings of sessions", partial(self.session_admission.settle, now)),
            ("news of sessions", partial(self._send_session_news, now)),
            ("KV debt", partial(self.granting.reclaim, now)),
            ("the state for the routers", partial(self.published.update, self.granting, now)),
            ("the figures for the routers", partial(self.published.update_figures, self.granting, arrived, now)),
        )
        self.granting.follow(now)
        for what, act in steps:
            self.scope.run("after an event", what, act)
            self.granting.follow(now)

    def _follow_engines(self) -> None:
        if self.closed_engines != self.granting.requests.closed_engines:
            self.granting.set_closed_engines(self.closed_engines)
        if self.draining_engines != self.granting.draining_engines:
            self.granting.set_draining_engines(self.draining_engines)

    def _end_closed_sessions(self) -> None:
        self.accounts.returned.update(dict.fromkeys(self._sessions.end_unused(self.closed_engines)))

    def _follow_recovery(self, now: float) -> None:
        state = self.actor_sessions.state
        if self.closed_engines or state.recovering:
            recovering = self.granting.recovering_models()
            self.postponed.gather(state.recovering - recovering, now)
            self.actor_sessions.set_state(state._replace(recovering=recovering))

    def _send_session_news(self, now: float) -> None:
        for one in self._sessions.take_opened_and_ended():
            if one.closed:
                self.granting.end_session(one, now)
            news = messages.SessionEnded(one.request.session_id, one.lease) if one.closed else one
            for router in self.actor_sessions.sessions:
                self.actor_sessions.send(router, news)
