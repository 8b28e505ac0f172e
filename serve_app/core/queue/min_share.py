"""The minimum share: a guaranteed part of all granted tokens for every waiting class, whatever the load above it.

A waiting class earns `min_share` of the tokens of every grant: its deficit, in the word of deficit round robin. It is
divided by weight among its waiting tenants: each earns from the moment it begins to wait, and pays the tokens of its
own grants. A tenant that has been granted no more than it has earned is eligible; of the eligible tenants, the one
whose next request is earned first is next. Its request goes before the higher classes once the deficit of the class, or
of the tenant alone, covers it. So

- a waiting class is granted at least `min_share` of all granted tokens, less about one request;
- a tenant is granted at least its part of that, less one request, and is never ahead by more than one request;
- for a large request its tenant saves up deficit, while small requests of other tenants pass.

Requests that have begun go before all these, the eligible tenants' and the others': they have a part of their answer,
and there are no more of them than ran at once. Among them the one that is earned first is next. Their tenants pay as
for others, but not for what earlier runs have produced (`Arrival.unpaid_tokens`).

A tenant's savings are lost when it has no waiting request any more, except what the next request of the class needs.
While no replica has capacity for a due request, the deficit is capped at its cost. A grant in the class's own turn
reduces the deficit to zero at most and leaves no debt. Time alone earns nothing: an idle system accumulates no deficit.

Deficits per tenant are those of deficit round robin (Shreedhar and Varghese, 1996); the order of eligible tenants and
the virtual time are those of WF2Q+ (Bennett and Zhang, 1997).

Invariant: a waiting tenant is in exactly one of the heaps of eligible and ineligible tenants, any other in none; a
tenant is in the heap of requests that have begun if and only if one of them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue.tenant_queue import FitsPredicate, QueuedRequest, TenantQueue


class MinShareScheduler:
    """The deficit of one class, and which of its tenants is next to use it. O(log tenants) per method."""

    def __init__(self, tenant_queues: Mapping[str, TenantQueue]) -> None:
        self._tenant_queues = tenant_queues  # of the class, by tenant
        self.deficit = 0.0  # tokens that the class has earned and was not granted
        self._virtual_time = 0.0  # tokens earned per unit of weight since the class began to wait
        self._eligible = KeyedHeap()  # tenants by the virtual time at which their next request is earned
        self._ineligible = KeyedHeap()  # tenants granted more than earned, by the virtual time at which that is earned

        self._begun = KeyedHeap()  # tenants by the virtual time at which their next request that has begun is earned
        self._blocked: tuple[TenantQueue, int] | None = None  # whose due request found no room last, and its tokens

    def tenant_begins(self, tenant_queue: TenantQueue) -> None:
        """A tenant begins to wait."""
        if not len(self._eligible) and not len(self._ineligible):  # no other tenant of the class waits
            self.deficit = self._virtual_time = 0.0
            self._blocked = None
        tenant_queue.virtual_start = self._virtual_time
        self.tenant_changed(tenant_queue)

    def tenant_changed(self, tenant_queue: TenantQueue) -> None:
        """The next request, the weight or the virtual start of a waiting tenant has changed."""
        tenant = tenant_queue.tenant
        start = tenant_queue.virtual_start
        if start <= self._virtual_time:
            self._ineligible.discard(tenant)
            self._eligible.set(tenant, (start + tenant_queue.first.unpaid / tenant_queue.weight,))
        else:
            self._eligible.discard(tenant)
            self._ineligible.set(tenant, (start,))
        begun = tenant_queue.first_begun() if tenant_queue.begun else None
        if begun is None:
            self._begun.discard(tenant)
        else:
            self._begun.set(tenant, (start + begun.unpaid / tenant_queue.weight,))

    def tenant_ends(self, tenant_queue: TenantQueue) -> None:
        """A tenant waits no more. Its savings are lost, except what the next request of the class needs."""
        self._eligible.discard(tenant_queue.tenant)
        self._ineligible.discard(tenant_queue.tenant)
        self._begun.discard(tenant_queue.tenant)
        following = self._next_request()
        needed = 0.0 if following is None else float(following.unpaid)
        saved = max(0.0, self._virtual_time - tenant_queue.virtual_start) * tenant_queue.weight
        self.deficit = max(min(self.deficit, needed), self.deficit - saved)

    def charge(self, tenant_queue: TenantQueue, tokens: int, was_due: bool) -> None:
        """A request is granted for so many unpaid tokens, because it was due by the minimum share or in its class's
        turn; its removal follows."""
        start = tenant_queue.virtual_start
        paid_up = start + tokens / tenant_queue.weight
        tenant_queue.virtual_start = paid_up if was_due else max(start, min(paid_up, self._virtual_time))
        self.deficit = max(0.0, self.deficit - tokens)

    def earn(self, tokens: float, weight: float) -> None:
        """The class earns `tokens`; `weight`: sum over its waiting tenants."""
        self._cap_blocked()
        self.deficit += tokens
        self._virtual_time += tokens / weight
        while (top := self._ineligible.peek()) is not None:
            if top[0][0] > self._virtual_time:
                if len(self._eligible):
                    return
                self._virtual_time = top[0][0]  # some waiting tenant is always eligible
            self.tenant_changed(self._tenant_queues[top[1]])

    def due_request(self, could_fit: FitsPredicate) -> QueuedRequest | None:
        """The request that goes before the higher classes, if any: from the first tenant with one that could run."""
        head = None
        if len(self._begun):
            head = self._first_able(self._begun, lambda class_queue: class_queue.first_begun(could_fit))
        if head is None:
            head = self._first_able(self._eligible, lambda class_queue: class_queue.first_that_could_run(could_fit))
        if head is None:
            return None
        tenant_queue = self._tenant_queues[head.arrival.tenant]
        earned_at = tenant_queue.virtual_start + head.unpaid / tenant_queue.weight
        return head if self.deficit >= head.unpaid or self._virtual_time >= earned_at else None

    def on_blocked(self, waiting: QueuedRequest) -> None:
        """No replica has the capacity for a due request. Who is due stays as it is until the class earns again, so what
        a look has found holds until something happens."""
        self._blocked = self._tenant_queues[waiting.arrival.tenant], waiting.unpaid

    def _cap_blocked(self) -> None:
        """What the class and the tenant of a blocked request have earned is capped at its cost."""
        if self._blocked is None:
            return
        (tenant_queue, tokens), self._blocked = self._blocked, None
        if tenant_queue.order:
            self.deficit = min(self.deficit, tokens)
            earned_start = self._virtual_time - tokens / tenant_queue.weight
            tenant_queue.virtual_start = max(tenant_queue.virtual_start, earned_start)
            self.tenant_changed(tenant_queue)

    def _next_request(self) -> QueuedRequest | None:
        """The next request by the minimum share, whether it is due and could run or not."""
        if (top := self._begun.peek()) is not None:
            return self._tenant_queues[top[1]].first_begun()
        top = self._eligible.peek() or self._ineligible.peek()
        return None if top is None else self._tenant_queues[top[1]].first

    def _first_able(
        self, heap: KeyedHeap, first: Callable[[TenantQueue], QueuedRequest | None]
    ) -> QueuedRequest | None:
        """The request of the first tenant in a heap that has one."""
        aside: list[TenantQueue] = []  # their requests fit only after a session ends
        head: QueuedRequest | None = None
        while head is None and (top := heap.peek()) is not None:
            tenant_queue = self._tenant_queues[top[1]]
            head = first(tenant_queue)
            if head is None:
                heap.discard(tenant_queue.tenant)
                aside.append(tenant_queue)
        for tenant_queue in aside:
            self.tenant_changed(tenant_queue)
        return head
