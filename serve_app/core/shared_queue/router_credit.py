"""A router's accounts: what its requests hold on each engine, and the credit from which it grants by itself.

Rules
- Credit is what an account has beside what requests hold. It may be below nothing, when the ledger has less than the
  router went by; then nothing is granted there until enough requests have ended.
- While nobody waits a router keeps about the spare credit it is told, asks for more below half of it and gives back
  what is above twice of it. While somebody waits for the engine it keeps none.

Invariant: held and credit of an engine change only together, or by a word of the actor, or by one to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.shared_queue.messages import Amount, Ask, GiveBack

ASK_AGAIN_S = 0.05  # after an answer: it may have brought nothing, and the actor gives to nobody by itself
GIVE_BACK_AT = 2  # times the spare credit: below that, giving back and asking again would take turns


@dataclass(slots=True)
class _Account:
    model: str
    usable: bool = True
    once: bool = False
    held_slots: int = 0
    held_tokens: int = 0
    slots: int = 0  # credit
    tokens: int = 0
    spare_slots: int = 0
    spare_tokens: int = 0
    asked: bool = False
    ask_at: float = -math.inf
    last_take: int = 0


class Accounts:
    """Accounts by engine, and which engine of a model has credit. O(log n) each, save where said."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._open: dict[str, KeyedHeap] = {}  # by model: usable engines with credit, most slots first
        self._takes = 0

    def __contains__(self, engine: str) -> bool:
        return engine in self._accounts

    def names(self) -> list[str]:
        return list(self._accounts)

    def engines(self) -> list[tuple[str, str, bool]]:
        """Every engine with its model and whether it is usable."""
        return [(name, account.model, account.usable) for name, account in self._accounts.items()]

    def model(self, engine: str) -> str:
        """What it serves. Raises KeyError for an unknown one."""
        return self._accounts[engine].model

    def usable(self, engine: str) -> bool:
        """Whether requests can be handed to it, as far as is known."""
        account = self._accounts.get(engine)
        return account is not None and account.usable

    def reach(self, model: str, engine: str, usable: bool, *, once: bool = False) -> bool:
        """Requests can be handed to this engine, one if `once`, or none now; whether it is new that they can."""
        account = self._accounts.get(engine)
        if account is not None and account.usable == usable:
            account.once = once
            return False
        if account is None:
            account = self._accounts[engine] = _Account(model)
        account.usable, account.once = usable, once
        self._index(engine, account)
        return True

    def was_last(self, engine: str) -> bool:
        """A request has been handed to it: whether it takes no other one."""
        account = self._accounts[engine]
        return account.usable and account.once

    def drop(self, engine: str) -> None:
        """An engine is gone, and all that was held there."""
        account = self._accounts.pop(engine, None)
        open_ones = None if account is None else self._open.get(account.model)
        if account is not None and open_ones is not None:  # there is none where no engine has credit
            open_ones.discard(engine)
            if not len(open_ones):
                del self._open[account.model]

    def choose(self, model: str, slots: int, tokens: int, affinity: str | None) -> str | None:
        """An engine with this much credit: the affinity's, else the one with most slots, else any. O(engines) where
        the first has too few tokens."""
        if affinity is not None and self._fits(affinity, model, slots, tokens):
            return affinity
        open_ones = self._open.get(model)
        top = None if open_ones is None else open_ones.peek()
        if top is None or -top[0][0] < slots:
            return None
        if self._accounts[top[1]].tokens >= tokens:
            return top[1]
        return next((name for name in self._accounts if self._fits(name, model, slots, tokens)), None)

    def take(self, engine: str, slots: int, tokens: int) -> None:
        """A request begins on credit that `choose` has seen."""
        self._takes += 1
        self._accounts[engine].last_take = self._takes
        self._move(engine, slots, tokens)

    def put_back(self, engine: str, slots: int, tokens: int) -> None:
        """A request that held this has ended, and it is credit."""
        self._move(engine, -slots, -tokens)

    def hold(self, engine: str, slots: int, tokens: int) -> None:
        """The account has grown together with what is held, or (below nothing) fallen."""
        account = self._accounts[engine]
        account.held_slots += slots
        account.held_tokens += tokens

    def add(self, engine: str, slots: int, tokens: int) -> None:
        """The account has grown, or fallen: it is credit."""
        account = self._accounts[engine]
        account.slots += slots
        account.tokens += tokens
        self._index(engine, account)

    def answered(self, engine: str, spare_slots: int, spare_tokens: int, now: float) -> None:
        """The answer to `ask`: how much credit the router is to have there."""
        account = self._accounts[engine]
        account.asked, account.ask_at = False, now + ASK_AGAIN_S
        account.spare_slots, account.spare_tokens = spare_slots, spare_tokens

    def credit(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that could be granted there now; none of an unknown one."""
        account = self._accounts.get(engine)
        return (0, 0) if account is None else (account.slots, account.tokens)

    def held(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that requests hold there; none of an unknown one."""
        account = self._accounts.get(engine)
        return (0, 0) if account is None else (account.held_slots, account.held_tokens)

    def holds(self) -> tuple[Amount, ...]:
        """What requests hold, on engines where they hold anything. O(engines)."""
        accounts = self._accounts.items()
        return tuple(
            Amount(name, one.held_slots, one.held_tokens) for name, one in accounts if one.held_slots or one.held_tokens
        )

    def wholes(self) -> tuple[Amount, ...]:
        """What requests hold and credit together, where there is any. O(engines)."""
        found = (
            Amount(name, one.held_slots + one.slots, one.held_tokens + one.tokens)
            for name, one in self._accounts.items()
        )
        return tuple(one for one in found if one.slots or one.tokens)

    def restate(self, *, good: bool) -> tuple[Amount, ...]:
        """The accounts as they are, held and credit together; what requests hold is said whether it was had or not.
        `good`: the credit is still ours; else it is let go of."""
        found = []
        for engine, account in self._accounts.items():
            account.asked = False
            account.slots, account.tokens = (max(0, account.slots), max(0, account.tokens)) if good else (0, 0)
            found.append(Amount(engine, account.held_slots + account.slots, account.held_tokens + account.tokens))
        return tuple(found)

    def surplus(self, engine: str, contended: frozenset[str]) -> GiveBack | None:
        """What is to be given back of an engine's credit; that is off the account now."""
        account = self._accounts[engine]
        wanted = engine in contended or account.model in contended or not account.usable
        keep = (0, 0) if wanted else (account.spare_slots, account.spare_tokens)
        most = (0, 0) if wanted else (GIVE_BACK_AT * keep[0], GIVE_BACK_AT * keep[1])
        slots = account.slots - keep[0] if account.slots > most[0] else 0
        tokens = account.tokens - keep[1] if account.tokens > most[1] else 0
        if not slots and not tokens:
            return None
        self.add(engine, -slots, -tokens)
        return GiveBack(engine, slots, tokens)

    def ask(self, engine: str, contended: frozenset[str], now: float) -> Ask | None:
        """The question for more credit, if there is less than half of what the router is to have."""
        account = self._accounts[engine]
        if not account.usable or engine in contended or account.model in contended or account.asked:
            return None
        enough = 2 * account.slots > account.spare_slots and 2 * account.tokens > account.spare_tokens
        if enough or now < account.ask_at:
            return None
        account.asked = True
        return Ask(engine, max(0, account.slots), max(0, account.tokens))

    def _fits(self, engine: str, model: str, slots: int, tokens: int) -> bool:
        account = self._accounts.get(engine)
        if account is None or not account.usable or account.model != model:
            return False
        return account.slots >= slots and account.tokens >= tokens

    def _move(self, engine: str, slots: int, tokens: int) -> None:
        account = self._accounts[engine]
        account.held_slots += slots
        account.held_tokens += tokens
        account.slots -= slots
        account.tokens -= tokens
        self._index(engine, account)

    def _index(self, engine: str, account: _Account) -> None:
        open_ones = self._open.setdefault(account.model, KeyedHeap())
        if account.usable and account.slots > 0:
            open_ones.set(engine, (-account.slots, account.last_take))
        else:
            open_ones.discard(engine)
