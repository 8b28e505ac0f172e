"""Which agent sessions are taken back: those of tenants that hold more than their part while others wait.

Rules
- Only while requests or openings of other tenants wait for KV tokens of the model, of the session's class or above; and
  no more than these need.
- A tenant's part is that of its weight among the tenants that hold sessions or so wait; at least its guaranteed share,
  and no more than the guaranteed shares of the others leave. No session of a tenant within its part is taken back.
- A session gets notice first (`NOTICE_S`), which its own state says. The notice ends when nobody else waits any more.
  Neither renewals nor requests end it. A request that then runs keeps what it holds until it ends.
- Sessions of lower classes give first. Among those of a class, the tenant that is furthest beyond its part gives first,
  and of its sessions the idle ones, then the one that was not used or renewed for longest. One that is larger than what
  the tenant has beyond its part is only taken back if sessions leave the others less than half of theirs.

Invariant: only sessions under notice are taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Set

from serve_app.core.memory import SessionEntry, SessionLeases
from serve_app.core.queue import QueuePolicy
from serve_app.types import RequestClass

# Longer than most peaks of load; a request that waits for it still starts well within the usual longest wait of 60 s.
NOTICE_S = 10.0

Demand = Mapping[RequestClass, Mapping[str, int]]  # KV tokens that are waited for, by class and tenant


class SessionReclaim:
    """The notices. O(sessions) while something waits for KV tokens, else O(1).

    Args:
        sessions: has the notices, so that a session's state says them.
        used: returns the leases of sessions with a request that waits or runs.
    """

    def __init__(self, sessions: SessionLeases, used: Callable[[], Container[str]]) -> None:
        self._sessions = sessions
        self._used = used

    def due(self, model: str, total: int, demand: Demand, policy: QueuePolicy, now: float) -> list[str]:
        """Give and withdraw notices; returns the sessions whose notice is over.

        Args:
            total: the KV tokens of the model.
            demand: what requests and openings wait for; empty: nothing waits for KV tokens.
            policy: weights and guaranteed shares.
        """
        sessions = self._sessions
        if not demand and not sessions.notices:
            return []
        chosen = self._chosen(model, total, demand, policy)
        names = {one.lease for one in sessions.by_session_id.values() if one.request.model == model}
        for lease in (names & sessions.notices.keys()) - {one.lease for one in chosen}:
            del sessions.notices[lease]
        for entry in chosen:
            sessions.notices.setdefault(entry.lease, now + NOTICE_S)
        return [one.request.session_id for one in chosen if sessions.notices[one.lease] <= now]

    def _chosen(self, model: str, total: int, demand: Demand, policy: QueuePolicy) -> list[SessionEntry]:
        """The sessions that are under notice from now on."""
        held: Mapping[str, int] = self._sessions.held_by_tenant.get(model, {})
        # the tokens of these, by tenant
        chosen = list[SessionEntry]()
        given = Counter[str]()
        free = total - sum(held.values())  # with what these give
        beside_sessions = free
        for level in RequestClass:
            waits = Counter[str]()
            for above in [one for one in demand if one >= level]:
                waits.update(demand[above])
            if not waits:
                continue
            by_tenant = self._in_order(model, level)
            parts = parts_of(held.keys() | waits.keys(), policy)
            wanted = waits.total() - (free - beside_sessions)
            left = {tenant: tokens - parts[tenant] * total - given[tenant] for tenant, tokens in held.items()}
            for tenant in sorted(by_tenant, key=lambda name: (-left[name], name)):
                for entry in by_tenant[tenant]:
                    tokens = entry.request.tokens
                    crowded = left[tenant] > 0 and free < (1.0 - parts[tenant]) * total / 2
                    if wanted > waits[tenant] and (tokens <= left[tenant] or crowded):
                        chosen.append(entry)
                        given[tenant] += tokens
                        left[tenant], wanted, free = left[tenant] - tokens, wanted - tokens, free + tokens
        return chosen

    def _in_order(self, model: str, level: RequestClass) -> dict[str, list[SessionEntry]]:
        """The sessions of a class, by tenant: those under notice, then idle ones, then the least recently used."""
        sessions = self._sessions
        found = dict[str, list[SessionEntry]]()
        for entry in sessions.by_session_id.values():
            if entry.request.model == model and entry.request.request_class == level:
                found.setdefault(entry.request.tenant, []).append(entry)
        for entries in found.values():
            entries.sort(key=self._order)
        return found

    def _order(self, entry: SessionEntry) -> tuple[bool, bool, float]:
        sessions = self._sessions
        is_used = sessions.in_use(entry.lease) or entry.lease in self._used()
        return entry.lease not in sessions.notices, is_used, sessions.used_at(entry.lease)


def parts_of(tenants: Set[str], policy: QueuePolicy) -> dict[str, float]:
    """The part of a model that sessions of each tenant may hold while requests of the others wait. O(tenants)."""
    weights = {tenant: policy.weight(tenant) for tenant in tenants}
    shares = {name: rights.share for name, rights in policy.tenants.items() if name in tenants}
    all_weights = sum(weights.values())
    all_shares = sum(shares.values())
    found = dict[str, float]()
    for tenant, weight in weights.items():
        share = shares.get(tenant, 0.0)
        left_by_others = 1.0 - (all_shares - share)
        found[tenant] = max(share, min(weight / all_weights, left_by_others))
    return found
