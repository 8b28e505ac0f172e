"""Grants of the queues of all models: binds `Admission` to the free capacity in the ledger.

Rules
- A queue may grant the slots and KV tokens of its engines that are free in the ledger.
- An engine is in a queue while some router of the model reports that it can reach it.
- While no request waits, half of an engine is divided among the routers as credit; the rest is for requests at the
  actor.
- An engine that was declared gone and returns is used again once every router with an account there has reported what
  runs there. The same holds for a closed engine (holdings unknown since the actor's crash).

Invariant: what a queue may grant on an engine is free there in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from serve_app.core.memory import Ledger, SessionLeases, slots_of
from serve_app.core.queue import Admission, QueuePolicy
from serve_app.core.shared_queue.actor_credit import ActorCredit
from serve_app.core.shared_queue.kv_debt import KvDebt, OwedRequest
from serve_app.core.shared_queue.messages import (
    ActorAction,
    CancelKvTokenRequest,
    CreditChange,
    CreditGrant,
    KvTokenGrant,
    KvTokenRequest,
    Reclaim,
)
from serve_app.core.shared_queue.model_state import EngineState, ModelState
from serve_app.core.shared_queue.requests import ActorRequests
from serve_app.errors import InsufficientMemory, LeaseConflict, LeaseNotFound
from serve_app.types import RequestClass


class Granting:
    """The queues, by model, and the engines in them. O(log n) per event, unless stated.

    Args:
        ledger: has the engines and their slots.
        sessions: the open sessions.
        send: sends an action to a router.
        accounts: the routers' accounts in the ledger.
    """

    def __init__(
        self, ledger: Ledger, sessions: SessionLeases, send: Callable[[str, ActorAction], None], accounts: ActorCredit
    ) -> None:
        self._ledger, self._sessions, self._send, self.accounts = ledger, sessions, send, accounts
        self.kv_debt = KvDebt()
        self.requests = ActorRequests(accounts, sessions, self.kv_debt, send, self.sync)
        self.models = self.requests.models
        self.model_of_engine: dict[str, str] = {}  # by engine, as routers report

    def grant_credit(self, router: str, engine: str, credit: tuple[int, int], is_calm: bool, now: float) -> None:
        """Answer a router's request for more credit; `is_calm`: neither the engine nor its model is contended."""
        model = self.model_of_engine.get(engine)
        if (
            model is None
            or slots_of(engine) not in self._ledger
            or router not in self.models[model].engines[engine].reachable_from
        ):
            self._send(router, CreditGrant(engine, 0, 0, 0, 0))
            return
        model_state = self.models[model]
        spare, more = self.accounts.target_credit(engine, len(model_state.routers)), (0, 0)
        is_calm = (
            is_calm
            and engine not in self.requests.closed_engines
            and not self.kv_debt.has_debt(engine)
            and not model_state.admission.is_contended
        )
        if is_calm and model_state.is_open(engine):
            more = self.accounts.grant_credit(router, engine, spare, credit)
            self.sync(engine, now)
        self._send(router, CreditGrant(engine, *more, *spare))

    def request_kv_tokens(self, router: str, event: KvTokenRequest, now: float) -> None:
        """A running request exceeds its estimate: grant tokens of its session, record the rest as KV debt and pay it
        from free capacity."""
        request, tokens = self.requests.get(event.ticket), event.tokens
        if event.ticket and (request is None or request.engine != event.engine):
            return
        if event.reclaimed:
            self.accounts.give_back(router, event.engine, 0, event.tokens)
            if request is not None:
                request.tokens = max(0, request.tokens - event.tokens)
        if request is not None and (drawn := request.drawn) is not None:
            more = min(tokens, self.accounts.free(drawn.lease)[1])
            if more:
                self.accounts.charge(router, drawn.lease, 0, more)
                request.drawn = drawn._replace(tokens=drawn.tokens + more)
                self._send(router, KvTokenGrant(event.request_id, event.ticket, drawn.lease, more))
                tokens -= more
        if tokens:
            who = OwedRequest(router, event.request_id, event.ticket, event.request_class)
            self.kv_debt.add(event.engine, who, tokens)
        self.sync(event.engine, now)

    def cancel_kv_token_request(self, router: str, event: CancelKvTokenRequest, now: float) -> None:
        """A request without a ticket has ended: cancel its KV debt."""
        self.kv_debt.end_unticketed(event.engine, router, event.request_id)
        self.sync(event.engine, now)

    def _pay_debt(self, engine: str, owed: OwedRequest, tokens: int) -> bool:
        try:
            self.accounts.charge(owed.router, engine, 0, tokens, growth=True)
        except (InsufficientMemory, LeaseNotFound, LeaseConflict):
            return False
        request = self.requests.get(owed.ticket)
        if request is not None:
            request.tokens += tokens
        self._send(owed.router, KvTokenGrant(owed.request_id, owed.ticket, engine, tokens))
        return True

    # Routers

    def forget_routers(self, routers: Sequence[str], now: float) -> None:
        """Routers' incarnations have ended: cancel their waiting requests; running ones stay only in the accounts."""
        for engine in self.kv_debt.forget_routers(routers):
            self.sync(engine, now)
        self.requests.forget_routers(routers, now)

    def remove_router(self, router: str, now: float) -> None:
        """Remove a forgotten router and its accounts. O(engines)."""
        for engine in self.accounts.remove_router(router):
            self.sync(engine, now)
        for model in list(self.models):
            model_state = self.models[model]
            model_state.routers.discard(router)
            for engine in list(model_state.engines):
                self._remove_reachability(router, model_state.engines[engine])
                self.sync(engine, now)
            model_state.unreachable_cache.clear()
            self.remove_unused(model)

    def set_policy(self, router: str, model: str, policy: QueuePolicy | None, now: float) -> None:
        """A router serves a model with these bounds; None: it no longer does."""
        if policy is None:
            if model in self.models:
                self.models[model].routers.discard(router)
                self.models[model].unreachable_cache.clear()
                for engine in list(self.models[model].engines):
                    self.sync(engine, now)  # this router may have been the only one to reach it
                self.remove_unused(model)
            return
        model_state = self.models.get(model)
        if model_state is None:
            model_state = self.models[model] = ModelState(Admission(policy))
        model_state.routers.add(router)
        self.requests.apply_actions(model, model_state.admission.on_policy(policy, now))
        model_state.unreachable_cache.clear()
        for engine in list(model_state.engines):
            self.sync(engine, now)

    def set_reachability(self, router: str, model: str, engine: str, usable: bool, now: float) -> None:
        """Set whether a router can send requests to an engine. O(requests of the router) if it newly can."""
        model_state = self.requests.model_state(model)
        self.model_of_engine[engine] = model
        model_state.engines.setdefault(engine, EngineState()).reachable_from[router] = usable
        model_state.unreachable_cache.clear()
        self.sync(engine, now)
        if usable:
            self.requests.requeue_router(router, model, now)

    def drop_router_on_engine(self, router: str, engine: str, now: float) -> None:
        """A router drops an engine: end its requests and its account there. O(requests of the router)."""
        self.requests.end_router_on_engine(router, engine, now)
        self.kv_debt.end_router_on_engine(engine, router)
        self.requests.detach_from_sessions([router], self._sessions.leases_on(engine), now)
        for pool in (engine, *self._sessions.leases_on(engine)):
            self.accounts.give_back(router, pool, *self.accounts.account(router, pool))
        model = self.model_of_engine.get(engine)
        if model is not None:
            self._remove_reachability(router, self.models[model].engines[engine])
            self.models[model].unreachable_cache.clear()
            self.sync(engine, now)
            self.remove_unused(model)

    def reconcile(self, router: str, now: float) -> None:
        """A router has reported what runs on its engines: open those that waited for its report. O(engines)."""
        for model_state in self.models.values():
            for engine, one in list(model_state.engines.items()):
                if router in one.unreconciled and slots_of(engine) in self._ledger:
                    one.unreconciled.discard(router)
                    model_state.unreachable_cache.clear()
                    self.sync(engine, now)

    # Engines

    def drop_engine(self, engine: str, now: float) -> None:
        """An engine is gone with its sessions: end all accounts there and inform their routers."""
        had = self.accounts.remove_engine(engine)
        self.kv_debt.drop_engine(engine)
        for router, (slots, tokens) in had.items():
            self._send(router, CreditChange(engine, -slots, -tokens))
        leases = self._sessions.leases_on(engine)
        for lease in leases:
            had |= dict.fromkeys(self.accounts.remove_engine(lease), (0, 0))
            self._sessions.forget(lease)
        self.requests.drop_engine(engine, had)
        model = self.model_of_engine.get(engine)
        if model is None:
            self.requests.detach_from_sessions(had, leases, now)
            return
        one = self.models[model].engines[engine]
        one.granted_slots, one.granted_tokens, one.reported_capacity = 0, 0, None
        one.unreconciled |= had.keys()
        one.reachable_from = {
            router: usable for router, usable in one.reachable_from.items() if usable or router in had
        }
        self.models[model].unreachable_cache.clear()
        self.requests.apply_actions(model, self.models[model].admission.on_replica_gone(engine, now))
        self.requests.detach_from_sessions(had, leases, now)
        self.remove_unused(model)

    def unreconciled_routers(self, engine: str) -> set[str]:
        """Routers that must report again what runs on an engine that was declared gone and has returned."""
        model = self.model_of_engine.get(engine)
        there = model is not None and slots_of(engine) in self._ledger
        return set(self.models[model].engines[engine].unreconciled) if model is not None and there else set()

    def sync(self, engine: str, now: float) -> None:
        """Update the free capacity of an engine: pay KV debt first, then inform the queue."""
        model = self.model_of_engine.get(engine)
        if self.kv_debt.has_debt(engine) and engine not in self.requests.closed_engines:
            waits = None if model is None else self.models[model].highest_waiting_class
            least = min(RequestClass) if waits is None else waits
            self.kv_debt.pay(engine, lambda who, tokens: self._pay_debt(engine, who, tokens), least)
        if model is None:
            return
        model_state = self.models[model]
        one = model_state.engines[engine]
        debt = max(self.kv_debt.classes(engine), default=None)
        if debt != one.debt_class:
            one.debt_class = debt
            self.requests.apply_actions(model, model_state.admission.on_kv_debt(engine, debt, now))
        told = self._capacity_of(engine, one, model_state.routers)
        if told == one.reported_capacity:
            return
        one.reported_capacity = told
        slots, tokens, lent_slots, lent_tokens, reserved = told
        self.requests.apply_actions(
            model, model_state.admission.on_replica(engine, slots, now, tokens, (lent_slots, lent_tokens), reserved)
        )

    def reclaim(self, now: float) -> None:
        """Reclaim KV tokens beyond the estimates of lower classes while a higher class waits; pay KV debt once no
        such request waits. O(engines with KV debt)."""
        for engine in self.kv_debt.engines:
            model = self.model_of_engine.get(engine)
            one = None if model is None else self.models[model].engines[engine]
            if model is None or one is None:
                continue
            waits = self.models[model].highest_waiting_class
            if one.reclaimed_for is not None and (waits is None or waits < one.reclaimed_for):
                one.reclaimed_for = None
                self.sync(engine, now)
                waits = self.models[model].highest_waiting_class
            if (
                waits is None
                or one.reclaimed_for is not None
                or min(self.kv_debt.classes(engine), default=waits) >= waits
            ):
                continue
            one.reclaimed_for = waits
            for router in self.accounts.routers(engine):
                self._send(router, Reclaim(engine, waits))

    def set_closed_engines(self, engines: frozenset[str], now: float) -> None:
        """Close exactly these engines: the routers' holdings there are unknown."""
        changed, self.requests.closed_engines = self.requests.closed_engines ^ engines, engines
        for engine in sorted(changed):
            self.sync(engine, now)

    def recovering_models(self) -> frozenset[str]:
        """Models whose reachable engines are all closed, so that their queues can grant nothing. O(engines)."""
        found = set()
        for model, model_state in self.models.items():
            there = {
                name
                for name, one in model_state.engines.items()
                if one.is_open_to(model_state.routers) and slots_of(name) in self._ledger
            }
            if self.requests.closed_engines & model_state.engines.keys() and there <= self.requests.closed_engines:
                found.add(model)
        return frozenset(found)

    def remove_unused(self, model: str) -> None:
        """Forget engines that no router reaches, and a queue without routers, engines and requests."""
        model_state = self.models[model]
        for engine in [
            name for name, one in model_state.engines.items() if not one.reachable_from and not one.granted_slots
        ]:
            del model_state.engines[engine], self.model_of_engine[engine]
            self.requests.apply_actions(model, model_state.admission.on_replica_gone(engine, -math.inf))
        left = not model_state.routers and not model_state.engines
        if left and not self.requests.has_requests(model):
            del self.models[model]
            self.requests.touched_models.discard(model)

    def on_tick(self, now: float) -> None:
        """Run what is due in the queues."""
        for model, model_state in list(self.models.items()):
            due = model_state.admission.next_due()
            if due is not None and due <= now:
                self.requests.apply_actions(model, model_state.admission.on_tick(now))
            self.requests.touched_models.add(model)

    def engines_of(self, model: str) -> list[str]:
        """The engines of a model's queue."""
        return list(self.models[model].engines) if model in self.models else []

    def model_of(self, engine: str) -> str:
        """The model that an engine serves, as routers report; empty: unknown."""
        return self.model_of_engine.get(engine, "")

    # Inside

    def _capacity_of(self, engine: str, one: EngineState, routers: set[str]) -> tuple[int, int, int, int, int]:
        if (
            not one.is_open_to(routers)
            or engine in self.requests.closed_engines
            or slots_of(engine) not in self._ledger
        ):
            return 0, 0, 0, 0, 0
        slots, tokens = self._ledger.limit(slots_of(engine)), self._ledger.limit(engine)
        free_slots, free_tokens = self.accounts.free(engine)
        lent = max(0, slots - free_slots - one.granted_slots), max(0, tokens - free_tokens - one.granted_tokens)
        return slots, tokens, *lent, self._sessions.reserved_tokens(engine)

    def _remove_reachability(self, router: str, engine: EngineState) -> None:
        engine.unreconciled.discard(router)
        engine.reachable_from.pop(router, None)
