"""Grants of the queues of all models: binds `Admission` to the pools of the engines (`core.pools`).

Rules
- A queue grants from the pools of its engines, and charges them.
- An engine is in a queue while some router of the model reports that it can reach it.
- While no request waits, half of an engine is divided among the routers as credit; the rest is for requests at the
  actor.
- What an engine has begun continues at engines with the same fingerprint; if none runs or starts and others do, it is
  refused at the next tick.
- An engine that was declared gone and returns is used again once every router with an account there has reported what
  runs there. The same holds for a closed engine (holdings unknown since the actor's crash).

Invariant: what was returned to the pools is granted in the same event, or in the next ones as far as an event may.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from serve_app.core.memory import SESSIONS_OWNER, EngineGrants, Ledger, SessionEntry, SessionLeases
from serve_app.core.pools import RequestPool
from serve_app.core.queue import QueuePolicy, RefusalReason, Refuse
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.kv_debt import KvDebt, OwedRequest
from serve_app.core.shared_queue.messages import ActorAction, CreditRequest, KvTokenRequest
from serve_app.core.shared_queue.model_state import EngineState, ModelState
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.core.shared_queue.scope import StepScope
from serve_app.errors import InsufficientMemory, LeaseNotFound
from serve_app.types import RequestClass


class Granting:
    """The queues, by model, and the engines in them. O(log n) per event, unless stated.

    Args:
        ledger: has the engines and their slots.
        sessions: the open sessions.
        send: sends an action to a router.
        accounts: the routers' accounts.
        engines: what they have reported.
        scope: runs each step that follows from events.
    """

    def __init__(
        self,
        ledger: Ledger,
        sessions: SessionLeases,
        send: Callable[[str, ActorAction], None],
        accounts: ActorCredit,
        engines: EngineGrants,
        scope: StepScope,
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._send = send
        self.accounts = accounts
        self._engines = engines
        self._scope = scope
        self.kv_debt = KvDebt()
        self.requests = ActorRequests(accounts, sessions, self.kv_debt, send, scope)
        self.models = self.requests.models
        self.state_of_engine: dict[str, ModelState] = {}  # by engine, as routers report
        self.draining_engines: frozenset[str] = frozenset()
        self.changed: dict[str, None] = {}  # engines that the next `follow` looks at

    def grant_credit(self, router: str, event: CreditRequest, contended: frozenset[str]) -> None:
        """Answer a router's request for more credit; none is granted on contended engines and models."""
        engine = event.engine
        model_state = self.state_of_engine.get(event.engine)
        known = model_state is not None and router in model_state.engines[engine].reachable_from
        if model_state is None or not known or self._ledger.pool(engine) is None:
            self._send(router, messages.CreditGrant(engine, 0, 0, 0, 0))
            return
        target = self.accounts.target_credit(engine, len(model_state.routers))
        more = (0, 0)
        if (
            contended.isdisjoint((engine, model_state.name))
            and engine not in self.requests.closed_engines
            and engine not in self.draining_engines
            and engine not in self.kv_debt.debts
            and not model_state.admission.is_contended
            and model_state.is_open(engine)
        ):
            more = self.accounts.grant_credit(router, event, target)
        self._send(router, messages.CreditGrant(engine, *more, *target))

    def request_kv_tokens(self, router: str, event: KvTokenRequest) -> None:
        """A running request exceeds its estimate: grant what its session has left, if it has its place, and record the
        rest as KV debt, which is paid from free capacity."""
        request = self.requests.live(event.ticket)
        tokens = event.tokens
        if event.reclaimed:
            self.accounts.give_back(router, event.engine, 0, event.tokens)
            if request is not None:
                request.grown_tokens = max(0, request.grown_tokens - event.tokens)
        if request is None or request.engine != event.engine:
            return
        lease = request.lease
        if lease and (more := min(tokens, self.accounts.free(lease)[1])):
            self.accounts.charge(router, lease, 0, more)
            self._send(router, messages.KvTokenGrant(event.request_id, event.ticket, lease, more))
            tokens -= more
        if tokens:
            owed = OwedRequest(router, event.request_id, event.ticket, event.request_class)
            self.kv_debt.add(event.engine, owed, tokens)
            request.owed = owed
        self.changed[event.engine] = None

    def _pay_debt(self, engine: str, owed: OwedRequest, tokens: int) -> bool:
        try:
            self.accounts.charge(owed.router, engine, 0, tokens, growth=True)
        except (InsufficientMemory, LeaseNotFound):
            return False
        self.kv_debt.end(engine, owed)
        request = self.requests.live(owed.ticket)
        if request is not None:
            request.grown_tokens += tokens
        self._send(owed.router, messages.KvTokenGrant(owed.request_id, owed.ticket, engine, tokens))
        return True

    # Routers

    def remove_router(self, router: str, now: float) -> None:
        """Remove a forgotten router and its accounts. O(engines)."""
        self.accounts.remove_router(router)
        for model, model_state in list(self.models.items()):
            for one in model_state.engines.values():
                self._remove_reachability(router, one)
            self.set_policy(router, model, None, now)

    def set_policy(self, router: str, model: str, policy: QueuePolicy | None, now: float) -> None:
        """A router serves a model with these bounds; None: it no longer does."""
        if policy is None and model not in self.models:
            return
        model_state = self.requests.model_state(model)
        if policy is None:
            model_state.routers.discard(router)
        else:
            model_state.routers.add(router)
            self.requests.apply_actions(model_state, model_state.admission.on_policy(policy, now))
        model_state.avoid_cache.clear()
        self.changed.update(dict.fromkeys(model_state.engines))  # this router may be the only one that reaches them
        if policy is None:
            self.remove_unused(model_state)

    def set_reachability(self, router: str, model: str, engine: str, usable: bool, now: float) -> None:
        """Set whether a router can send requests to an engine. O(requests of the router) if it newly can."""
        model_state = self.requests.model_state(model)
        self.state_of_engine[engine] = model_state
        model_state.engines.setdefault(engine, EngineState()).reachable_from[router] = usable
        model_state.avoid_cache.clear()
        self.changed[engine] = None
        self.requests.requeue_router(router, now)

    def drop_router_on_engine(self, router: str, engine: str, now: float) -> None:
        """A router drops an engine: end its requests and its account there. O(requests of the router)."""
        model_state = self.state_of_engine.get(engine)
        if model_state is not None:  # first: what is returned is granted to none of its requests
            self._remove_reachability(router, model_state.engines[engine])
            model_state.avoid_cache.clear()
        for pool in (engine, *self._sessions.leases_on(engine)):
            self.accounts.give_back(router, pool, *self.accounts.account(router, pool))
        requests = self.requests
        there = requests.incarnations.requests(router).items()
        for ticket in [ticket for ticket, request in there if request.engine == engine]:
            requests.cancel(ticket, now)
        self.kv_debt.forget(engine, router)
        requests.requeue_router(router, now)
        if model_state is not None:
            self.changed[engine] = None
            self.remove_unused(model_state)

    def reconcile(self, router: str) -> None:
        """A router has reported what runs on its engines: open those that waited for its report. O(engines)."""
        for model_state in self.models.values():
            for engine, one in list(model_state.engines.items()):
                if router in one.unreconciled and self._ledger.pool(engine) is not None:
                    one.unreconciled.discard(router)
                    model_state.avoid_cache.clear()
                    self.changed[engine] = None
                    self.requests.on_opened()

    # Engines

    def drop_engine(self, engine: str, now: float) -> None:
        """An engine is gone with its sessions: end all accounts there and inform their routers."""
        had = self.accounts.remove_engine(engine)
        self.kv_debt.forget(engine)
        for router, (slots, tokens) in [one for one in had.items() if one[0] != SESSIONS_OWNER]:
            self._send(router, messages.CreditChange(engine, -slots, -tokens))
        for lease in self._sessions.leases_on(engine):
            had |= dict.fromkeys(self.accounts.remove_engine(lease), (0, 0))
            self._sessions.forget(lease)
        routers = (had.keys() | self.requests.drop_engine(engine)) - {SESSIONS_OWNER}
        model_state = self.state_of_engine.get(engine)
        if model_state is not None:
            one = model_state.engines[engine]
            one.unreconciled |= routers
            reached = one.reachable_from.items()
            one.reachable_from = {name: usable for name, usable in reached if usable or name in routers}
            model_state.avoid_cache.clear()
            self.requests.apply_actions(model_state, model_state.admission.on_replica_gone(engine, now))
            self.remove_unused(model_state)

    def unreconciled_routers(self, engine: str) -> set[str]:
        """Routers that must report again what runs on an engine that was declared gone and has returned."""
        model_state = self.state_of_engine.get(engine)
        if model_state is None or self._ledger.pool(engine) is None:
            return set()
        return set(model_state.engines[engine].unreconciled)

    def follow(self, now: float) -> None:
        """Serve the queues with what was returned to the pools, and follow engines that have changed, in steps that
        fail one by one. O(such engines)."""
        while self.changed or self.accounts.returned:
            changed, self.changed = self.changed, {}
            returned = self.accounts.take_returned()
            for engine in {**changed, **returned}:
                session = self._sessions.open_by_lease(engine)
                act = partial(self._follow, engine, engine in returned, now)
                if session is not None:
                    act = partial(self._follow_session, session, now)
                self._scope.run("an update of an engine's capacity", engine, act)

    def _follow_session(self, session: SessionEntry, now: float) -> None:
        """The place of an open session was returned."""
        model_state = self.models.get(session.request.model)
        if model_state is None or session.engine not in model_state.engines:
            return
        if session.engine not in self.requests.closed_engines:
            actions = model_state.admission.on_place_returned(session.lease, now)
            self.requests.apply_actions(model_state, actions)

    def end_session(self, session: SessionEntry, now: float) -> None:
        """A session has ended: its waiting requests are ordinary ones."""
        model_state = self.models.get(session.request.model)
        if model_state is not None:
            self.requests.leave_session(model_state, session.lease, now)

    def _follow(self, engine: str, is_returned: bool, now: float) -> None:
        """Pay KV debt first, then serve the queue. `is_returned`: something was returned to the engine's pool."""
        model_state = self.state_of_engine.get(engine)
        if engine in self.kv_debt.debts and engine not in self.requests.closed_engines:
            waits = None if model_state is None else model_state.highest_waiting_class
            least = min(RequestClass) if waits is None else waits
            for owed, tokens in self.kv_debt.due(engine, least):
                if not self._pay_debt(engine, owed, tokens):
                    break
        if model_state is None:
            return
        one = model_state.engines[engine]
        admission = model_state.admission
        fingerprint = self._engines.fingerprint(engine)
        known = one.fingerprint
        if fingerprint != known:
            one.fingerprint = fingerprint
            model_state.avoid_cache.clear()
        debt = max(self.kv_debt.classes(engine), default=None)
        if debt != one.debt_class:
            self.requests.apply_actions(model_state, admission.on_kv_debt(engine, debt, now))
            one.debt_class = debt
        pool = self._pool_to_grant(engine, model_state)
        session_kv = 0 if pool is None else self._sessions.reserved_tokens[engine]
        if one.room != (pool is not None, session_kv):  # what waits for it may fit elsewhere only
            one.room = (pool is not None, session_kv)
            self.requests.on_room(self._sessions.leases_on(engine))
        self.requests.apply_actions(model_state, admission.on_pool(engine, pool, now, session_kv))
        if is_returned:
            self.requests.apply_actions(model_state, admission.on_returned(now))
        if fingerprint != known:  # what has begun there need not avoid it any more
            for router in [name for name, usable in one.reachable_from.items() if usable]:
                self.requests.requeue_router(router, now)

    def reclaim(self, now: float) -> None:
        """Reclaim KV tokens beyond the estimates of lower classes while a higher class waits; pay KV debt once no
        such request waits. O(engines with KV debt)."""
        for engine in list(self.kv_debt.debts):
            model_state = self.state_of_engine.get(engine)
            if model_state is not None:
                self._scope.run("reclaiming KV tokens", engine, partial(self._reclaim, engine, model_state, now))

    def _reclaim(self, engine: str, model_state: ModelState, now: float) -> None:
        one = model_state.engines[engine]
        waits = model_state.highest_waiting_class
        if one.reclaimed_for is not None and (waits is None or waits < one.reclaimed_for):
            one.reclaimed_for = None
            self._follow(engine, False, now)
            waits = model_state.highest_waiting_class
        if waits is None or one.reclaimed_for is not None:
            return
        if min(self.kv_debt.classes(engine), default=waits) < waits:
            one.reclaimed_for = waits
            for router in [name for name, one in self.accounts.by_router.items() if engine in one.accounts]:
                self._send(router, messages.Reclaim(engine, waits))

    def set_closed_engines(self, engines: frozenset[str]) -> None:
        """Close exactly these engines: the routers' holdings there are unknown."""
        self.changed.update(dict.fromkeys(sorted(self.requests.closed_engines ^ engines)))
        self.requests.closed_engines = engines
        self.requests.on_opened()

    def set_draining_engines(self, engines: frozenset[str]) -> None:
        """Exactly these engines drain."""
        self.changed.update(dict.fromkeys(sorted(self.draining_engines ^ engines)))
        self.draining_engines = engines

    def recovering_models(self) -> frozenset[str]:
        """Models whose reachable engines are all closed, so that their queues can grant nothing. O(engines)."""
        found = set()
        closed = self.requests.closed_engines
        for model, model_state in self.models.items():
            others = (one for one in model_state.engines if one not in closed)  # mostly none, or the first one is open
            if closed & model_state.engines.keys() and not any(
                model_state.is_open(one) and self._ledger.pool(one) is not None for one in others
            ):
                found.add(model)
        return frozenset(found)

    def retry_grants(self, now: float) -> None:
        """See `ActorRequests.retry_grants`; then remove what only forgotten requests have kept."""
        self.requests.retry_grants(now)
        for name in self.requests.take_left_models():
            if name in self.models:
                self.remove_unused(self.models[name])

    def remove_unused(self, model_state: ModelState) -> None:
        """Forget engines that no router reaches, and a queue without routers, engines and requests."""
        for engine, one in list(model_state.engines.items()):
            if not one.reachable_from and not model_state.has_runs(engine):
                del model_state.engines[engine], self.state_of_engine[engine]
                self.requests.apply_actions(model_state, model_state.admission.on_replica_gone(engine, -math.inf))
        unused = not model_state.routers and not model_state.engines
        if unused and not any(request.queue is model_state for request in self.requests.by_ticket.values()):
            del self.models[model_state.name]
            self.requests.touched_models.discard(model_state.name)

    def on_tick(self, now: float) -> None:
        """Run what is due in the queues."""
        for model_state in list(self.models.values()):
            self._scope.run("a tick of a queue", model_state.name, partial(self._tick, model_state, now))

    # Inside

    def _tick(self, model_state: ModelState, now: float) -> None:
        admission = model_state.admission
        if admission.waiting:  # whatever has failed to serve them
            self.requests.apply_actions(model_state, admission.on_returned(now))
        self._refuse_begun(model_state, now)
        self.requests.touched_models.add(model_state.name)

    def _refuse_begun(self, model_state: ModelState, now: float) -> None:
        """Refuse what an engine has begun of which no equal one runs or starts, while others do: no wait would help.
        O(waiting requests that have begun + engines)."""
        begun = [one for one in model_state.admission.queue.begun() if one.fingerprint is not None]
        there = self._engines.fingerprints(model_state.name) if begun else set()
        if None in there:  # it starts, and may be any
            return
        for arrival in begun if there else ():
            request = self.requests.live(arrival.request_id)
            if request is not None and arrival.fingerprint not in there:
                self.requests.cancel(arrival.request_id, now)
                self._send(request.router, Refuse(arrival.request_id, RefusalReason.NOT_CONTINUABLE, None))

    def _pool_to_grant(self, engine: str, model_state: ModelState) -> RequestPool | None:
        """The pool of an engine from which its queue may grant now; None: nothing is granted there."""
        closed = engine in self.requests.closed_engines or engine in self.draining_engines
        return None if closed or not model_state.is_open(engine) else self._ledger.pool(engine)

    def _remove_reachability(self, router: str, engine: EngineState) -> None:
        engine.unreconciled.discard(router)
        engine.reachable_from.pop(router, None)
