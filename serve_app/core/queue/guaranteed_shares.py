"""Whether each tenant has the part of the replicas that is guaranteed to it.

A tenant is below its share while it runs less than that part of all slots and, where KV tokens are bounded, less than
that part of all tokens, too: what it uses most of counts. What is not used is anybody's; once the tenant waits, what
comes free is its own until it has its share, so it has it as soon as that much has come free: within 2 s where answers
take less. Nothing that runs is stopped for it.

Invariant: a tenant without running requests takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from serve_app.core.queue.policy import TenantPolicy


class Guarantees:
    """What tenants run. O(1) per method, `changed` O(tenants with a share)."""

    def __init__(self, tenants: Mapping[str, TenantPolicy]) -> None:
        self._shares: dict[str, float] = {}
        self._used: dict[str, tuple[int, int]] = {}  # slots and tokens
        self.set_shares(tenants)

    def set_shares(self, tenants: Mapping[str, TenantPolicy]) -> None:
        self._shares = {name: tenant.share for name, tenant in tenants.items() if tenant.share > 0}

    def use(self, tenant: str, slots: int, tokens: int) -> None:
        """A tenant runs more, or, negative, less."""
        had_slots, had_tokens = self._used.get(tenant, (0, 0))
        self._used[tenant] = had_slots + slots, had_tokens + tokens
        if self._used[tenant] == (0, 0):
            del self._used[tenant]

    def has(self, tenant: str) -> bool:
        """Whether a tenant has a share at all."""
        return tenant in self._shares

    def used(self, tenant: str) -> tuple[int, int]:
        """Slots and tokens."""
        return self._used.get(tenant, (0, 0))

    def below(self, tenant: str, slots: int, kv_tokens: float) -> bool:
        """Whether a tenant has less than its share of this many slots and tokens in all."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        used_slots, used_tokens = self._used.get(tenant, (0, 0))
        return used_slots < share * slots and (math.isinf(kv_tokens) or used_tokens < share * kv_tokens)

    def tenants(self) -> Iterator[str]:
        """Those who have a share, and those who run something."""
        return iter(self._shares.keys() | self._used.keys())

    def shares(self) -> Iterator[str]:
        """Those who have a share."""
        return iter(self._shares)
