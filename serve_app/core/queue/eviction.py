"""The waiting requests of one class that may be evicted from a full queue, in eviction order.

`core.queue.queue.RequestQueue.evict_for` decides how many are evicted, and of which class. In a class the tenant with
most requests or tokens for its weight comes first, its youngest request first. A request that was granted before, or
is a part of one that was ("accepted"), is never evicted.

Invariant: every waiting request that is not accepted is here exactly once; a tenant's key in the heaps is never above
its true key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.policy import ClassBound, QueuePolicy
from serve_app.core.queue.tenant_queue import QueuedRequest, TenantQueue

REQUESTS = "requests"
TOKENS = "tokens"


class Excess(NamedTuple):
    """Requests and tokens by which a bound is exceeded, none below zero."""

    requests: int
    tokens: int

    def __bool__(self) -> bool:
        return self.requests > 0 or self.tokens > 0

    @classmethod
    def over(cls, bound: ClassBound | QueuePolicy, requests: int, tokens: int, cost: int) -> Excess:
        """By how much a bound is exceeded, at most the newcomer's own size (one request, `cost` tokens)."""
        more_requests = 0 if bound.max_queued is None else min(1, requests - bound.max_queued)
        more_tokens = 0 if bound.max_queued_tokens is None else min(cost, tokens - bound.max_queued_tokens)
        return cls(max(0, more_requests), max(0, more_tokens))

    def minus(self, requests: int, tokens: int) -> Excess:
        return Excess(max(0, self.requests - requests), max(0, self.tokens - tokens))


class EvictableRequests:
    """The evictable requests of one class. O(log n), but O(tenants) at the first excess of each kind."""

    def __init__(self, tenant_queues: Mapping[str, TenantQueue]) -> None:
        self.requests = 0
        self.tokens = 0
        self._tenant_queues = tenant_queues  # of the class, by tenant
        # Tenants by requests, or tokens, divided by weight; a heap is built when its bound is first exceeded.
        self._heaps: dict[str, KeyedHeap] = {}

    def add(self, waiting: QueuedRequest, tenant_queue: TenantQueue) -> None:
        if waiting.arrival.accepted:
            return
        self.requests += 1
        self.tokens += waiting.cost
        tenant_queue.evictable[waiting.arrival.request_id] = waiting
        tenant_queue.evictable_tokens += waiting.cost
        self._update_heaps(tenant_queue)

    def remove(self, waiting: QueuedRequest, tenant_queue: TenantQueue) -> None:
        if waiting.arrival.accepted:
            return
        self.requests -= 1
        self.tokens -= waiting.cost
        del tenant_queue.evictable[waiting.arrival.request_id]
        tenant_queue.evictable_tokens -= waiting.cost
        if not tenant_queue.evictable:  # else its true key has risen: `heaviest_tenant` updates it at the top
            for heap in self._heaps.values():
                heap.discard(tenant_queue.tenant)

    def heaviest_tenant(self, excess: Excess) -> TenantQueue | None:
        """The tenant with most requests (if these exceed a bound, else tokens) for its weight."""
        short = REQUESTS if excess.requests else TOKENS
        if short not in self._heaps:
            self._heaps[short] = KeyedHeap()
            self.refresh_weights()
        heap = self._heaps[short]
        while (top := heap.peek()) is not None:
            tenant_queue = self._tenant_queues[top[1]]
            self._update_heaps(tenant_queue)
            if heap.peek() == top:
                return tenant_queue
        return None

    def can_evict(self, giver: TenantQueue, excess: Excess, newcomer_tenant: str) -> bool:
        """Whether a tenant, after evicting this excess, still has as much for its weight as the newcomer's tenant."""
        taker = self._tenant_queues[newcomer_tenant]
        requests = len(giver.evictable) - excess.requests
        tokens = giver.evictable_tokens - excess.tokens
        return (
            giver is not taker
            and (not excess.requests or requests / giver.weight >= len(taker.evictable) / taker.weight)
            and (not excess.tokens or tokens / giver.weight >= taker.evictable_tokens / taker.weight)
        )

    def refresh_weights(self) -> None:
        """The tenants' weights have changed. O(tenants)."""
        for tenant_queue in self._tenant_queues.values():
            if tenant_queue.evictable:
                self._update_heaps(tenant_queue)

    def _update_heaps(self, tenant_queue: TenantQueue) -> None:
        for short, heap in self._heaps.items():
            has = len(tenant_queue.evictable) if short is REQUESTS else tenant_queue.evictable_tokens
            heap.set(tenant_queue.tenant, (-has / tenant_queue.weight,))
