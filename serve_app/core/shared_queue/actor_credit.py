"""What each router may use of each engine, slots and KV tokens together, as the ledger has it.

An account is one number for each of the two, of which the actor knows only the sum: what the router's requests hold and
its credit. It grows before the router is told, and falls when the router says so.

Invariant: an account is in the ledger whole; it ends with its router or its engine, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serve_app.core.memory import Hold, Kind, Ledger, slots_of
from serve_app.core.shared_queue.messages import Amount

CREDIT_PARTS = 2  # of an engine: one is divided among the routers as credit, the rest is for who asks


class Accounts:
    """Accounts by router and engine. O(log n) each, `leave` and `drop` per account that ends."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, dict[str, tuple[int, int]]] = {}  # by router and engine
        self._told: dict[str, dict[str, tuple[int, int]]] = {}  # by router and engine, what its requests hold of that
        self.opened: set[tuple[str, str]] = set()  # routers and engines whose account was nothing before
        self.freed: set[str] = set()  # engines and sessions of which slots have come back
        self.overdrawn = 0  # counter: tokens that routers went by and the ledger had given to others

    def held(self, router: str, engine: str) -> tuple[int, int]:
        """Slots and KV tokens of an account; none of an unknown one."""
        return self._held.get(router, {}).get(engine, (0, 0))

    def of(self, router: str) -> Iterator[tuple[str, tuple[int, int]]]:
        """The accounts of a router, by engine."""
        return iter(list(self._held.get(router, {}).items()))

    def routers(self, engine: str) -> list[str]:
        """Routers with an account of an engine. O(routers)."""
        return [router for router, accounts in self._held.items() if engine in accounts]

    def told(self, router: str, holds: Iterable[Amount]) -> None:
        """A router says what its requests hold; what it leaves out, they do not."""
        self._told[router] = {engine: (slots, tokens) for engine, slots, tokens in holds}

    def recount(self, routers: Iterable[str]) -> None:
        """After an error: the accounts are what the ledger has. O(routers x engines)."""
        engines = [one.lease_id for kind in (Kind.ENGINE, Kind.SESSION) for one in self._ledger.leases(kind)]
        for router in {*self._held, *routers}:
            for engine in engines:
                slots, tokens = (self._leased(pool, router) for pool in (slots_of(engine), engine))
                self._set(router, engine, slots, tokens)

    def used(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that requests hold, by the last word of each router. O(routers)."""
        found = [one[engine] for one in self._told.values() if engine in one]
        return sum(slots for slots, _ in found), sum(tokens for _, tokens in found)

    def idle(self, engine: str) -> int:
        """KV tokens of an engine that routers have and nobody uses, by their last word. O(routers)."""
        had = sum(accounts[engine][1] for accounts in self._held.values() if engine in accounts)
        return max(0, had - self.used(engine)[1])

    def free(self, engine: str) -> tuple[int, int]:
        """Slots and tokens that nobody has; none of an engine that does not run."""
        if slots_of(engine) not in self._ledger:
            return 0, 0
        return self._ledger.free(slots_of(engine)), self._ledger.free(engine)

    def spare(self, engine: str, routers: int) -> tuple[int, int]:
        """The credit of each of so many routers on an engine while nobody waits."""
        parts = CREDIT_PARTS * max(1, routers)
        return max(1, self._ledger.limit(slots_of(engine)) // parts), max(1, self._ledger.limit(engine) // parts)

    def lend(self, router: str, engine: str, spare: tuple[int, int], had: tuple[int, int]) -> tuple[int, int]:
        """Bring a router's credit, of which it has this, up to `spare`, by half of what is free at most; returns what
        that was."""
        slots, tokens = (max(0, min(s - h, -(-f // 2))) for s, h, f in zip(spare, had, self.free(engine), strict=True))
        self.charge(router, engine, slots, tokens)
        return slots, tokens

    def charge(self, router: str, engine: str, slots: int, tokens: int, *, growth: bool = False) -> None:
        """Let an account grow, in both or not at all. `growth`: what is kept for that may be used.

        Raises:
            InsufficientMemory: there is less free.
            LeaseNotFound, LeaseConflict: the engine does not run, or the router has not joined.
        """
        had_slots, had_tokens = self.held(router, engine)
        self._put(slots_of(engine), router, had_slots, had_slots + slots, growth=False)
        try:
            self._put(engine, router, had_tokens, had_tokens + tokens, growth=growth)
        except BaseException:
            self._put(slots_of(engine), router, had_slots + slots, had_slots, growth=False)
            raise
        self._set(router, engine, had_slots + slots, had_tokens + tokens)

    def give_back(self, router: str, engine: str, slots: int, tokens: int) -> None:
        """Let an account fall; no further than to nothing, since its engine may have ended and taken it along."""
        had_slots, had_tokens = self.held(router, engine)
        less_slots, less_tokens = min(slots, had_slots), min(tokens, had_tokens)
        self._put(slots_of(engine), router, had_slots, had_slots - less_slots, growth=False)
        self._put(engine, router, had_tokens, had_tokens - less_tokens, growth=False)
        self._set(router, engine, had_slots - less_slots, had_tokens - less_tokens)
        if less_slots:
            self.freed.add(engine)

    def book(self, router: str, engine: str, slots: int, tokens: int) -> tuple[int, int]:
        """A router says what its account is; returns what could be had of that."""
        self.give_back(router, engine, *self.held(router, engine))
        if slots_of(engine) not in self._ledger:
            self.overdrawn += tokens
            return 0, 0
        some_slots = min(slots, self._ledger.free(slots_of(engine)))
        some_tokens = min(tokens, self._ledger.free(engine, growth=True))
        self.overdrawn += tokens - some_tokens
        self.charge(router, engine, some_slots, some_tokens, growth=True)
        return some_slots, some_tokens

    def leave(self, router: str) -> list[str]:
        """A router is gone; returns the engines it had an account with."""
        engines = list(self._held.get(router, ()))
        for engine in engines:
            if slots_of(engine) in self._ledger:  # else they have ended by themselves
                self._forget(slots_of(engine), router)
                self._forget(engine, router)
        self._held.pop(router, None)
        self._told.pop(router, None)
        return engines

    def drop(self, engine: str) -> dict[str, tuple[int, int]]:
        """An engine is gone, and what lay on it; returns what each router had there."""
        had = {router: accounts.pop(engine) for router, accounts in self._held.items() if engine in accounts}
        for router in had:
            if not self._held[router]:
                del self._held[router]
        return had

    def _set(self, router: str, engine: str, slots: int, tokens: int) -> None:
        if slots or tokens:
            accounts = self._held.setdefault(router, {})
            if engine not in accounts:
                self.opened.add((router, engine))
            accounts[engine] = (slots, tokens)
        elif engine in self._held.get(router, {}):
            del self._held[router][engine]
            if not self._held[router]:
                del self._held[router]

    def _put(self, pool: str, router: str, before: int, after: int, *, growth: bool) -> None:
        lease = _lease(pool, router)
        if before == after or (after < before and lease not in self._ledger):  # its router was silent for too long
            return
        if not after:
            self._ledger.end(lease)
        elif before:
            self._ledger.resize(lease, [after], growth=growth)
        else:
            self._ledger.reserve(lease, Kind.SHARE, router, [Hold(pool, after)], growth=growth)

    def _leased(self, pool: str, router: str) -> int:
        lease = _lease(pool, router)
        return self._ledger.lease(lease).amount if lease in self._ledger else 0

    def _forget(self, pool: str, router: str) -> None:
        if _lease(pool, router) in self._ledger:
            self._ledger.end(_lease(pool, router))


def _lease(pool: str, router: str) -> str:
    return f"{pool}@{router}"
