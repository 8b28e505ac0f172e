"""Routers' accounts in the ledger: the slots and KV tokens that each router may use of each engine.

The actor knows only the sum of an account: what the router's requests hold plus its credit. An account grows before the
router is informed, and shrinks when the router reports it.

Invariant: the ledger has each account in full; it ends with its router or its engine, and nothing of it remains.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.core.memory import Hold, LeaseKind, Ledger, slots_of
from serve_app.core.shared_queue.messages import Amount, CreditRequest

CREDIT_PARTS = 2  # of an engine: one is divided among the routers as credit, the rest is for the queue


class ActorCredit:
    """Accounts by router and engine. O(log n) each; `remove_router` and `remove_engine` per account that ends."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.by_router: dict[str, dict[str, tuple[int, int]]] = {}  # by router and engine
        self._reported_in_use: dict[str, tuple[Amount, ...]] = {}  # by router: what requests hold of its accounts
        self._in_use: dict[str, tuple[int, int]] = {}  # slots and tokens, the sum of these by engine or session
        self.opened: set[tuple[str, str]] = set()  # pairs of router and engine, or session, with a new account
        self.freed: set[str] = set()  # engines and sessions with returned slots
        self.overdrawn = 0  # counter: tokens of reported accounts that the ledger had granted to others

    def account(self, router: str, engine: str) -> tuple[int, int]:
        """Slots and KV tokens of an account; zero if unknown."""
        return self.by_router.get(router, {}).get(engine, (0, 0))

    def recount(self, routers: Iterable[str]) -> None:
        """After an error: set the accounts from the ledger. O(routers x engines)."""
        engines = [one.lease_id for kind in (LeaseKind.ENGINE, LeaseKind.SESSION) for one in self._ledger.leases(kind)]
        for router in {*self.by_router, *routers}:
            for engine in engines:
                leases = (_lease_id(pool, router) for pool in (slots_of(engine), engine))
                slots, tokens = (self._ledger.lease(one).amount if one in self._ledger else 0 for one in leases)
                self._set_account(router, engine, slots, tokens)

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
        """KV tokens of an engine in accounts but not in use, by the routers' last reports. O(routers)."""
        had = sum(accounts[engine][1] for accounts in self.by_router.values() if engine in accounts)
        return max(0, had - self.in_use(engine)[1])

    def free(self, engine: str) -> tuple[int, int]:
        """Free slots and tokens; zero for an engine that does not run."""
        if slots_of(engine) not in self._ledger:
            return 0, 0
        return self._ledger.free(slots_of(engine)), self._ledger.free(engine)

    def target_credit(self, engine: str, routers: int) -> tuple[int, int]:
        """The credit per router on an engine while no request waits."""
        parts = CREDIT_PARTS * max(1, routers)
        return max(1, self._ledger.limit(slots_of(engine)) // parts), max(1, self._ledger.limit(engine) // parts)

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
            LeaseNotFound, LeaseConflict: the engine does not run, or the router has not joined.
        """
        had_slots, had_tokens = self.account(router, engine)
        self._resize(router, engine, had_slots + slots, had_tokens + tokens, growth=growth)

    def give_back(self, router: str, engine: str, slots: int, tokens: int) -> None:
        """Decrease an account, to zero at least: its engine may have ended, and the account with it."""
        had_slots, had_tokens = self.account(router, engine)
        self._resize(router, engine, max(0, had_slots - slots), max(0, had_tokens - tokens))
        if min(slots, had_slots):
            self.freed.add(engine)

    def book(self, router: str, engine: str, slots: int, tokens: int) -> tuple[int, int]:
        """Set an account to what the router reports, as far as that is free; returns the booked amounts."""
        self.give_back(router, engine, *self.account(router, engine))
        if slots_of(engine) not in self._ledger:
            self.overdrawn += tokens
            return 0, 0
        some_slots = min(slots, self._ledger.free(slots_of(engine)))
        some_tokens = min(tokens, self._ledger.free(engine, growth=True))
        self.overdrawn += tokens - some_tokens
        self.charge(router, engine, some_slots, some_tokens, growth=True)
        return some_slots, some_tokens

    def remove_router(self, router: str) -> list[str]:
        """Remove a router; returns the engines on which it had an account."""
        engines = list(self.by_router.get(router, ()))
        for engine in engines:
            self._resize(router, engine, 0, 0)
        self.report_in_use(router, ())
        return engines

    def remove_engine(self, engine: str) -> dict[str, tuple[int, int]]:
        """Remove an engine whose leases have ended; returns each router's account there."""
        had = {router: accounts[engine] for router, accounts in self.by_router.items() if engine in accounts}
        for router in had:
            self._set_account(router, engine, 0, 0)
        return had

    def _resize(self, router: str, engine: str, slots: int, tokens: int, *, growth: bool = False) -> None:
        """Set an account and its leases; an error changes nothing."""
        had_slots, had_tokens = self.account(router, engine)
        self._resize_lease(slots_of(engine), router, had_slots, slots)
        try:
            self._resize_lease(engine, router, had_tokens, tokens, growth=growth)
        except BaseException:
            self._resize_lease(slots_of(engine), router, slots, had_slots)
            raise
        self._set_account(router, engine, slots, tokens)

    def _set_account(self, router: str, engine: str, slots: int, tokens: int) -> None:
        if slots or tokens:
            accounts = self.by_router.setdefault(router, {})
            if engine not in accounts:
                self.opened.add((router, engine))
            accounts[engine] = (slots, tokens)
        elif engine in self.by_router.get(router, {}):
            del self.by_router[router][engine]
            if not self.by_router[router]:
                del self.by_router[router]

    def _resize_lease(self, pool: str, router: str, before: int, after: int, *, growth: bool = False) -> None:
        lease = _lease_id(pool, router)
        if before == after or (after < before and lease not in self._ledger):  # expired with its router
            return
        if not after:
            self._ledger.end(lease)
        elif before:
            self._ledger.resize(lease, [after], growth=growth)
        else:
            self._ledger.reserve(lease, LeaseKind.SHARE, router, [Hold(pool, after)], growth=growth)


def _lease_id(pool: str, router: str) -> str:
    return f"{pool}@{router}"
