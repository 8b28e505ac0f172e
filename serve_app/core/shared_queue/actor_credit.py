"""Routers' accounts in the pools of engines and sessions (`core.pools`), and their credit.

The actor knows only the sum of an account: what the router's requests hold plus its credit. An account grows before the
router is informed, and shrinks when the router reports it. A queue charges its grants by itself; all other changes are
made here.

Invariant: an account ends with its router or its engine, and nothing of it remains.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.core.memory import Ledger
from serve_app.core.pools import Holder, RequestPool
from serve_app.core.shared_queue.messages import Amount, CreditRequest
from serve_app.errors import LeaseNotFound

CREDIT_PARTS = 2  # of an engine: one is divided among the routers as credit, the rest is for the queue


class ActorCredit:
    """The accounts in the pools of engines and sessions. O(1) per method, unless stated."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.by_router: dict[str, Holder] = {}
        self._opened: set[tuple[str, str]] = set()  # the holders add to it
        self._reported_in_use: dict[str, tuple[Amount, ...]] = {}  # by router: what requests hold of its accounts
        self._in_use: dict[str, tuple[int, int]] = {}  # slots and tokens, the sum of these by engine or session
        self.returned: dict[str, None] = {}  # engines and sessions to which something was returned, until taken out
        self.overdrawn = 0  # counter: tokens of reported accounts that had been granted to others

    def holder(self, router: str) -> Holder:
        """The present accounts of a router."""
        found = self.by_router.get(router)
        if found is None:
            found = self.by_router[router] = Holder(router, self._opened)
        return found

    def account(self, router: str, engine: str) -> tuple[int, int]:
        """Slots and KV tokens of an account; zero if unknown."""
        holder = self.by_router.get(router)
        account = None if holder is None else holder.accounts.get(engine)
        return (0, 0) if account is None else (account.slots, account.tokens)

    def amounts(self, router: str) -> tuple[Amount, ...]:
        """All accounts of a router. O(these)."""
        holder = self.by_router.get(router)
        accounts = {} if holder is None else holder.accounts
        return tuple(Amount(name, one.slots, one.tokens) for name, one in accounts.items())

    def routers_on(self, engine: str) -> list[str]:
        """The routers with an account in a pool. O(routers)."""
        return [router for router, holder in self.by_router.items() if engine in holder.accounts]

    def differences(
        self, router: str, reported: Iterable[Amount]
    ) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """Pools of which a router reports another account than it has here; both, this one first. O(accounts)."""
        theirs = {one.engine: (one.slots, one.tokens) for one in reported}
        ours = {one.engine: (one.slots, one.tokens) for one in self.amounts(router)}
        found = {name: (ours.get(name, (0, 0)), theirs.get(name, (0, 0))) for name in theirs.keys() | ours.keys()}
        return {name: both for name, both in found.items() if both[0] != both[1] and self.runs(name)}

    def in_use(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that requests hold, by the last report of each router."""
        return self._in_use.get(engine, (0, 0))

    def report_in_use(self, router: str, amounts: tuple[Amount, ...]) -> None:
        """A router reports what its requests hold of its accounts. O(accounts)."""
        for sign, reported in ((-1, self._reported_in_use.pop(router, ())), (1, amounts)):
            for engine, slots, tokens in reported:
                had_slots, had_tokens = self._in_use.get(engine, (0, 0))
                self._in_use[engine] = had_slots + sign * slots, had_tokens + sign * tokens
                if self._in_use[engine] == (0, 0):
                    del self._in_use[engine]
        if amounts:
            self._reported_in_use[router] = amounts

    def unused_tokens(self, engine: str) -> int:
        """KV tokens of an engine in accounts but not in use, by the routers' last reports."""
        pool = self._ledger.pool(engine)
        return 0 if pool is None else max(0, pool.used_tokens - self.in_use(engine)[1])

    def runs(self, engine: str) -> bool:
        """Whether an engine or a session has a pool."""
        return self._ledger.pool(engine) is not None

    def pool(self, name: str) -> RequestPool | None:
        """The pool of an engine or a session; None: there is none."""
        return self._ledger.pool(name)

    def free(self, engine: str) -> tuple[int, int]:
        """Free slots and tokens; zero for an engine that does not run."""
        pool = self._ledger.pool(engine)
        return (0, 0) if pool is None else (pool.free_slots, pool.space.free())

    def target_credit(self, engine: str, routers: int) -> tuple[int, int]:
        """The credit per router on an engine while no request waits. Raises LeaseNotFound: it does not run."""
        pool = self._pool(engine)
        parts = CREDIT_PARTS * max(1, routers)
        return max(1, pool.slots // parts), max(1, pool.space.limit // parts)

    def grant_credit(self, router: str, event: CreditRequest, target: tuple[int, int]) -> tuple[int, int]:
        """Raise a router's credit to `target`, by half of what is free at most; returns the increase."""
        free_slots, free_tokens = self.free(event.engine)
        slots = max(0, min(target[0] - event.slots, -(-free_slots // 2)))
        tokens = max(0, min(target[1] - event.tokens, -(-free_tokens // 2)))
        self.charge(router, event.engine, slots, tokens)
        return slots, tokens

    def charge(self, router: str, engine: str, slots: int, tokens: int, *, growth: bool = False) -> None:
        """Increase an account, slots and tokens or neither. `growth`: the growth reserve may be used.

        Raises:
            InsufficientMemory: less is free.
            LeaseNotFound: the engine does not run.
        """
        self._pool(engine).charge(self.holder(router), slots, tokens, growth=growth)

    def give_back(self, router: str, engine: str, slots: int, tokens: int) -> None:
        """Decrease an account, to zero at least; an unknown one changes nothing."""
        holder = self.by_router.get(router)
        if holder is not None and holder.give_back(engine, slots, tokens):
            self.returned[engine] = None

    def close(self, router: str) -> None:
        """A router's incarnation has ended: its accounts stay as they are until it reports them or is removed."""
        if router in self.by_router:
            self.by_router[router].is_final = True

    def book(self, router: str, amounts: Iterable[Amount]) -> list[Amount]:
        """Set all accounts of a router to what it reports, as far as that is free; returns what is not.
        O(its accounts)."""
        self._release(router)
        short = []
        for engine, slots, tokens in amounts:
            pool = self._ledger.pool(engine)
            some_slots = 0
            some_tokens = 0
            if pool is not None:
                some_slots = min(slots, pool.free_slots)
                some_tokens = min(tokens, pool.space.free(growth=True))
                pool.charge(self.holder(router), some_slots, some_tokens, growth=True)
            self.overdrawn += tokens - some_tokens
            if (some_slots, some_tokens) != (slots, tokens):
                short.append(Amount(engine, slots - some_slots, tokens - some_tokens))
        return short

    def remove_router(self, router: str) -> None:
        """Give back all accounts of a router. O(these)."""
        self._release(router)
        self.report_in_use(router, ())

    def remove_engine(self, engine: str) -> dict[str, tuple[int, int]]:
        """Remove the accounts of an engine or session that has ended; returns them by router. O(routers)."""
        accounts = {router: one for router, one in self.by_router.items() if engine in one.accounts}
        return {router: one.leave(engine) for router, one in accounts.items()}

    def take_opened(self) -> list[tuple[str, str]]:
        """Pairs of router and engine, or session, with a new account since the last call."""
        found = list(self._opened)
        self._opened.clear()
        return found

    def mark_returned(self, name: str) -> None:
        """Something was returned to the pool of an engine, or more of it may be granted, other than by an account."""
        self.returned[name] = None

    def take_returned(self) -> dict[str, None]:
        """Engines and sessions to which something was returned since the last call."""
        found, self.returned = self.returned, {}
        return found

    def _release(self, router: str) -> None:
        holder = self.by_router.pop(router, None)
        if holder is not None:
            self.returned.update(dict.fromkeys(holder.release()))

    def _pool(self, engine: str) -> RequestPool:
        pool = self._ledger.pool(engine)
        if pool is None:
            raise LeaseNotFound(f"engine {engine!r} does not run")
        return pool
