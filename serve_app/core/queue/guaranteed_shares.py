"""Which tenants use less than their guaranteed share of the replicas.

A tenant is below its share while it uses less than that part of all slots and, if KV tokens are bounded, also less than
that part of all KV tokens: the resource that it uses most counts. Other tenants may use an idle share. Once the tenant
waits, it is first in its class for freed slots until it has its share, so it gets it as soon as that much comes free:
within 2 s if answers take less. No running request is stopped for it.

Invariant: a tenant without running requests takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from serve_app.core.queue.policy import TenantPolicy


class GuaranteedShares:
    """Slots and KV tokens in use by tenant. O(1) per method, `set_shares` O(tenants)."""

    def __init__(self, tenants: Mapping[str, TenantPolicy]) -> None:
        self._shares: dict[str, float] = {}
        self._used: dict[str, tuple[int, int]] = {}  # slots and tokens
        self.set_shares(tenants)

    def set_shares(self, tenants: Mapping[str, TenantPolicy]) -> None:
        self._shares = {name: tenant.share for name, tenant in tenants.items() if tenant.share > 0}

    def add_use(self, tenant: str, slots: int, tokens: int) -> None:
        """Add slots and tokens to a tenant's use; negative: release them."""
        had_slots, had_tokens = self._used.get(tenant, (0, 0))
        self._used[tenant] = had_slots + slots, had_tokens + tokens
        if self._used[tenant] == (0, 0):
            del self._used[tenant]

    def has_share(self, tenant: str) -> bool:
        """Whether a share is guaranteed to a tenant."""
        return tenant in self._shares

    def in_use(self, tenant: str) -> tuple[int, int]:
        """Slots and tokens that a tenant uses."""
        return self._used.get(tenant, (0, 0))

    def is_below_share(self, tenant: str, slots: int, kv_tokens: float) -> bool:
        """Whether a tenant uses less than its share; `slots` and `kv_tokens` are those of all replicas."""
        share = self._shares.get(tenant)
        if share is None:
            return False
        used_slots, used_tokens = self._used.get(tenant, (0, 0))
        return used_slots < share * slots and (math.isinf(kv_tokens) or used_tokens < share * kv_tokens)

    def tenants(self) -> Iterator[str]:
        """Tenants with a guaranteed share or with running requests."""
        return iter(self._shares.keys() | self._used.keys())

    def tenants_with_share(self) -> Iterator[str]:
        """Tenants with a guaranteed share."""
        return iter(self._shares)
