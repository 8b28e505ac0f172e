"""The engines in the queues: what changes what an engine may be granted, and what follows from that.

Rules
- A queue grants from the pools of its engines (`core.pools`), and charges them.
- An engine is in a queue while some router of the model reports that it can reach it.
- While no request waits, half of an engine is divided among the routers as credit; the rest is for requests at the
  actor.
- What an engine has begun continues at engines with the same fingerprint; if none runs or starts and others do, it is
  refused at the next tick.
- An engine that was declared gone and returns is used again once every router with an account there has reported what
  runs there. The same holds for a closed engine (holdings unknown since the actor's crash).
- KV debt on an engine is paid before its queue is served (`.kv_debt`).

Invariant: what was returned to the pools is granted in the same event, or in the next ones as far as an event may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from serve_app.core.memory import SESSIONS_OWNER, EngineGrants, SessionEntry, SessionLeases
from serve_app.core.queue import QueuePolicy, RefusalReason, Refuse
from serve_app.core.shared_queue import messages
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.kv_debt import KvDebt, OwedRequest
from serve_app.core.shared_queue.messages import ActorAction, CreditRequest, KvTokenRequest
from serve_app.core.shared_queue.model_queues import ModelQueues
from serve_app.core.shared_queue.model_state import EngineState, ModelState
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.core.shared_queue.scope import StepScope
from serve_app.errors import InsufficientMemory, LeaseNotFound
from serve_app.types import RequestClass


class ActorEngines:
    """The engines. O(log n) per event, unless stated.

    Args:
        models: the queues.
        requests: carries out what the queues decide.
        accounts: the routers' accounts.
        kv_debt: KV tokens owed to running requests.
        sessions: the open sessions.
        grants: what the engines have reported.
        send: sends an action to a router.
        scope: runs each step that follows from events.
    """

    def __init__(
        self,
        models: ModelQueues,
        requests: ActorRequests,
        accounts: ActorCredit,
        kv_debt: KvDebt,
        sessions: SessionLeases,
        grants: EngineGrants,
        send: Callable[[str, ActorAction], None],
        scope: StepScope,
    ) -> None:
        self._models = models
        self._requests = requests
        self._placements = requests.placements
        self._accounts = accounts
        self._kv_debt = kv_debt
        self._sessions = sessions
        self._grants = grants
        self._send = send
        self._scope = scope
        self._changed: dict[str, None] = {}  # engines that the next `follow` looks at

    # Routers

    def set_policy(self, router: str, model: str, policy: QueuePolicy | None, now: float) -> None:
        """A router serves a model with these bounds; None: it no longer does."""
        if policy is None and model not in self._models.by_name:
            return
        queue = self._models.of_model(model)
        if policy is None:
            queue.routers.discard(router)
        else:
            queue.routers.add(router)
            self._requests.apply_actions(queue, queue.admission.on_policy(policy, now))
        self._on_change(queue, queue.engines)  # this router may be the only one that reaches them

    def set_reachability(self, router: str, model: str, engine: str, usable: bool, now: float) -> None:
        """Set whether a router can send requests to an engine. O(requests of the router) if it newly can."""
        queue = self._models.of_model(model)
        self._models.by_engine[engine] = queue
        queue.engines.setdefault(engine, EngineState()).reachable_from[router] = usable
        self._on_change(queue, [engine])
        self._requests.requeue_router(router, now)

    def drop_router(self, router: str, engine: str, now: float) -> None:
        """A router drops an engine: end its requests and its account there. O(requests of the router)."""
        queue = self._models.by_engine.get(engine)
        if queue is not None:  # first: what is returned is granted to none of its requests
            queue.engines[engine].forget_router(router)
            self._on_change(queue, [engine])
        for pool in (engine, *self._sessions.leases_on(engine)):
            self._accounts.give_back(router, pool, *self._accounts.account(router, pool))
        self._requests.cancel_on(router, engine, now)
        self._kv_debt.forget(engine, router)
        self._requests.requeue_router(router, now)

    def reconcile(self, router: str) -> None:
        """A router has reported what runs on its engines: open those that waited for its report. O(engines)."""
        for queue in self._models.by_name.values():
            for engine, state in queue.engines.items():
                if router in state.unreconciled and self._accounts.runs(engine):
                    state.unreconciled.discard(router)
                    self._on_change(queue, [engine])
                    self._placements.on_opened()

    def remove_router(self, router: str, now: float) -> None:
        """Forget what a router reaches and serves. O(engines)."""
        for model, queue in self._models.by_name.items():
            for state in queue.engines.values():
                state.forget_router(router)
            self.set_policy(router, model, None, now)

    def grant_credit(self, router: str, event: CreditRequest, contended: frozenset[str]) -> None:
        """Answer a router's request for more credit; none is granted on contended engines and models."""
        engine = event.engine
        queue = self._models.by_engine.get(engine)
        known = queue is not None and router in queue.engines[engine].reachable_from
        if queue is None or not known or not self._accounts.runs(engine):
            self._send(router, messages.CreditGrant(engine, 0, 0, 0, 0))
            return
        target = self._accounts.target_credit(engine, len(queue.routers))
        more = (0, 0)
        if (
            contended.isdisjoint((engine, queue.name))
            and engine not in self._kv_debt.debts
            and not queue.admission.is_contended
            and self._models.pool_to_grant(engine) is not None
        ):
            more = self._accounts.grant_credit(router, event, target)
        self._send(router, messages.CreditGrant(engine, *more, *target))

    # Engines

    def look_at(self, engines: Iterable[str]) -> None:
        """Something may have changed that these engines can be granted: the next `follow` looks at them."""
        self._changed.update(dict.fromkeys(engines))

    def set_unavailable(self, closed: frozenset[str], draining: frozenset[str]) -> None:
        """Exactly these engines are closed, since the routers' holdings there are unknown, or drain."""
        models = self._models
        if (closed, draining) == (models.closed_engines, models.draining_engines):
            return
        if closed != models.closed_engines:
            self._placements.on_opened()
        self.look_at(sorted((models.closed_engines ^ closed) | (models.draining_engines ^ draining)))
        models.closed_engines = closed
        models.draining_engines = draining

    def drop(self, engine: str, now: float) -> None:
        """An engine is gone with its sessions: end all accounts there and inform their routers."""
        had = self._accounts.remove_engine(engine)
        self._kv_debt.forget(engine)
        for router, (slots, tokens) in had.items():
            if router != SESSIONS_OWNER:
                self._send(router, messages.CreditChange(engine, -slots, -tokens))
        for lease in self._sessions.leases_on(engine):
            had |= self._accounts.remove_engine(lease)
            self._sessions.forget(lease)
        routers = (had.keys() | self._requests.drop_engine(engine)) - {SESSIONS_OWNER}
        queue = self._models.by_engine.get(engine)
        if queue is not None:
            queue.wait_for_reports(engine, routers)
            reached = queue.engines[engine].reachable_from
            for name in [name for name, usable in reached.items() if not usable and name not in routers]:
                del reached[name]
            self._requests.apply_actions(queue, queue.admission.on_replica_gone(engine, now))

    def follow(self, now: float) -> None:
        """Serve the queues with what was returned to the pools, and follow engines that have changed, in steps that
        fail one by one. O(such engines)."""
        while self._changed or self._accounts.returned or self._sessions.changed_engines:
            returned = self._accounts.take_returned() | self._sessions.take_changed()
            changed = {**self._changed, **returned}
            self._changed = {}
            for name in changed:
                session = self._sessions.open_by_lease(name)
                if session is None:
                    act = partial(self._follow, name, name in returned, now)
                else:
                    act = partial(self._serve_place, session, now)
                self._scope.run("an update of an engine's capacity", name, act)

    def on_tick(self, now: float) -> None:
        """Run what is due in the queues, and forget those without routers, engines and requests."""
        for queue in list(self._models.by_name.values()):
            self._scope.run("a tick of a queue", queue.name, partial(self._tick, queue, now))

    # KV debt

    def forget_debts(self, routers: Sequence[str]) -> None:
        """Routers' incarnations have ended: nothing is owed to their requests. O(debts)."""
        self.look_at(self._kv_debt.forget_routers(routers))

    def request_kv_tokens(self, router: str, event: KvTokenRequest) -> None:
        """A running request exceeds its estimate: grant what its session has left, if it has its place, and record the
        rest as KV debt, which is paid from free capacity."""
        request = self._requests.live(event.ticket)
        tokens = event.tokens
        if event.reclaimed:
            self._accounts.give_back(router, event.engine, 0, event.tokens)
            if request is not None:
                request.grown_tokens = max(0, request.grown_tokens - event.tokens)
        if request is None or request.engine != event.engine:
            return
        lease = request.lease
        if lease and (more := min(tokens, self._accounts.free(lease)[1])):
            self._accounts.charge(router, lease, 0, more)
            self._send(router, messages.KvTokenGrant(event.request_id, event.ticket, lease, more))
            tokens -= more
        if tokens:
            owed = OwedRequest(router, event.request_id, event.ticket, event.request_class)
            self._kv_debt.add(event.engine, owed, tokens)
            request.owed = owed
        self.look_at([event.engine])

    def reclaim(self, now: float) -> None:
        """Reclaim KV tokens beyond the estimates of lower classes while a higher class waits; pay KV debt once no
        such request waits. O(engines with KV debt)."""
        for engine in list(self._kv_debt.debts):
            queue = self._models.by_engine.get(engine)
            if queue is not None:
                self._scope.run("reclaiming KV tokens", engine, partial(self._reclaim, engine, queue, now))

    def _reclaim(self, engine: str, queue: ModelState, now: float) -> None:
        state = queue.engines[engine]
        waits = queue.highest_waiting_class
        if state.reclaimed_for is not None and (waits is None or waits < state.reclaimed_for):
            state.reclaimed_for = None
            self._follow(engine, False, now)
            waits = queue.highest_waiting_class
        if waits is None or state.reclaimed_for is not None:
            return
        if min(self._kv_debt.classes(engine), default=waits) < waits:
            state.reclaimed_for = waits
            for router in self._accounts.routers_on(engine):
                self._send(router, messages.Reclaim(engine, waits))

    def _pay_debt(self, engine: str, queue: ModelState | None) -> None:
        """Pay KV debt, in order, while no request of a higher class waits."""
        waits = None if queue is None else queue.highest_waiting_class
        for owed, tokens in self._kv_debt.due(engine, min(RequestClass) if waits is None else waits):
            try:
                self._accounts.charge(owed.router, engine, 0, tokens, growth=True)
            except (InsufficientMemory, LeaseNotFound):
                return
            self._kv_debt.end(engine, owed)
            request = self._requests.live(owed.ticket)
            if request is not None:
                request.grown_tokens += tokens
            self._send(owed.router, messages.KvTokenGrant(owed.request_id, owed.ticket, engine, tokens))

    # Inside

    def _on_change(self, queue: ModelState, engines: Iterable[str]) -> None:
        """Routers may send to these engines, or no longer."""
        queue.avoid_cache.clear()
        self.look_at(engines)

    def _follow(self, engine: str, is_returned: bool, now: float) -> None:
        """Pay KV debt first, then serve the queue. `is_returned`: something was returned to the engine's pool."""
        queue = self._models.by_engine.get(engine)
        if engine in self._kv_debt.debts and engine not in self._models.closed_engines:
            self._pay_debt(engine, queue)
        if queue is None:
            return
        state = queue.engines[engine]
        admission = queue.admission
        fingerprint = self._grants.fingerprint(engine)
        has_other_fingerprint = fingerprint != state.fingerprint
        if has_other_fingerprint:
            state.fingerprint = fingerprint
            queue.avoid_cache.clear()
        debt = max(self._kv_debt.classes(engine), default=None)
        if debt != state.debt_class:
            self._requests.apply_actions(queue, admission.on_kv_debt(engine, debt, now))
            state.debt_class = debt
        pool = self._models.pool_to_grant(engine)
        session_kv = 0 if pool is None else self._sessions.reserved_tokens[engine]
        if state.room != (pool is not None, session_kv):  # what waits for it may fit elsewhere only
            state.room = (pool is not None, session_kv)
            for lease in self._sessions.leases_on(engine):
                self._placements.on_session(lease)
        self._requests.apply_actions(queue, admission.on_pool(engine, pool, now, session_kv))
        if is_returned:
            self._requests.apply_actions(queue, admission.on_returned(now))
        if has_other_fingerprint:  # what has begun there need not avoid it any more
            for router in [name for name, usable in state.reachable_from.items() if usable]:
                self._requests.requeue_router(router, now)

    def _serve_place(self, session: SessionEntry, now: float) -> None:
        """The place of an open session was returned."""
        queue = self._models.by_engine.get(session.engine)
        if queue is not None and session.engine not in self._models.closed_engines:
            self._requests.apply_actions(queue, queue.admission.on_place_returned(session.lease, now))

    def _tick(self, queue: ModelState, now: float) -> None:
        if queue.admission.waiting:  # whatever has failed to serve them
            self._requests.apply_actions(queue, queue.admission.on_returned(now))
        self._refuse_begun(queue, now)
        self._models.touched.add(queue.name)
        self._remove_unused(queue, now)

    def _refuse_begun(self, queue: ModelState, now: float) -> None:
        """Refuse what an engine has begun of which no equal one runs or starts, while others do: no wait would help.
        O(waiting requests that have begun + engines)."""
        begun = [one for one in queue.admission.queue.begun() if one.fingerprint is not None]
        fingerprints = self._grants.fingerprints(queue.name) if begun else set()
        if None in fingerprints:  # it starts, and may be any
            return
        for arrival in begun if fingerprints else ():
            request = self._requests.live(arrival.request_id)
            if request is not None and arrival.fingerprint not in fingerprints:
                self._requests.cancel(arrival.request_id, now)
                self._send(request.router, Refuse(arrival.request_id, RefusalReason.NOT_CONTINUABLE, None))

    def _remove_unused(self, queue: ModelState, now: float) -> None:
        """Forget engines that no router reaches, and a queue without routers, engines and requests."""
        for engine, state in list(queue.engines.items()):
            if not state.reachable_from and not queue.has_runs(engine):
                del queue.engines[engine], self._models.by_engine[engine]
                self._requests.apply_actions(queue, queue.admission.on_replica_gone(engine, now))
        if not queue.routers and not queue.engines and not self._requests.has_any(queue):
            del self._models.by_name[queue.name]
            self._models.touched.discard(queue.name)
