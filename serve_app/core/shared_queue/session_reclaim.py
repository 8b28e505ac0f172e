"""Which agent sessions are taken back: idle ones of tenants that hold more than their part while others wait.

Rules
- Only while requests or openings of other tenants wait for KV tokens of the model, and no more than these need.
- A tenant's part is that of its weight among the tenants that hold sessions or wait; at least its guaranteed share, and
  no more than the guaranteed shares of the others leave. No session of a tenant within its part is taken back.
- A session gets notice first (`NOTICE_S`), which its own state says. The notice ends when nobody else waits any more.
  Renewals do not end it; a session with a running request is taken back once that has ended.
- The tenant that is furthest beyond its part gives first, and of its sessions the one that was not used or renewed for
  longest. One that is larger than what the tenant has beyond its part is only taken back if sessions leave the others
  less than half of theirs.

Invariant: only sessions under notice are taken back, and only idle ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.core.memory import SessionEntry, SessionLeases
from serve_app.core.queue import QueuePolicy

# Longer than most peaks of load; a request that waits for it still starts well within the usual longest wait of 60 s.
NOTICE_S = 10.0


class SessionReclaim:
    """The notices. O(sessions) while something waits for KV tokens, else O(1).

    Args:
        sessions: has the notices, so that a session's state says them.
    """

    def __init__(self, sessions: SessionLeases) -> None:
        self._sessions = sessions

    def due(self, model: str, total: int, demand: Mapping[str, int], policy: QueuePolicy, now: float) -> list[str]:
        """Give and withdraw notices; returns the sessions whose notice is over and that are idle.

        Args:
            total: the KV tokens of the model.
            demand: KV tokens that requests and openings wait for, by tenant; empty: nothing waits for KV tokens.
            policy: weights and guaranteed shares.
        """
        sessions = self._sessions
        if not demand and not sessions.notices:
            return []
        chosen = self._chosen(model, total, demand, policy)
        names = {one.lease for one in sessions.by_session_id.values() if one.request.model == model}
        for lease in (names & sessions.notices.keys()) - {one.lease for one in chosen}:
            del sessions.notices[lease]
        for one in chosen:
            sessions.notices.setdefault(one.lease, now + NOTICE_S)
        over = [one for one in chosen if sessions.notices[one.lease] <= now and not sessions.in_use(one.lease)]
        return [one.request.session_id for one in over]

    def _chosen(self, model: str, total: int, demand: Mapping[str, int], policy: QueuePolicy) -> list[SessionEntry]:
        """The sessions that are under notice from now on."""
        held: Mapping[str, int] = self._sessions.held_by_tenant.get(model, {})
        wanted, chosen = sum(demand.values()), list[SessionEntry]()
        if not wanted or not held:
            return []
        parts = {tenant: part_of(tenant, held.keys() | demand.keys(), policy) for tenant in held}
        beyond = {tenant: tokens - parts[tenant] * total for tenant, tokens in held.items()}
        free = total - sum(held.values())
        for tenant in sorted(beyond, key=lambda name: (-beyond[name], name)):
            left, needed = beyond[tenant], wanted - demand.get(tenant, 0)
            for one in self._in_order(model, tenant):
                tokens = one.request.tokens
                crowded = left > 0 and free < (1.0 - parts[tenant]) * total / 2
                if needed > 0 and (tokens <= left or crowded):
                    chosen.append(one)
                    left, needed, wanted, free = left - tokens, needed - tokens, wanted - tokens, free + tokens
        return chosen

    def _in_order(self, model: str, tenant: str) -> list[SessionEntry]:
        """A tenant's sessions that may be taken back: those under notice, then the idle ones, least recently used."""
        sessions = self._sessions
        mine = [
            one
            for one in sessions.by_session_id.values()
            if one.request.model == model
            and one.request.tenant == tenant
            and (one.lease in sessions.notices or not sessions.in_use(one.lease))
        ]
        return sorted(mine, key=lambda one: (one.lease not in sessions.notices, sessions.used_at(one.lease)))


def part_of(tenant: str, tenants: set[str], policy: QueuePolicy) -> float:
    """The part of a model that sessions of a tenant may hold while requests of the others wait."""
    shares = {name: rights.share for name, rights in policy.tenants.items() if name in tenants}
    fair = policy.weight(tenant) / sum(map(policy.weight, tenants))
    left = 1.0 - sum(share for name, share in shares.items() if name != tenant)
    return max(shares.get(tenant, 0.0), min(fair, left))
