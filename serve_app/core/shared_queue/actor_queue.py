"""The quota actor's queues: one order of requests per model for all routers.

Rules
- A model with waiting requests is contended: routers get no credit, return unused credit and submit every arrival here
  (`.published_state`). It stays contended for a moment after the queue empties, and always if some requests may not
  wait (`max_queued: 0`): credit of one router would make another refuse while slots are idle.
- After a crash of the actor an engine is closed until every router that may hold part of it has reported. A model whose
  engines are all closed is recovering: its routers grant from credit; then all waiting requests are admitted in order.
- While a running request has KV debt, no router keeps credit on its engine (`.kv_debt`). On one that drains there is
  neither credit nor a grant.
- All routers receive opened and ended sessions (`.session_admission`) in their ordered action streams.
- At every heartbeat a router's reported accounts are compared with those here, except engines with an action in
  transit. A difference ends the router's session, as does an error in its event (`.applied_events`); one that concerns
  all ends all. The router begins a new incarnation.
- A router that is gone loses its waiting requests and its accounts. One that acknowledges nothing for
  `UNRESPONSIVE_S` is granted nothing more, long before it counts as gone: such grants would stay unused.

This module only passes events on, each to the object that owns what it is about. None of these knows one after it:
`.actor_credit` (routers' accounts, in the pools of `core.pools`), `.model_queues` (which queue grants from which
engine), `.requests` (requests, by ticket), `.engines` (engines that come, go and owe KV tokens), `.session_admission`
(sessions that wait to be opened).

Invariant: once a router knows that a model is contended, it begins no request of it without a grant of this queue. A
request overtakes one of a higher class for at most one exchange after the arrival of the latter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Iterator, Sequence, Set
from functools import partial
from typing import TypeVar

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
from serve_app.core.queue import Grant, Refuse
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.applied_events import AppliedEvents
from serve_app.core.shared_queue.delivery import ActorRouterSessions
from serve_app.core.shared_queue.engines import ActorEngines
from serve_app.core.shared_queue.kv_debt import KvDebt
from serve_app.core.shared_queue.messages import ActorAction, ActorReply, Amount, RouterEvent, RouterMessage
from serve_app.core.shared_queue.model_queues import ModelQueues
from serve_app.core.shared_queue.published_state import PublishedState
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.core.shared_queue.scope import StepScope
from serve_app.core.shared_queue.session_admission import SessionAdmission
from serve_app.core.shared_queue.states import TICKET, TICKET_EVENTS
from serve_app.errors import ServeAppError

T = TypeVar("T")


class ActorQueue:
    """See the module. O(log n) per event; O(routers) when a model becomes contended or calm.

    Args:
        epoch: of the actor.
        ledger: has the engines and their slots.
        sessions: the open sessions.
        grants: which engines run, and what they have reported.
        limits: makes the limits, which answer routers by these sessions, and decide in steps.
    """

    def __init__(
        self,
        epoch: int,
        ledger: Ledger,
        sessions: SessionLeases,
        grants: EngineGrants,
        limits: Callable[[ActorRouterSessions, StepScope], ActorLimits],
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._grants = grants
        self.router_sessions = ActorRouterSessions(epoch)
        self.scope = StepScope(lambda: self.requests.agree())
        self.limits = limits(self.router_sessions, self.scope)
        self.store: messages.StoreAddress | None = None  # as the last router said
        self.processes: dict[str, NodeProcesses] = {}  # of routers, by name
        self.accounts = ActorCredit(ledger)
        # Engines on which the routers' holdings are unknown. A change takes effect at the end of the next event: a
        # router's report is booked before the rest is granted.
        self.closed_engines: frozenset[str] = frozenset()
        self.draining_engines: frozenset[str] = frozenset()  # these get no requests; takes effect in the same way
        self._begin_queues()
        self.session_admission = SessionAdmission(
            ledger, sessions, self.accounts, self.models, self.requests, grants.running, self.scope
        )

    def _begin_queues(self) -> None:
        """Empty queues, and all that is about the requests in them."""
        scope = self.scope
        self.kv_debt = KvDebt()
        self.models = ModelQueues(
            self._ledger, self._sessions, scope.event_grants, self.closed_engines, self.draining_engines
        )
        self.requests = ActorRequests(self.models, self.accounts, self._sessions, self.kv_debt, self._send, scope)
        self.engines = ActorEngines(
            self.models, self.requests, self.accounts, self.kv_debt, self._sessions, self._grants, self._send, scope
        )
        self.applied = AppliedEvents(self.requests, self._send, scope)
        self.published = PublishedState(self.router_sessions, self.models, self.kv_debt)

    # Routers

    def on_exchange(self, message: RouterMessage, now: float) -> ActorReply:
        """Process a router's message that is not stale; the router is an owner in the ledger."""
        router = message.router
        arrived = set[str]()
        with self._event(now, arrived):
            router_session = self.router_sessions.by_router.get(router)
            if router_session is None or message.incarnation > router_session.incarnation:
                self._forget([router], now)
                router_session = self.router_sessions.begin(message)
            self.requests.admit_postponed(now)
            events = self.router_sessions.receive(router_session, message)
            for event in sorted(events, key=_is_applied_last):
                self.applied.apply(router, event, self._apply_event, now)
            self._end_unsure_router_sessions(now)
            arrived.update(event.model for event in events if isinstance(event, messages.Arrive))
        if router not in self.router_sessions.by_router:  # it has ended, and with it what it was granted
            return self.router_sessions.stale_reply(message)
        is_reported = any(isinstance(event, messages.AccountReport) for event in events)
        return self.router_sessions.reply(router_session, self.accounts.amounts(router) if is_reported else None)

    def remove_routers(self, routers: Sequence[str], now: float) -> None:
        """Remove routers that are gone, with their accounts."""
        with self._event(now):
            self._end_router_sessions(routers, now)
            for router in routers:
                self.processes.pop(router, None)
                self.accounts.remove_router(router)
                self.engines.remove_router(router, now)
                self.limits.remove_router(router, now)

    def take_notes(self) -> list[str]:
        """The messages for the operator since the last call."""
        notes, self.scope.notes = self.scope.notes, []
        return notes

    @property
    def used_sessions(self) -> Container[str]:
        """The leases of sessions with a request that waits or runs."""
        return self.requests.used_sessions

    def in_use(self, engine: str) -> tuple[int, int]:
        """The queue's slots and the KV tokens in use, by the last report of each router. O(its sessions)."""
        slots, tokens = self.accounts.in_use(engine)
        return slots, tokens + sum(self.accounts.in_use(lease)[1] for lease in self._sessions.leases_on(engine))

    # Engines and sessions

    def drop_engine(self, engine: str, now: float) -> None:
        """See `ActorEngines.drop`."""
        with self._event(now):
            self.engines.drop(engine, now)

    def sync_engines(self, engines: Sequence[str], now: float) -> None:
        """Update the free capacity of these engines."""
        with self._event(now):
            for engine in engines:
                self._end_router_sessions(sorted(self.models.unreconciled_routers(engine)), now)
            self.engines.look_at(engines)

    def open_session(self, ask: SessionRequest, now: float) -> Session | None:
        """See `SessionAdmission.open_session`."""
        return self._answer(partial(self.session_admission.open_session, ask, now), now)

    def close_session(self, session_id: str, now: float) -> None:
        """Close a session, or withdraw its pending opening. Raises LeaseNotFound."""

        def close() -> None:
            if self.session_admission.withdraw(session_id, now) is None:
                self._sessions.close(session_id, self.closed_engines)

        self._answer(close, now)

    def session_ended(self, lease: str, now: float) -> None:
        """The ledger has ended the lease of a session that has no running request."""
        with self._event(now):
            self._sessions.forget(lease)

    def on_tick(self, now: float) -> None:
        """End unresponsive routers and run what is due."""
        with self._event(now):
            self.requests.admit_postponed(now)
            self._end_unsure_router_sessions(now)
            self._end_router_sessions(self.router_sessions.unresponsive(now), now)
            self.engines.on_tick(now)
            self.scope.run("a tick of the limits", "", partial(self.limits.on_tick, now))
            self.scope.run("a tick of the sessions", "", partial(self.session_admission.on_tick, now))

    def next_due(self) -> float | None:
        """Time of the next `on_tick`; None: nothing is scheduled. O(models)."""
        if self.session_admission.is_unfinished:
            return -math.inf
        queues = (one.admission.next_due() for one in self.models.by_name.values())
        dues = (*queues, *self.published.calm_at.values(), self.requests.next_due(), self.limits.next_due())
        return min((due for due in dues if due is not None), default=None)

    # Inside

    @contextlib.contextmanager
    def _event(self, now: float, arrived: Set[str] = frozenset()) -> Iterator[None]:
        """An event, and what follows from it. After an error, forget all requests and have every router report its full
        state again. `arrived`: models that have new requests by the event's end."""
        self.scope.begin_event()
        try:
            yield
            self._after_event(now, arrived)
        except Exception:
            self.router_sessions.end_all()
            models = self.models.by_name
            self._begin_queues()
            self.requests.postponed.recover(self.router_sessions.state.recovering, now)
            self.requests.postponed.gather(models, now)
            self.session_admission.restart(self.models, self.requests)
            raise

    def _answer(self, act: Callable[[], T], now: float) -> T:
        """An event with an answer. A ServeAppError is one, too: the event goes on, and then it is raised."""
        with self._event(now):
            try:
                return act()
            except ServeAppError as error:
                refusal = error
        raise refusal

    def _apply_event(self, router: str, event: RouterEvent, now: float) -> None:
        self.engines.follow(now)  # what the events before it have returned
        about_ticket = TICKET_EVENTS.get(type(event))
        if about_ticket is not None:
            TICKET.require(self.requests.state_of(router, event.ticket), about_ticket)  # type: ignore[union-attr]
        match event:
            case messages.Arrive(model, arrival, waited_s):
                self.requests.arrive(router, model, arrival, waited_s, now)
            case messages.Began(model, run):
                self.requests.begun(router, model, run, now)
            case messages.Done():
                self.requests.done(router, event, now)
            case messages.Cancel(ticket):
                self.requests.leave(router, ticket, now)
            case messages.GiveBack(engine, slots, tokens):
                self.accounts.give_back(router, engine, slots, tokens)
            case messages.TokenProgress():
                self.requests.progress(event, now)
            case messages.CreditUsage():
                self.requests.add_usage(event)
            case messages.AccountReport(in_use, accounts, last_action):
                self.accounts.report_in_use(router, in_use)
                self._compare(router, accounts, last_action)
            case messages.StatusRequest(ticket):
                self.requests.report_status(router, ticket, now)
            case messages.KvTokenRequest():
                self.engines.request_kv_tokens(router, event)
            case messages.CreditRequest():
                self.engines.grant_credit(router, event, self.router_sessions.state.contended)
            case messages.EngineReachability(model, engine, usable):
                self.engines.set_reachability(router, model, engine, usable, now)
            case messages.EngineDropped(engine):
                self.engines.drop_router(router, engine, now)
                self._send(router, messages.EngineDropAcknowledged(engine))
            case messages.ModelPolicy(model, policy):
                self.engines.set_policy(router, model, policy, now)
            case messages.Hello():
                self._hello(router, event)
            case messages.StoreAddress():
                self.store = event
                self.limits.asks_store = True
            case _:
                self.limits.on_event(router, event, now)

    def _hello(self, router: str, event: messages.Hello) -> None:
        """A router begins an incarnation: book the accounts it reports, as far as capacity is free."""
        if event.process is not None:
            self.processes[router] = event.process
        shortfall = self.accounts.book(router, event.accounts)
        self.engines.reconcile(router)
        self._send(router, messages.Booked(tuple(shortfall), tuple(self._sessions.by_session_id.values())))

    def _compare(self, router: str, reported: tuple[Amount, ...], last_action: int) -> None:
        """Compare a router's report with its accounts, except engines with actions it has not received."""
        sending = self.router_sessions.by_router[router].sending
        if last_action < sending.last_acked:
            return  # the router has received more actions since
        names = ("lease", "engine", "replica_id")
        unheard = {getattr(one, name, "") for one in sending.items_after(last_action) for name in names}
        unheard |= {grant.pool for grant in self.requests.grants_to_retry.values()}  # of these it does not hear
        for engine, (booked, amount) in self.accounts.differences(router, reported).items():
            if engine not in unheard and router not in self.models.unreconciled_routers(engine):
                self.applied.unsure.add(router)
                self.scope.notes.append(
                    f"router {router} reports {amount} of {engine}, not {booked}; its router session ends"
                )

    def _end_unsure_router_sessions(self, now: float) -> None:
        unsure, self.applied.unsure = sorted(self.applied.unsure), set()
        self._end_router_sessions(unsure, now)

    def _end_router_sessions(self, routers: Sequence[str], now: float) -> None:
        """End routers' sessions; the next message of one that is alive begins a new incarnation."""
        if routers:
            self._forget(routers, now)
        for router in routers:
            self.router_sessions.end(router)

    def _forget(self, routers: Sequence[str], now: float) -> None:
        """Routers' incarnations have ended: forget their requests (`core.shared_queue.incarnations`)."""
        for router in routers:
            self.limits.end_router_session(router, now)
        self.engines.forget_debts(routers)
        self.requests.forget_routers(routers)

    def _send(self, router: str, action: ActorAction) -> None:
        """Send an action to a router or to the session admission."""
        if router == SESSIONS_OWNER:
            assert isinstance(action, Grant | Refuse)
            self.session_admission.decisions.append(action)
        else:
            self.router_sessions.send(router, action)

    def _after_event(self, now: float, arrived: Set[str]) -> None:
        """What follows from an event, in steps that fail one by one; `arrived`: models with new requests."""
        steps: tuple[tuple[str, Callable[[], object]], ...] = (
            ("the limits", partial(self.limits.after_event, now)),
            ("engines", partial(self.engines.set_unavailable, self.closed_engines, self.draining_engines)),
            ("recovery", partial(self._follow_recovery, now)),
            ("the requests to move", partial(self.requests.move, now)),
            ("closed sessions", partial(self._sessions.end_unused, self.closed_engines)),
            ("openings of sessions", partial(self.session_admission.settle, now)),
            ("news of sessions", partial(self._send_session_news, now)),
            ("KV debt", partial(self.engines.reclaim, now)),
            ("the state for the routers", partial(self.published.update, now)),
            ("the figures for the routers", partial(self.published.update_figures, arrived, now)),
        )
        follow = self.engines.follow
        follow(now)
        for step, act in steps:
            self.scope.run("after an event", step, act)
            follow(now)

    def _follow_recovery(self, now: float) -> None:
        state = self.router_sessions.state
        if self.closed_engines or state.recovering:
            recovering = self.models.recovering()
            self.requests.postponed.recover(recovering, now)
            self.router_sessions.set_state(state._replace(recovering=recovering))

    def _send_session_news(self, now: float) -> None:
        for session in self._sessions.take_opened_and_ended():
            if session.closed:
                self.requests.end_session(session, now)
            news = messages.SessionEnded(session.request.session_id, session.lease) if session.closed else session
            for router in self.router_sessions.by_router:
                self._send(router, news)


def _is_applied_last(event: RouterEvent) -> bool:
    """Credit must not take what a request of the same message needs."""
    return isinstance(event, messages.CreditRequest)
