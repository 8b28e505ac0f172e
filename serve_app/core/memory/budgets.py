"""What a router may use of the engines' KV pools, and what its requests hold of it; other end: `core.memory.shares`.

Rules
- The limit rises only by a target newer than all seen before, of the newest epoch heard of.
- What was granted is good for `FENCE_S` after the report it was an answer to was sent: a router that is not heard of
  loses its shares to others, so one that hears nothing stops giving before that. What runs goes on.

Invariant: requests never begin on tokens that the quota actor does not keep for this router.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.memory.grants import OWNER_TTL_S
from serve_app.core.memory.shares import PoolReport, PoolTarget

FENCE_S = OWNER_TTL_S - 0.5  # half a second for the report's way to the actor and for clocks that run unlike


@dataclass(slots=True)
class _Pool:
    target: int = 0
    version: int = 0
    used: int = 0
    told_limit: int = 0

    @property
    def limit(self) -> int:
        return max(self.target, self.used)


class Budgets:
    """Pools by name, and the KV tokens of requests in them. Every method is O(1), `drop` per request of the pool.

    Moments are seconds of the host's monotonic clock.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._held: dict[str, tuple[str, int]] = {}
        self._good_until = -math.inf
        self.epoch = 0  # of the quota actor last heard of

    def on_epoch(self, epoch: int) -> bool:
        """The quota actor is of this epoch; False: it is an older one, whose words count no more."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True

    def on_targets(self, targets: tuple[PoolTarget, ...], epoch: int, sent_at: float) -> bool:
        """The answer to the report sent at that moment; False: of an older epoch, and nothing has changed."""
        if epoch != self.epoch:
            return False
        self._good_until = max(self._good_until, sent_at + FENCE_S)
        for target in targets:
            pool = self._pools.get(target.pool)
            if pool is not None and target.version > pool.version:
                pool.target, pool.version = target.target, target.version
        return True

    def open(self, name: str) -> None:
        """An engine is there; nothing can be held on it before its first target. Again changes nothing."""
        self._pools.setdefault(name, _Pool())

    def drop(self, name: str) -> None:
        """An engine is gone with all that its requests held; unknown ones change nothing."""
        if self._pools.pop(name, None) is not None:
            for request_id in [one for one, (pool, _) in self._held.items() if pool == name]:
                del self._held[request_id]

    def fits(self, name: str, tokens: int, now: float) -> bool:
        """Whether a request of this size can start on the engine now."""
        pool = self._pools.get(name)
        return pool is not None and now < self._good_until and pool.used + tokens <= pool.target

    def hold(self, request_id: str, name: str, tokens: int, now: float) -> bool:
        """Give a request its budget; False: it does not fit now, and nothing has changed.

        Raises:
            ValueError: it has one already, or asks for less than one token.
        """
        if request_id in self._held or tokens < 1:
            raise ValueError(f"{request_id!r}: {tokens} tokens asked, {self.held(request_id)} held")
        if not self.fits(name, tokens, now):
            return False
        self._pools[name].used += tokens
        self._held[request_id] = (name, tokens)
        return True

    def grow(self, request_id: str, tokens: int, now: float) -> bool:
        """Give a request more; False: it does not fit now, or holds nothing (any more), and nothing has changed."""
        name, held = self._held.get(request_id, ("", 0))
        if not held or not self.fits(name, tokens, now):
            return False
        self._pools[name].used += tokens
        self._held[request_id] = (name, held + tokens)
        return True

    def release(self, request_id: str) -> int:
        """A request has ended; returns what it held, 0 of an unknown one."""
        name, tokens = self._held.pop(request_id, ("", 0))
        if tokens:
            self._pools[name].used -= tokens
        return tokens

    def held(self, request_id: str) -> int:
        """KV tokens of a request; 0 of an unknown one."""
        return self._held.get(request_id, ("", 0))[1]

    def used(self, name: str) -> int:
        """KV tokens of all requests on a pool; 0 of an unknown one."""
        pool = self._pools.get(name)
        return 0 if pool is None else pool.used

    def limit(self, name: str) -> int:
        """What it goes by in a pool, in use or not; 0 of an unknown one."""
        pool = self._pools.get(name)
        return 0 if pool is None else pool.limit

    def pool_of(self, request_id: str) -> str | None:
        """Where a request holds tokens; None: nowhere."""
        return self._held.get(request_id, (None, 0))[0]

    def gives_back(self, name: str) -> bool:
        """Whether the limit has come down since it was last told, so that somebody else can have the rest."""
        pool = self._pools.get(name)
        return pool is not None and pool.limit < pool.told_limit

    def report(self, name: str, want: int) -> PoolReport:
        """What is to be said of a pool, now. Raises KeyError for an unknown one."""
        pool = self._pools[name]
        pool.told_limit = pool.limit
        return PoolReport(name, pool.version, pool.limit, pool.used, want)

    def pools(self) -> list[str]:
        return list(self._pools)
