"""Pools: the slots and KV tokens of an engine or of a session that requests use, by account.

A router has an account in each pool that it uses: what its requests hold, plus its credit. A queue charges what it
grants to the account of the request's router: the grant is the charge. The KV tokens of an engine are shared by its
pool and by the sessions on it, whose leases the ledger has; a session has a pool of its own.

Invariant: no charge brings the accounts of a pool and the leases on its engine above its slots and KV tokens.
`used_slots` and `used_tokens` are the sums of the accounts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.errors import InsufficientMemory

UNBOUNDED = 2**62  # KV tokens of a pool whose tokens are not counted


@dataclass(slots=True)
class TokenSpace:
    """KV tokens of an engine or a session, or bytes of a device.

    Args:
        capacity: all of it.
        limit: the part that can be reserved; the rest is the growth reserve.
        held: by leases on it.
        pool: of requests; None: a device, or an engine that does not run.
    """

    capacity: int = 0
    limit: int = 0
    held: int = 0
    pool: RequestPool | None = None

    @property
    def used(self) -> int:
        """What the leases on it and the requests in its pool have of it."""
        return self.held if self.pool is None else self.held + self.pool.used_tokens

    def hold(self, amount: int) -> None:
        """Leases on it hold this much more; negative: less."""
        self.held += amount
        if self.pool is not None:
            self.pool.tell_change()

    def free(self, *, growth: bool = False) -> int:
        """What is free, with or without the growth reserve."""
        return max(0, (self.capacity if growth else self.limit) - self.used)


@dataclass(slots=True)
class Account:
    """What one holder may use of a pool."""

    pool: RequestPool
    slots: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Holder:
    """Who has accounts: a router from one report of all its accounts to the next.

    `is_final`: its incarnation has ended. The accounts stay as they are until the router reports them again or is
    removed (`release`): charges and returns, of requests that are still to be forgotten, change nothing.
    """

    name: str
    opened: set[tuple[str, str]] = field(default_factory=set)  # its name and the pool's, of each new account
    accounts: dict[str, Account] = field(default_factory=dict)  # by the pool's name; none is empty
    is_final: bool = False

    def give_back(self, name: str, slots: int, tokens: int) -> bool:
        """Decrease the account in a pool, to zero at least; returns whether anything was returned."""
        account = self.accounts.get(name)
        return account is not None and any(account.pool.give_back(self, slots, tokens))

    def release(self) -> list[str]:
        """Give back all accounts, for good; returns the names of their pools. O(accounts)."""
        self.is_final = True
        names = list(self.accounts)
        for name in names:
            self.leave(name)
        return names

    def leave(self, name: str) -> tuple[int, int]:
        """Give back one account, be it final; returns the slots and tokens that it had."""
        account = self.accounts.pop(name, None)
        if account is None:
            return 0, 0
        account.pool.remove(self)
        return account.slots, account.tokens


@dataclass(slots=True, eq=False)
class RequestPool:
    """What requests use of an engine or a session. O(1) per method, besides what `on_change` does.

    Args:
        name: of the engine, or the lease of the session.
        space: the KV tokens, which leases on the engine use, too; the pool is its pool from now on.
        slots: requests that may run at the same time.
        on_change: called after each change of what is used; the queue that grants from the pool follows it.
    """

    name: str
    space: TokenSpace
    slots: int
    used_slots: int = 0
    used_tokens: int = 0
    accounts: dict[Holder, Account] = field(default_factory=dict)  # none is empty
    on_change: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.space.pool = self

    def tell_change(self) -> None:
        """Call `on_change`, if somebody follows the pool."""
        if self.on_change is not None:
            self.on_change()

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - self.used_slots)

    @property
    def is_used(self) -> bool:
        """Whether an account has anything of it."""
        return self.used_slots > 0 or self.used_tokens > 0

    def set_slots(self, slots: int) -> None:
        """Set the slots; fewer than are used leave none free."""
        if slots != self.slots:
            self.slots = slots
            self.tell_change()

    def charge(self, holder: Holder, slots: int, tokens: int, *, growth: bool = False) -> None:
        """Increase an account, slots and tokens or neither. `growth`: the growth reserve may be used.

        Raises:
            InsufficientMemory: less is free.
        """
        if slots > self.free_slots:
            raise InsufficientMemory(f"{self.name}: {slots} slots asked, {self.free_slots} of {self.slots} free")
        if tokens > (free := self.space.free(growth=growth)):
            raise InsufficientMemory(f"{self.name}: {tokens} asked, {free} of {self.space.capacity} free")
        if (slots or tokens) and not holder.is_final:
            account = self.accounts.get(holder)
            if account is None:
                account = self.accounts[holder] = holder.accounts[self.name] = Account(self)
                holder.opened.add((holder.name, self.name))
            self._change(account, slots, tokens)

    def give_back(self, holder: Holder, slots: int, tokens: int) -> tuple[int, int]:
        """Decrease an account, to zero at least; returns the slots and tokens by which it was decreased."""
        account = self.accounts.get(holder)
        if account is None or holder.is_final:
            return 0, 0
        slots = min(slots, account.slots)
        tokens = min(tokens, account.tokens)
        if account.slots == slots and account.tokens == tokens:
            holder.leave(self.name)
        else:
            self._change(account, -slots, -tokens)
        return slots, tokens

    def remove(self, holder: Holder) -> None:
        """End an account."""
        account = self.accounts.pop(holder, None)
        if account is not None:
            self.used_slots -= account.slots
            self.used_tokens -= account.tokens
            self.tell_change()

    def _change(self, account: Account, slots: int, tokens: int) -> None:
        account.slots += slots
        account.tokens += tokens
        self.used_slots += slots
        self.used_tokens += tokens
        self.tell_change()
