"""How routers divide an engine's KV pool: each has a share from which it admits without asking anyone.

Both sides say what is, not what has happened. A router tells its `limit` (what it will not go beyond), what it uses and
what it wants besides; it is told a target and the target's version. So a message that is lost, repeated or late needs
no repair: the next one says everything again.

Rules
- Up: the ledger is charged first, then the router is told. Down: the router is told first, goes down to what it uses,
  and the ledger follows when it reports a lower limit under that very version.
- A share has some room above what is used and wanted, and gives back what is far above that.
- A session is a pool, too, with nothing to spare: a router has what its requests of that session need, and gives it
  back when they end, since the next one may come through another router.
- Where a pool is short, nobody keeps or gets more than an equal part while another wants, nor keeps what it does not
  use; what is in use stays until it ends.

Invariant: what the ledger holds for a router is never less than the limit that router goes by, while it is heard of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from serve_app.core.memory.leases import Hold, Kind
from serve_app.core.memory.ledger import Ledger

SPARE_PARTS = 16  # of a pool: room above what is used, so that an ordinary arrival finds its budget without a question
GIVE_BACK_AT = 2  # times what is used and spare: below that, giving back and asking again would take turns


class PoolReport(NamedTuple):
    """What a router says of one engine's pool. KV tokens. A tuple: there are tens of thousands of them a second.

    Args:
        pool: the engine's lease.
        version: of the last target it was told; 0: none.
        limit: what it will not go beyond until it is told another target; never below `used`.
        used: what its requests hold now.
        want: what it could use beside that at once.
    """

    pool: str
    version: int
    limit: int
    used: int
    want: int


class PoolTarget(NamedTuple):
    """What a router may use of one engine's pool, in KV tokens."""

    pool: str
    version: int
    target: int


@dataclass(slots=True)
class _Share:
    target: int
    version: int
    used: int = 0
    want: int = 0

    @property
    def need(self) -> int:
        return self.used + self.want

    def aim(self, target: int) -> None:
        self.target = target
        self.version += 1


