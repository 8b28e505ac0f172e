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
    has = held.get(tenant, 0)
    by_bound = max(0, _whole(max_share * total) - has)
    others = {name: share for name, share in shares.items() if name != tenant}
    guaranteed = sum(max(0.0, share * total - held.get(name, 0)) for name, share in others.items())
    by_shares = max(0, _whole(total - sum(held.values()) - guaranteed))
    if guaranteed and by_shares < by_bound:
        return SessionRoom(by_shares, "the rest of the model's KV tokens is guaranteed to other tenants")
    return SessionRoom(by_bound, f"sessions of one tenant may hold {max_share:g} of the model's KV tokens")


def _whole(tokens: float) -> int:
    return int(tokens + 1e-6)  # a sum of shares may be a rounding error away from a whole number
