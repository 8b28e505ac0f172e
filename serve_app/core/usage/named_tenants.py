"""Which tenants have a label of their own in the metrics: those of most use. All others are `OTHER`. Pure.

Rules
- Use fades: it counts half after `HALF_LIFE_S`.
- While there are no more tenants than names, each gets its name at its first request.
- Else names are given when they are chosen: first the free ones, to those of most use. Then a tenant takes the name of
  the one with the least use, if it has used more than `SWAP_FACTOR` times as much.
- What was counted under a label stays there. A tenant that has lost its name is counted as `OTHER` from then on, and
  where it was before if it gets its name again.

Invariant: at most `limit` tenants have a name, and at most `MAX_NAMES` times as many ever had one: after that only
these take turns, so that the number of series is bounded for as long as the process runs.
"""

from __future__ import annotations

OTHER = "other"
HALF_LIFE_S = 3600.0  # a burst of some minutes takes nobody's name
SWAP_FACTOR = 2.0  # of two tenants of equal use neither takes the other's name
MAX_NAMES = 2
FORGET_USE = 0.001  # less than this of a token is no use: its tenant is forgotten


class NamedTenants:
    """The names of one router.

    Args:
        limit: how many tenants have a name. known: how many tenants there are.
    """

    def __init__(self, limit: int, known: int = 0) -> None:
        self.limit = limit
        self.known = known
        self.named: set[str] = set()
        self.ever_named: set[str] = set()
        self._uses: dict[str, float] = {}
        self._faded_at: float | None = None

    def label(self, tenant: str) -> str:
        """The label that counts for a tenant now."""
        if tenant in self.named:
            return tenant
        if self.known <= self.limit and len(self.named) < self.limit and self._may_have_name(tenant):
            self._name(tenant)
            return tenant
        return OTHER

    def add(self, tenant: str, tokens: float) -> None:
        """A tenant has used tokens."""
        self._uses[tenant] = self._uses.get(tenant, 0.0) + tokens

    def choose(self, now: float) -> None:
        """Choose the names anew. O(tenants * log tenants)."""
        self._fade(now)
        while len(self.named) > self.limit:
            self.named.remove(self._lightest())
        unnamed = ((use, tenant) for tenant, use in self._uses.items() if tenant not in self.named)
        for use, tenant in sorted(unnamed, reverse=True) if self.limit else ():
            if not self._may_have_name(tenant):
                continue
            if len(self.named) == self.limit:
                lightest = self._lightest()
                if use <= SWAP_FACTOR * self._uses.get(lightest, 0.0):
                    return
                self.named.remove(lightest)
            self._name(tenant)

    def _fade(self, now: float) -> None:
        part = 1.0 if self._faded_at is None else 0.5 ** ((now - self._faded_at) / HALF_LIFE_S)
        self._faded_at = now
        self._uses = {tenant: left for tenant, use in self._uses.items() if (left := use * part) >= FORGET_USE}

    def _lightest(self) -> str:
        return min(self.named, key=lambda tenant: (self._uses.get(tenant, 0.0), tenant))

    def _may_have_name(self, tenant: str) -> bool:
        return tenant in self.ever_named or len(self.ever_named) < MAX_NAMES * self.limit

    def _name(self, tenant: str) -> None:
        self.named.add(tenant)
        self.ever_named.add(tenant)
