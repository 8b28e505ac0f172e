"""The waiting requests of one class that may be evicted from a full queue, in eviction order (`.eviction` decides).

The tenant with most requests or tokens for its weight comes first, its youngest request first. A request that was
granted before ("accepted") is never evicted.

Invariant: every waiting request that is not accepted is here exactly once; a tenant's key in the heaps is never above
its true key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.tenant_queue import QueuedRequest

REQUESTS, TOKENS = "requests", "tokens"


@dataclass(frozen=True, slots=True)
class Excess:
    """Requests and tokens by which a bound is exceeded, none below zero."""

    requests: int = 0
    tokens: int = 0

    def __bool__(self) -> bool:
        return self.requests > 0 or self.tokens > 0

    def minus(self, requests: int, tokens: int) -> Excess:
        return Excess(max(0, self.requests - requests), max(0, self.tokens - tokens))

    def larger_of(self, other: Excess) -> Excess:
        """The excess that covers both, field by field."""
        return Excess(max(self.requests, other.requests), max(self.tokens, other.tokens))


@dataclass(slots=True, eq=False)
class _TenantRequests:
    weight: float
    requests: OrderedDict[str, QueuedRequest] = field(default_factory=OrderedDict)
    tokens: int = 0


class EvictableRequests:
    """The evictable requests of one class, by tenant. O(log n), but O(tenants) at the first excess of each kind."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self._tenants: dict[str, _TenantRequests] = {}
        # Tenants by requests, or tokens, divided by weight; a heap is built when its bound is first exceeded.
        self._heaps: dict[str, KeyedHeap] = {}

    def add(self, waiting: QueuedRequest, weight: float) -> None:
        if waiting.arrival.accepted:
            return
        self.requests += 1
        self.tokens += waiting.cost
        tenant = waiting.arrival.tenant
        holding = self._tenants.get(tenant)
        if holding is None:
            holding = self._tenants[tenant] = _TenantRequests(weight)
        holding.requests[waiting.request_id] = waiting
        holding.tokens += waiting.cost
        self._update_heaps(tenant, holding)

    def remove(self, waiting: QueuedRequest) -> None:
        if waiting.arrival.accepted:
            return
        self.requests -= 1
        self.tokens -= waiting.cost
        tenant = waiting.arrival.tenant
        holding = self._tenants[tenant]
        del holding.requests[waiting.request_id]
        holding.tokens -= waiting.cost
        if holding.requests:
            return  # the tenant's true key has risen: `heaviest_tenant` updates it when it is at the top
        del self._tenants[tenant]
        for heap in self._heaps.values():
            heap.discard(tenant)

    def heaviest_tenant(self, excess: Excess) -> str | None:
        """The tenant with most requests (if these exceed a bound, else tokens) for its weight."""
        short = REQUESTS if excess.requests else TOKENS
        if short not in self._heaps:
            self._heaps[short] = KeyedHeap()
            for tenant, holding in self._tenants.items():
                self._update_heaps(tenant, holding)
        heap = self._heaps[short]
        while (top := heap.peek()) is not None:
            key, tenant = top
            self._update_heaps(tenant, self._tenants[tenant])
            if heap.peek() == (key, tenant):
                return tenant
        return None

    def youngest_request(self, tenant: str) -> QueuedRequest:
        """The latest request of a tenant that has one here."""
        return next(reversed(self._tenants[tenant].requests.values()))

    def can_evict(self, tenant: str, excess: Excess, newcomer_tenant: str) -> bool:
        """Whether a tenant, after evicting this excess, still has as much for its weight as the newcomer's tenant."""
        giver, taker = self._tenants[tenant], self._tenants[newcomer_tenant]
        return giver is not taker and all(
            left / giver.weight >= has / taker.weight
            for short, left, has in (
                (excess.requests, len(giver.requests) - excess.requests, len(taker.requests)),
                (excess.tokens, giver.tokens - excess.tokens, taker.tokens),
            )
            if short
        )

    def set_weights(self, weight: Callable[[str], float]) -> None:
        """Replace all weights. O(tenants)."""
        for tenant, holding in self._tenants.items():
            holding.weight = weight(tenant)
            self._update_heaps(tenant, holding)

    def _update_heaps(self, tenant: str, tenant_requests: _TenantRequests) -> None:
        for short, heap in self._heaps.items():
            has = len(tenant_requests.requests) if short is REQUESTS else tenant_requests.tokens
            heap.set(tenant, (-has / tenant_requests.weight,))
