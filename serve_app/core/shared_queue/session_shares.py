"""How many KV tokens of a model the agent sessions of a tenant may hold.

Rules
- At most a part of all KV tokens of the model: else one tenant's sessions would be the model.
- What is guaranteed to a tenant (`TenantPolicy.share`) is lent to no other tenant's session: an agent may renew it for
  ever, and a guaranteed share has to come back in seconds. A tenant's sessions count as its own share first; what they
  hold beyond it is of the part that is guaranteed to nobody.

Invariant: sessions opened within the rooms leave each tenant its guaranteed share, less what its own sessions hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class SessionRoom(NamedTuple):
    """KV tokens that a tenant may still have in sessions of a model, and the rule that bounds them."""

    tokens: int
    why: str


def session_room(
    tenant: str, held: Mapping[str, int], shares: Mapping[str, float], total: int, max_share: float
) -> SessionRoom:
    """The room of a tenant. O(tenants with sessions or shares).

    Args:
        held: KV tokens that open sessions hold, by tenant.
        shares: the guaranteed parts of the model, by tenant.
        total: the KV tokens of the model.
        max_share: the part of them that sessions of one tenant may hold.
    """
    own, has = shares.get(tenant, 0.0) * total, held.get(tenant, 0)
    by_bound = _whole(max_share * total) - has
    beyond_shares = sum(max(0.0, tokens - shares.get(name, 0.0) * total) for name, tokens in held.items())
    by_shares = _whole((1.0 - sum(shares.values())) * total - beyond_shares + max(0.0, own - has))
    if by_bound <= by_shares:
        return SessionRoom(max(0, by_bound), f"sessions of one tenant may hold {max_share:g} of the model's KV tokens")
    return SessionRoom(max(0, by_shares), "the rest of the model's KV tokens is guaranteed to other tenants")


def _whole(tokens: float) -> int:
    return int(tokens + 1e-6)  # a sum of shares may be a rounding error away from a whole number
