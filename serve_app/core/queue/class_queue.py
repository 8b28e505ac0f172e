"""The queue of one class: its tenants in fair order, each tenant's requests by age.

Fair order is that of weighted virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): each tenant has a counter of its service in this class, divided by its weight; the tenant with the lowest
counter is next. When a tenant begins to wait again, its counter is raised to the lowest counter of the waiting tenants
(if none waits, to that of the tenant that waited last): idle time earns nothing. Of that counter, what is charged by
estimates that no engine has confirmed does not count: where they are far too high and soon refunded, who comes would
wait for service that the other never had. Tenants below their guaranteed share come first.
Counters are reset when no request of the class waits or runs.

Of the requests of one size class (slots, tokens within a factor of two, placement constraint) only the first in fair
order, the head, can be next: none passes a request of equal size. The first request and the heads are cached until they
can change.

Invariant: a request is in every index or in none; a tenant's key in the heaps is never above its true key; while
`changes` stays the same, the cached results stay valid.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from serve_app.core.keyed_heap import Key, KeyedHeap
from serve_app.core.queue.eviction import EvictableRequests
from serve_app.core.queue.min_share import MinShareScheduler
from serve_app.core.queue.policy import MIN_WEIGHT
from serve_app.core.queue.tenant_queue import FitsPredicate, QueuedRequest, SizeClass, TenantQueue

# The sort key of a head (fair key of its tenant queue, then its order key), the request, its tenant queue.
Head = tuple[tuple[Any, ...], QueuedRequest, TenantQueue]


class ClassQueue:
    """The tenant queues of one class. O(log n) per method unless its docstring says otherwise.

    Args:
        new_tenant_queue: makes the queue of a tenant that is new in this class.
    """

    def __init__(self, new_tenant_queue: Callable[[str], TenantQueue]) -> None:
        self._new_tenant_queue = new_tenant_queue
        self.tenant_queues: dict[str, TenantQueue] = {}  # of all tenants since the class was last idle
        self.size = 0  # waiting requests
        self.slots = 0  # slots that they need
        self.tokens = 0  # KV tokens that they need
        self.weight = 0.0  # sum over the waiting tenants; while one waits at least `MIN_WEIGHT`, whatever rounding does
        self.running = 0  # granted requests of this class that have not ended
        self.granted = self.granted_tokens = 0  # since the queue was created
        self.served_s = -math.inf  # when one of its requests was granted last, or it earned of its minimum share
        self.min_share = MinShareScheduler(self.tenant_queues)
        self.evictable = EvictableRequests(self.tenant_queues)
        self.changes = 0  # version: rises when a cached result can have changed
        self._tenant_heaps = (KeyedHeap(), KeyedHeap())  # waiting tenants: below their share, the others
        self._tenants_by_size = defaultdict[SizeClass, KeyedHeap](KeyedHeap)  # waiting tenants with such a request
        self._first: QueuedRequest | None = None  # cached first request; None: not known
        self._heads: dict[SizeClass, Head] = {}  # cached heads
        self._last_to_leave: TenantQueue | None = None  # the tenant queue that became empty last
        self._least_cost: float = 0  # no head costs less while `changes` is `_least_cost_at_change`
        self._least_cost_at_change = -1

    def add(self, waiting: QueuedRequest) -> None:
        """Add a request to its tenant queue."""
        tenant = waiting.arrival.tenant
        size = waiting.size
        tenant_queue = self.tenant_queues.get(tenant)
        if tenant_queue is None:
            tenant_queue = self.tenant_queues[tenant] = self._new_tenant_queue(tenant)
        if not tenant_queue.order:
            tenant_queue.counter = max(tenant_queue.counter, self._lowest_counter())
            tenant_queue.waiting_since = waiting.arrival_number
            tenant_queue.update_fair_key()
            if self._first is None or tenant_queue.fair_key < self.tenant_queues[self._first.arrival.tenant].fair_key:
                self._forget_first()
            self.weight += tenant_queue.weight
            self._tenant_heaps[not tenant_queue.below_share].set(tenant, tenant_queue.fair_key)
        entry = (*waiting.order_key, waiting)
        insort(tenant_queue.order, entry)
        tenant_queue.slots += waiting.slots
        has_begun = waiting.arrival.has_begun
        if has_begun:
            tenant_queue.add_begun(waiting)
        if tenant_queue.order[0] is entry or has_begun:
            if len(tenant_queue.order) == 1:
                self.min_share.tenant_begins(tenant_queue)
            else:  # it is older than the tenant's other requests, or goes before them by the minimum share
                self.min_share.tenant_changed(tenant_queue)
                if self._first is not None and self._first.arrival.tenant == tenant:
                    self._first = None
            self.changes += 1
        same_size = tenant_queue.by_size[size]
        insort(same_size, entry)
        if len(same_size) == 1:
            self._tenants_by_size[size].set(tenant, tenant_queue.fair_key)
        if same_size[0] is entry:
            head = self._heads.get(size)
            if head is None or (*tenant_queue.fair_key, waiting.order_key) < head[0]:
                self._forget_head(size)
        self.evictable.add(waiting, tenant_queue)
        self.size += 1
        self.slots += waiting.slots
        self.tokens += waiting.cost

    def remove(self, waiting: QueuedRequest) -> None:
        """Remove a request that waits in this class."""
        tenant = waiting.arrival.tenant
        size = waiting.size
        tenant_queue = self.tenant_queues[tenant]
        was_first = tenant_queue.first is waiting
        has_begun = waiting.arrival.has_begun
        del tenant_queue.order[bisect_left(tenant_queue.order, waiting.order_key)]
        if has_begun:
            tenant_queue.remove_begun(waiting)
        tenant_queue.slots -= waiting.slots
        if waiting is self._first:
            self._forget_first()
        head = self._heads.get(size)
        if head is None or head[1] is waiting:
            self._forget_head(size)
        same_size = tenant_queue.by_size[size]
        del same_size[bisect_left(same_size, waiting.order_key)]
        if not same_size:
            del tenant_queue.by_size[size]
            self._tenants_by_size[size].discard(tenant)
            if not len(self._tenants_by_size[size]):
                del self._tenants_by_size[size]
        self.evictable.remove(waiting, tenant_queue)
        self.size -= 1
        self.slots -= waiting.slots
        self.tokens -= waiting.cost
        if not tenant_queue.order:
            self._tenant_heaps[not tenant_queue.below_share].discard(tenant)
            self.weight = max(MIN_WEIGHT, self.weight - tenant_queue.weight) if self.size else 0.0
            self._last_to_leave = tenant_queue
            self.min_share.tenant_ends(tenant_queue)
            self.changes += 1
        elif was_first or has_begun:
            self.min_share.tenant_changed(tenant_queue)
            self.changes += 1
        self._reset_if_idle()

    def first(self) -> QueuedRequest | None:
        """The next request in fair order."""
        if self._first is None:
            tenant_queue = self._lowest_tenant(self._tenant_heaps[0]) or self._lowest_tenant(self._tenant_heaps[1])
            self._first = None if tenant_queue is None else tenant_queue.first
        return self._first

    def first_that_fits(self, fits: FitsPredicate, most_slots: float, most_tokens: float) -> QueuedRequest | None:
        """The first head in fair order that fits, with slots and tokens within these limits. O(size classes); O(1)
        while nothing changes and even the cheapest head does not fit."""
        if self._least_cost_at_change == self.changes and most_tokens < self._least_cost:
            return None
        found: Head | None = None
        least: float = math.inf
        for size in self._tenants_by_size:
            slots, bits, _ = size
            at_least = 1 << (bits - 1)
            if slots > most_slots or at_least > most_tokens:
                least = at_least if at_least < least else least  # `min` takes three times as long
                continue
            head = self._heads.get(size) or self._find_head(size)
            cost = head[1].cost
            least = cost if cost < least else least
            if cost <= most_tokens and (found is None or head[0] < found[0]) and fits(*head[1].need):
                found = head
        self._least_cost = least
        self._least_cost_at_change = self.changes
        return None if found is None else found[1]

    def _find_head(self, size: SizeClass) -> Head:
        """The head of a size class that is not empty."""
        tenant_queue = self._lowest_tenant(self._tenants_by_size[size])
        assert tenant_queue is not None  # empty heaps are deleted
        waiting = tenant_queue.by_size[size][0][2]
        head = self._heads[size] = (*tenant_queue.fair_key, waiting.order_key), waiting, tenant_queue
        tenant_queue.leading_sizes.add(size)
        return head

    def _forget_head(self, size: SizeClass) -> None:
        """Drop the cached head of this size class: it can have changed."""
        head = self._heads.pop(size, None)
        if head is not None:
            head[2].leading_sizes.discard(size)
        self.changes += 1

    def _forget_first(self) -> None:
        self._first = None
        self.changes += 1

    def charge(self, tenant_queue: TenantQueue, tokens: float) -> None:
        """Charge a tenant weighted tokens of service; negative: a refund."""
        tenant_queue.counter += tokens / tenant_queue.weight
        self._update_order(tenant_queue)
        if tokens < 0:
            self._on_key_lowered(tenant_queue)

    def charge_uncounted(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for service in this class outside this queue; ignored while the class is idle here."""
        if not self.size and not self.running:
            return
        self.charge(self._served_elsewhere(tenant), tokens)

    def begin_run(self, tenant: str) -> TenantQueue:
        """A request of a tenant runs that was not granted here."""
        self.running += 1
        return self._served_elsewhere(tenant)

    def _served_elsewhere(self, tenant: str) -> TenantQueue:
        """A tenant is served without this queue. Its counter is as if the request had waited here for a moment: service
        while nobody waits puts it behind no tenant that comes later."""
        tenant_queue = self.tenant_queues.get(tenant)
        if tenant_queue is None:
            tenant_queue = self.tenant_queues[tenant] = self._new_tenant_queue(tenant)
        if not tenant_queue.order:
            tenant_queue.counter = max(tenant_queue.counter, self._lowest_counter())
            tenant_queue.update_fair_key()
            self._last_to_leave = tenant_queue
        return tenant_queue

    def end_run(self) -> None:
        """A granted request of this class has ended."""
        self.running -= 1
        self._reset_if_idle()

    def _reset_if_idle(self) -> None:
        """Reset all counters if no request of the class waits or runs."""
        if not self.size and not self.running:
            self.tenant_queues.clear()
            self._last_to_leave = None

    def set_below_share(self, tenant: str, below_share: bool) -> None:
        """Set whether a tenant is below its guaranteed share."""
        tenant_queue = self.tenant_queues.get(tenant)
        if tenant_queue is None or tenant_queue.below_share is below_share:
            return
        self._tenant_heaps[not tenant_queue.below_share].discard(tenant)
        tenant_queue.below_share = below_share
        self._update_order(tenant_queue)
        self._on_key_lowered(tenant_queue)

    def set_weights(self, weight: Callable[[str], float]) -> None:
        """Replace all weights. O(tenants)."""
        for tenant_queue in self.tenant_queues.values():
            tenant_queue.weight = weight(tenant_queue.tenant)
        self.weight = sum(tenant_queue.weight for tenant_queue in self.waiting_tenants())
        for tenant_queue in self.waiting_tenants():
            self.min_share.tenant_changed(tenant_queue)
        self.evictable.refresh_weights()
        self.changes += 1

    def waiting_tenants(self) -> Iterator[TenantQueue]:
        """The queues of the waiting tenants. O(waiting tenants)."""
        return (self.tenant_queues[tenant] for heap in self._tenant_heaps for tenant in heap)

    def in_fair_order(self, most: int) -> Iterator[TenantQueue]:
        """The queues of the waiting tenants in fair order; of the tenants below their share, and of the others, only so
        many, those whose keys were lowest when they were last read. O(log n) each."""
        for heap in self._tenant_heaps:
            seen: list[tuple[Key, str]] = []  # whose true keys are at least those in the heap
            for key, tenant in islice(heap.in_order(), most):
                while seen and seen[0][0] < key:
                    yield self.tenant_queues[heapq.heappop(seen)[1]]
                heapq.heappush(seen, (self.tenant_queues[tenant].fair_key, tenant))
            while seen:
                yield self.tenant_queues[heapq.heappop(seen)[1]]

    @property
    def waiting_tenant_count(self) -> int:
        return sum(len(heap) for heap in self._tenant_heaps)

    def _lowest_counter(self) -> float:
        """The counter to which a tenant that begins to wait is raised."""
        lowest = [queue for heap in self._tenant_heaps if (queue := self._lowest_tenant(heap)) is not None]
        found = min(lowest, key=lambda queue: (queue.counter, queue.waiting_since), default=self._last_to_leave)
        return 0.0 if found is None else found.counter - found.unconfirmed / found.weight

    def _update_order(self, tenant_queue: TenantQueue) -> None:
        """A tenant's fair key has changed: drop the cached results in which the tenant is first."""
        tenant_queue.update_fair_key()
        if self._first is not None and self._first.arrival.tenant == tenant_queue.tenant:
            self._forget_first()
        for size in tuple(tenant_queue.leading_sizes):
            self._forget_head(size)

    def _on_key_lowered(self, tenant_queue: TenantQueue) -> None:
        """Heaps detect a raised key when they are read, not a lowered one: set it, since the tenant may be first."""
        if tenant_queue.order:
            self._tenant_heaps[not tenant_queue.below_share].set(tenant_queue.tenant, tenant_queue.fair_key)
            self._forget_first()
            for size in tenant_queue.by_size:
                self._tenants_by_size[size].set(tenant_queue.tenant, tenant_queue.fair_key)
                self._forget_head(size)

    def _lowest_tenant(self, heap: KeyedHeap) -> TenantQueue | None:
        while (top := heap.peek()) is not None:
            tenant_queue = self.tenant_queues[top[1]]
            if top[0] == tenant_queue.fair_key:
                return tenant_queue
            heap.replace_first(tenant_queue.fair_key)
        return None
