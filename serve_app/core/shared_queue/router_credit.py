"""A router's accounts: what its requests hold on each engine, and the credit on which it grants alone.

Rules
- Credit is an account minus what requests hold. It is negative if the ledger has less than the router counted; then
  nothing is granted there until enough requests have ended.
- While no request waits, a router keeps about the target credit set by the actor, requests more below half of it and
  returns the surplus above twice of it. While requests wait for the engine or its model it keeps none.

Invariant: held and credit of an engine change only together, or by an action of the actor, or by an event to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.shared_queue.messages import Amount, CreditRequest, GiveBack

CREDIT_REQUEST_PAUSE_S = (
    0.05  # after an answer, which may have granted nothing; the actor grants credit on request only
)
GIVE_BACK_FACTOR = 2  # times the target credit: less would alternate between returning and requesting


@dataclass(slots=True)
class _Account:
    model: str
    usable: bool = True
    single_request: bool = False
    held_slots: int = 0
    held_tokens: int = 0
    credit_slots: int = 0
    credit_tokens: int = 0
    target_slots: int = 0
    target_tokens: int = 0
    request_pending: bool = False
    request_again_at: float = -math.inf
    last_grant: int = 0


class RouterCredit:
    """Accounts by engine, and the engines of a model with credit. O(log n) each, unless stated."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self.engines_with_credit: dict[str, KeyedHeap] = {}  # by model: usable engines with credit, most slots first
        self._grants = 0

    def __contains__(self, engine: str) -> bool:
        return engine in self._accounts

    def names(self) -> list[str]:
        return list(self._accounts)

    def engines(self) -> list[tuple[str, str, bool]]:
        """Every engine with its model and whether it is usable."""
        return [(name, account.model, account.usable) for name, account in self._accounts.items()]

    def model_of(self, engine: str) -> str:
        """The model of an engine. Raises KeyError if unknown."""
        return self._accounts[engine].model

    def is_usable(self, engine: str) -> bool:
        """Whether requests can be sent to an engine, as far as is known."""
        account = self._accounts.get(engine)
        return account is not None and account.usable

    def set_reachability(self, model: str, engine: str, usable: bool, *, single_request: bool = False) -> bool:
        """Set whether requests can be sent to an engine, and whether one only; returns whether `usable` changed."""
        account = self._accounts.get(engine)
        if account is not None and account.usable == usable:
            account.single_request = single_request
            return False
        if account is None:
            account = self._accounts[engine] = _Account(model)
        account.usable, account.single_request = usable, single_request
        self._index(engine, account)
        return True

    def takes_no_more(self, engine: str) -> bool:
        """Whether an engine that was just sent a request takes no other."""
        account = self._accounts[engine]
        return account.usable and account.single_request

    def drop_engine(self, engine: str) -> None:
        """An engine is gone: remove its account."""
        account = self._accounts.pop(engine, None)
        open_ones = None if account is None else self.engines_with_credit.get(account.model)
        if account is not None and open_ones is not None:  # none if no engine has credit
            open_ones.discard(engine)
            if not len(open_ones):
                del self.engines_with_credit[account.model]

    def choose(self, model: str, slots: int, tokens: int, affinity: str | None) -> str | None:
        """An engine with this much credit: the affinity's, else the one with most slots, else any. O(engines) if the
        one with most slots has too few tokens."""
        if affinity is not None and self._fits(affinity, model, slots, tokens):
            return affinity
        open_ones = self.engines_with_credit.get(model)
        top = None if open_ones is None else open_ones.peek()
        if top is None or -top[0][0] < slots:
            return None
        if self._accounts[top[1]].credit_tokens >= tokens:
            return top[1]
        return next((name for name in self._accounts if self._fits(name, model, slots, tokens)), None)

    def grant(self, engine: str, slots: int, tokens: int) -> None:
        """A request begins on credit, after `choose`."""
        self._grants += 1
        self._accounts[engine].last_grant = self._grants
        self._move(engine, slots, tokens)

    def release(self, engine: str, slots: int, tokens: int) -> None:
        """A request that held this has ended: it becomes credit."""
        self._move(engine, -slots, -tokens)

    def add_held(self, engine: str, slots: int, tokens: int) -> None:
        """Change the account and the held amount together; negative: decrease."""
        account = self._accounts[engine]
        account.held_slots += slots
        account.held_tokens += tokens

    def add_credit(self, engine: str, slots: int, tokens: int) -> None:
        """Change the account and its credit together; negative: decrease."""
        account = self._accounts[engine]
        account.credit_slots += slots
        account.credit_tokens += tokens
        self._index(engine, account)

    def on_credit_grant(self, engine: str, target_slots: int, target_tokens: int, now: float) -> None:
        """The answer to `request_credit`: the target credit of the router there."""
        account = self._accounts[engine]
        account.request_pending, account.request_again_at = False, now + CREDIT_REQUEST_PAUSE_S
        account.target_slots, account.target_tokens = target_slots, target_tokens

    def credit(self, engine: str) -> tuple[int, int]:
        """Slots and tokens of credit there; zero if unknown."""
        account = self._accounts.get(engine)
        return (0, 0) if account is None else (account.credit_slots, account.credit_tokens)

    def held(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that requests hold there; zero if unknown."""
        account = self._accounts.get(engine)
        return (0, 0) if account is None else (account.held_slots, account.held_tokens)

    def held_amounts(self) -> tuple[Amount, ...]:
        """Held amounts, on engines where requests hold anything. O(engines)."""
        accounts = self._accounts.items()
        return tuple(
            Amount(name, one.held_slots, one.held_tokens) for name, one in accounts if one.held_slots or one.held_tokens
        )

    def account_amounts(self) -> tuple[Amount, ...]:
        """Account amounts (held plus credit), where not zero. O(engines)."""
        found = (
            Amount(name, one.held_slots + one.credit_slots, one.held_tokens + one.credit_tokens)
            for name, one in self._accounts.items()
        )
        return tuple(one for one in found if one.slots or one.tokens)

    def begin_incarnation(self, *, credit_valid: bool) -> tuple[Amount, ...]:
        """The accounts, held plus credit, for a new incarnation; held amounts are reported even if the ledger lacks
        them. `credit_valid`: the credit is still this router's; otherwise it is dropped."""
        found = []
        for engine, account in self._accounts.items():
            account.request_pending = False
            account.credit_slots, account.credit_tokens = (
                (max(0, account.credit_slots), max(0, account.credit_tokens)) if credit_valid else (0, 0)
            )
            found.append(
                Amount(engine, account.held_slots + account.credit_slots, account.held_tokens + account.credit_tokens)
            )
        return tuple(found)

    def take_surplus(self, engine: str, contended: frozenset[str]) -> GiveBack | None:
        """Take surplus credit of an engine off the account, to return it; None: no surplus."""
        account = self._accounts[engine]
        wanted = engine in contended or account.model in contended or not account.usable
        keep = (0, 0) if wanted else (account.target_slots, account.target_tokens)
        most = (0, 0) if wanted else (GIVE_BACK_FACTOR * keep[0], GIVE_BACK_FACTOR * keep[1])
        slots = account.credit_slots - keep[0] if account.credit_slots > most[0] else 0
        tokens = account.credit_tokens - keep[1] if account.credit_tokens > most[1] else 0
        if not slots and not tokens:
            return None
        self.add_credit(engine, -slots, -tokens)
        return GiveBack(engine, slots, tokens)

    def request_credit(self, engine: str, contended: frozenset[str], now: float) -> CreditRequest | None:
        """A request for more credit, if at most half of the target is left; None: none is due."""
        account = self._accounts[engine]
        if not account.usable or engine in contended or account.model in contended or account.request_pending:
            return None
        enough = 2 * account.credit_slots > account.target_slots and 2 * account.credit_tokens > account.target_tokens
        if enough or now < account.request_again_at:
            return None
        account.request_pending = True
        return CreditRequest(engine, max(0, account.credit_slots), max(0, account.credit_tokens))

    def _fits(self, engine: str, model: str, slots: int, tokens: int) -> bool:
        account = self._accounts.get(engine)
        if account is None or not account.usable or account.model != model:
            return False
        return account.credit_slots >= slots and account.credit_tokens >= tokens

    def _move(self, engine: str, slots: int, tokens: int) -> None:
        account = self._accounts[engine]
        account.held_slots += slots
        account.held_tokens += tokens
        account.credit_slots -= slots
        account.credit_tokens -= tokens
        self._index(engine, account)

    def _index(self, engine: str, account: _Account) -> None:
        open_ones = self.engines_with_credit.setdefault(account.model, KeyedHeap())
        if account.usable and account.credit_slots > 0:
            open_ones.set(engine, (-account.credit_slots, account.last_grant))
        else:
            open_ones.discard(engine)
