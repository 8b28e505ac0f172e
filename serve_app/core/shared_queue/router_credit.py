"""A router's credit of each engine, on which it grants alone.

Rules
- Credit is the router's account at the actor minus what its requests hold (`.router_running`). It is negative if the
  actor has less than the router counted; then nothing is granted there until enough requests have ended.
- While no request waits, a router keeps about the target credit set by the actor, requests more below half of it and
  returns the surplus above twice of it. While requests wait for the engine or its model it keeps none.

Invariant: credit changes only as a request begins, grows or ends, by an action of the actor, or by an event to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.shared_queue.messages import ActorState, CreditRequest, GiveBack

CREDIT_REQUEST_PAUSE_S = 0.05  # after an answer, which may grant nothing; the actor grants credit on request only
GIVE_BACK_FACTOR = 2  # times the target credit: less would alternate between returning and requesting


@dataclass(slots=True)
class RouterAccount:
    """What a router may use of an engine besides what its requests hold. `usable`: requests can be sent there, as far
    as is known. `fingerprint`: see `core.memory.EngineReport`; None: the router has not been connected to it."""

    model: str
    usable: bool = True
    single_request: bool = False
    credit_slots: int = 0
    credit_tokens: int = 0
    target_slots: int = 0
    target_tokens: int = 0
    request_pending: bool = False
    request_again_at: float = -math.inf
    last_grant: int = 0
    fingerprint: str | None = None

    def may_continue(self, fingerprint: str | None) -> bool:
        """Whether it may continue what an engine with this fingerprint has begun; None: none has."""
        return fingerprint is None or fingerprint == self.fingerprint

    def may_have_credit(self, engine: str, state: ActorState) -> bool:
        """Whether the router may keep credit of this engine."""
        return self.usable and state.contended.isdisjoint((engine, self.model))


class RouterCredit:
    """Accounts by engine, and the engines of a model with credit. O(log n) each, unless stated."""

    def __init__(self) -> None:
        self.by_engine: dict[str, RouterAccount] = {}
        self.engines_with_credit: dict[str, KeyedHeap] = {}  # by model: usable engines with credit, most slots first
        self.changed: set[str] = set()  # engines to balance: their credit or whether they are usable has changed
        self._grants = 0

    def set_reachability(self, model: str, engine: str, usable: bool, *, single_request: bool = False) -> bool:
        """Set whether requests can be sent to an engine, and whether one only; returns whether `usable` changed."""
        known = self.by_engine.get(engine)
        account = self.by_engine[engine] = known or RouterAccount(model)
        account.single_request = single_request
        if known is not None and known.usable == usable:
            return False
        account.usable = usable
        self._index(engine, account)
        return True

    def set_fingerprint(self, engine: str, fingerprint: str | None) -> None:
        """An engine has told its fingerprint; one without an account here is left to the actor."""
        if engine in self.by_engine:
            self.by_engine[engine].fingerprint = fingerprint

    def drop_engine(self, engine: str) -> None:
        """An engine is gone: remove its account."""
        model = self.by_engine.pop(engine).model
        self.changed.discard(engine)
        open_ones = self.engines_with_credit.get(model)
        if open_ones is not None:  # none if no engine has credit
            open_ones.discard(engine)
            if not len(open_ones):
                del self.engines_with_credit[model]

    def choose(
        self,
        model: str,
        slots: int,
        tokens: int,
        affinity: str | None,
        fingerprint: str | None = None,
        avoid: frozenset[str] = frozenset(),
    ) -> str | None:
        """An engine with this much credit: the affinity's, else the one with most slots up to its target, else any.
        O(engines) if that one has too little, is to be avoided, or may not continue what one with this fingerprint has
        begun."""

        def fits(engine: str) -> bool:
            return engine not in avoid and self._fits(engine, model, slots, tokens, fingerprint)

        if affinity is not None and fits(affinity):
            return affinity
        open_ones = self.engines_with_credit.get(model)
        top = None if open_ones is None else open_ones.peek()
        if top is None:
            return None
        return top[1] if fits(top[1]) else next(filter(fits, self.by_engine), None)

    def may_run(self, model: str, fingerprint: str | None, avoid: frozenset[str] = frozenset()) -> bool:
        """Whether some engine that is not to be avoided, with credit or without, takes what one with this fingerprint
        has begun; None: none has. O(engines)."""
        if fingerprint is None and not avoid:
            return True
        engines = (one for name, one in self.by_engine.items() if name not in avoid)
        return any(one.usable and one.model == model and one.may_continue(fingerprint) for one in engines)

    def grant(self, engine: str, slots: int, tokens: int) -> None:
        """A request begins or grows on credit, after `choose`."""
        self._grants += 1
        self.by_engine[engine].last_grant = self._grants
        self.add(engine, -slots, -tokens)

    def add(self, engine: str, slots: int, tokens: int) -> None:
        """Add slots and tokens to the credit; negative: take them off."""
        account = self.by_engine[engine]
        account.credit_slots += slots
        account.credit_tokens += tokens
        self._index(engine, account)

    def set_target(self, engine: str, slots: int, tokens: int) -> None:
        """The credit that this router should have there while no request waits."""
        account = self.by_engine[engine]
        account.target_slots = slots
        account.target_tokens = tokens
        self._index(engine, account)

    def credit(self, engine: str) -> tuple[int, int]:
        """Slots and tokens of credit there; zero if unknown."""
        account = self.by_engine.get(engine)
        return (0, 0) if account is None else (account.credit_slots, account.credit_tokens)

    def begin_incarnation(self, *, credit_valid: bool) -> None:
        """A new incarnation begins: no credit is negative, so what requests hold is reported even if the actor lacks
        it. `credit_valid`: the credit is still this router's; otherwise it is dropped."""
        for account in self.by_engine.values():
            account.request_pending = False
            account.credit_slots = max(0, account.credit_slots) if credit_valid else 0
            account.credit_tokens = max(0, account.credit_tokens) if credit_valid else 0

    def keeps(self, engine: str, state: ActorState) -> bool:
        """Whether what a request on credit has held stays here when it ends."""
        account = self.by_engine[engine]
        return account.model in state.recovering or account.may_have_credit(engine, state)

    def lacks(self, engine: str) -> bool:
        """Whether the actor has less for this router than its requests hold."""
        account = self.by_engine[engine]
        return account.credit_slots < 0 or account.credit_tokens < 0

    def balance(self, engine: str, state: ActorState, now: float) -> GiveBack | CreditRequest | None:
        """Surplus credit, taken off the account to return it, or a request for more if at most half of the target is
        left; None: neither is due."""
        account = self.by_engine[engine]
        if account.model in state.recovering:
            return None
        slots = account.credit_slots
        tokens = account.credit_tokens
        keeps = account.may_have_credit(engine, state)
        target_slots, target_tokens = (account.target_slots, account.target_tokens) if keeps else (0, 0)
        surplus_slots = slots - target_slots if slots > GIVE_BACK_FACTOR * target_slots else 0
        surplus_tokens = tokens - target_tokens if tokens > GIVE_BACK_FACTOR * target_tokens else 0
        if surplus_slots or surplus_tokens:
            self.add(engine, -surplus_slots, -surplus_tokens)
            return GiveBack(engine, surplus_slots, surplus_tokens)
        enough = 2 * slots > target_slots and 2 * tokens > target_tokens
        if not keeps or account.request_pending or enough or now < account.request_again_at:
            return None
        account.request_pending = True
        return CreditRequest(engine, max(0, slots), max(0, tokens))

    def _fits(self, engine: str, model: str, slots: int, tokens: int, fingerprint: str | None) -> bool:
        account = self.by_engine.get(engine)
        if account is None or not account.usable or account.model != model or not account.may_continue(fingerprint):
            return False
        return account.credit_slots >= slots and account.credit_tokens >= tokens

    def _index(self, engine: str, account: RouterAccount) -> None:
        self.changed.add(engine)
        open_ones = self.engines_with_credit.get(account.model)
        if open_ones is None:
            open_ones = self.engines_with_credit[account.model] = KeyedHeap()
        if account.usable and account.credit_slots > 0:
            wanted = min(account.credit_slots, account.target_slots)  # what is above that draws no request there
            open_ones.set(engine, (-wanted, account.last_grant))
        else:
            open_ones.discard(engine)