class Shares:
    """The shares of all routers in all pools. O(routers of a pool) where a pool is short, else O(log n)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pools: dict[str, dict[str, _Share]] = {}
        self._closed: set[str] = set()  # pools in which somebody else waits
        self.overdrawn_tokens = 0  # counter: what routers went by after it had been given to others

    def report(self, router: str, told: PoolReport, *, frozen: bool = False) -> tuple[PoolTarget, list[str]]:
        """A router's word on a pool; returns its target, and the other routers that should know: their targets have
        changed, or they want what this one has given back.

        Args:
            frozen: nothing is to be given that is not held already (while it is not known what others hold).

        Raises:
            LeaseNotFound, LeaseConflict: the pool is no engine that runs, or the router has not joined.
            ValueError: negative figures, or a limit below what is used.
        """
        name = told.pool
        if told.version < 0 or told.used < 0 or told.want < 0 or told.limit < told.used:
            raise ValueError(f"pool {name!r}: {told.used} used of a limit of {told.limit}, {told.want} wanted")
        share = self._pools.get(name, {}).get(router)
        if share is None:
            self._ledger.free(name)  # raises for a pool that is not
            share = self._pools.setdefault(name, {})[router] = _Share(told.limit, told.version)
        share.used, share.want = told.used, told.want
        held = self._held(router, name)
        if told.version > share.version:  # it has forgotten nothing, so we have: of before it was silent for too long
            share.target, share.version = told.limit, told.version
        if told.version == share.version:
            self._confirmed(router, share, told)
        others: list[str] = []
        if not frozen:
            others = self._balance(router, name, share)
        if self._held(router, name) < held:
            others += [other for other in self._short(name) if other != router]
        return PoolTarget(name, share.version, share.target), others

    def leave(self, router: str) -> None:
        """A router is gone; the ledger has ended its leases."""
        for name in [name for name, shares in self._pools.items() if router in shares]:
            del self._pools[name][router]
            if not self._pools[name]:
                del self._pools[name]

    def drop(self, pool: str) -> list[str]:
        """An engine is gone; returns the routers that had a share."""
        self._closed.discard(pool)
        return list(self._pools.pop(pool, {}))

    def recall(self, pool: str) -> list[str]:
        """Somebody else waits for tokens of this pool: nobody keeps what it does not use. Returns whose target fell."""
        changed = []
        for router, share in self._pools.get(pool, {}).items():
            if share.target > share.used:
                share.aim(share.used)
                changed.append(router)
        self._closed.add(pool)
        return changed

    def reopen(self, pool: str) -> list[str]:
        """Nobody else waits any more. Returns the routers that may want more than they have."""
        self._closed.discard(pool)
        return self._short(pool)

    @property
    def closed(self) -> frozenset[str]:
        """Pools in which somebody else waits."""
        return frozenset(self._closed)

    def targets(self, router: str) -> list[PoolTarget]:
        """What a router may use now."""
        found = ((name, shares.get(router)) for name, shares in self._pools.items())
        return [PoolTarget(name, share.version, share.target) for name, share in found if share is not None]

    def used(self, pool: str) -> int:
        """What requests hold in a pool by the last word of each router, sessions apart."""
        return sum(share.used for share in self._pools.get(pool, {}).values())

    def _short(self, pool: str) -> list[str]:
        return [router for router, share in self._pools.get(pool, {}).items() if share.need > share.target]

    def _confirmed(self, router: str, share: _Share, told: PoolReport) -> None:
        """The router goes by the last target it was told. It may have lost its share meanwhile, by silence or because
        we are new; what is not free any more it has to give up."""
        held = self._hold(router, told.pool, max(told.limit, share.target))
        if held < told.limit:
            self.overdrawn_tokens += told.limit - held
        if held < max(told.limit, share.target):
            share.aim(held)

    def _hold(self, router: str, pool: str, tokens: int) -> int:
        """Bring the ledger's share to this many tokens, or as near as the pool allows; returns what it holds then."""
        lease, held = _lease(pool, router), self._held(router, pool)
        tokens = min(tokens, held + self._ledger.free(pool, growth=True))
        if not tokens and held:
            self._ledger.end(lease)
        elif held and tokens != held:
            self._ledger.resize(lease, [tokens], growth=True)
        elif tokens != held:
            self._ledger.reserve(lease, Kind.SHARE, router, [Hold(pool, tokens)], growth=True)
        return tokens

    def _held(self, router: str, pool: str) -> int:
        return self._ledger.amount(_lease(pool, router))

    def _balance(self, router: str, pool: str, share: _Share) -> list[str]:
        of_session = self._ledger.kind(pool) is Kind.SESSION
        spare = 0 if of_session else max(1, self._ledger.limit(pool) // SPARE_PARTS)
        if share.need <= share.target:
            if share.target > GIVE_BACK_AT * (share.need + spare):
                share.aim(share.need + spare)
            return []
        if pool in self._closed:
            return []
        held = self._held(router, pool)
        wanted = min(held + self._ledger.free(pool), share.need + spare)
        if any(other is not share and other.need > other.target for other in self._pools[pool].values()):
            wanted = min(wanted, max(self._part(pool), share.used))  # else who asks oftenest had it all
        if wanted > share.target:
            self._hold(router, pool, max(held, wanted))
            share.aim(wanted)
        return self._call_back(router, pool) if share.target < share.need else []

    def _call_back(self, router: str, pool: str) -> list[str]:
        """The pool is short: the others go down to what they need, and to an equal part where they need more."""
        shares = self._pools[pool]
        part = self._part(pool)
        changed = []
        for other, share in shares.items():
            keep = min(part, share.need)
            if other != router and share.target > keep:
                share.aim(keep)
                changed.append(other)
        return changed

    def _part(self, pool: str) -> int:
        """What each router may have of a pool that is short: the same for all, and what one does not need of it is the
        others'."""
        shares = self._pools[pool]
        left = self._ledger.free(pool) + sum(self._held(router, pool) for router in shares)
        needs = sorted(share.need for share in shares.values())
        for index, need in enumerate(needs):
            part = left // (len(needs) - index)
            if need > part:
                return part
            left -= need
        return needs[-1] + left


def _lease(pool: str, router: str) -> str:
    return f"{pool}#{router}"
