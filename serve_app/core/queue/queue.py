"""The waiting requests of one model, indexed by id, class and tenant (`core.queue.class_queue`), age and deadline.

A full queue evicts, for a newcomer, the lowest class first, then the heaviest tenant, then the youngest request. In the
newcomer's own class, requests are evicted only of a tenant that then still has, for its weight, at least as much as the
newcomer's tenant: so a heavy tenant cannot keep a light one out of the queue, nor the other way. For the bound of a
class only requests of that class are evicted. Only the newcomer's own size is made up for: if the queue exceeds a bound
for another reason (a lowered bound), no further request is evicted.

Invariant: a request is in every index or in none. A request is evicted only after the check that enough can be evicted:
the newcomer fits, or all others stay.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.pools import Holder
from serve_app.core.queue.class_queue import ClassQueue
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.eviction import Excess
from serve_app.core.queue.policy import ClassBound, QueuedAmount, QueuePolicy
from serve_app.core.queue.session_place import SessionPlace
from serve_app.core.queue.tenant_queue import QueuedRequest, TenantQueue
from serve_app.types import RequestClass

NO_BOUND = ClassBound()


class RequestQueue:
    """The waiting requests. O(log n) to add, remove and find the next.

    Args:
        new_tenant_queue: makes the queue of a tenant that is new in a class.
    """

    def __init__(self, new_tenant_queue: Callable[[str], TenantQueue]) -> None:
        self.class_queues = [ClassQueue(new_tenant_queue) for _ in RequestClass]
        self.by_id: dict[str, QueuedRequest] = {}
        self._by_age = {has_begun: KeyedHeap() for has_begun in (False, True)}
        self._by_deadline = KeyedHeap()
        self.by_session: dict[str, dict[str, QueuedRequest]] = {}  # those that may take a session's place, by lease
        self._arrival_count = 0

    def add(
        self,
        arrival: Arrival,
        arrived_s: float,
        wait_from_s: float,
        holder: Holder,
        place: SessionPlace | None = None,
    ) -> QueuedRequest:
        """Add a request whose id does not wait yet to its tenant queue, ordered by age; its longest wait counts from
        `wait_from_s`, and its grant is charged to `holder`. `place`: of its session."""
        self._arrival_count += 1
        waiting = QueuedRequest(arrival, arrived_s, self._arrival_count, holder, place)
        self.by_id[arrival.request_id] = waiting
        if place is not None:
            self.by_session.setdefault(place.pool.name, {})[arrival.request_id] = waiting
        self.set_wait_from(waiting, wait_from_s)
        self.class_queues[arrival.request_class].add(waiting)
        if arrival.deadline is not None:
            self._by_deadline.set(arrival.request_id, (arrival.deadline, waiting.arrival_number))
        return waiting

    @property
    def tokens(self) -> int:
        """KV tokens that the waiting requests need."""
        return sum(class_queue.tokens for class_queue in self.class_queues)

    def set_wait_from(self, waiting: QueuedRequest, wait_from_s: float) -> None:
        """The longest wait of a request counts from this moment."""
        waiting.wait_from_s = wait_from_s
        by_age = self._by_age[waiting.arrival.has_begun]
        by_age.set(waiting.arrival.request_id, (wait_from_s, waiting.arrival_number))

    def remove(self, request_id: str) -> QueuedRequest | None:
        """Remove a request; None if it does not wait."""
        waiting = self.by_id.pop(request_id, None)
        if waiting is not None:
            self._by_age[waiting.arrival.has_begun].discard(request_id)
            self.class_queues[waiting.arrival.request_class].remove(waiting)
            self._by_deadline.discard(request_id)
            self._leave_place(waiting)
        return waiting

    def first_for(self, lease: str) -> QueuedRequest | None:
        """The first request that may take the place of this session now. O(requests that wait for it)."""
        waiting = self.by_session.get(lease, {}).values()
        return next((one for one in waiting if not one.holder.is_final and one.may_take_place), None)

    def end_session(self, lease: str) -> None:
        """A session has ended: no request may take its place. O(those that could)."""
        for request in list(self.by_session.get(lease, {}).values()):
            self._leave_place(request)

    def _leave_place(self, waiting: QueuedRequest) -> None:
        if waiting.place is not None:
            lease = waiting.place.pool.name
            waiting.place = None
            del self.by_session[lease][waiting.arrival.request_id]
            if not self.by_session[lease]:
                del self.by_session[lease]

    def evict_for(self, policy: QueuePolicy, newcomer: QueuedRequest) -> list[QueuedRequest] | None:
        """Keep the queue within its bounds after a newcomer, which is not `accepted`, was added.

        Returns the evicted requests; None: the newcomer does not fit, and nothing has changed. O(log n) per eviction.
        """
        level = newcomer.arrival.request_class
        cost = newcomer.cost
        class_queue = self.class_queues[level]
        of_class = Excess.over(policy.classes.get(level, NO_BOUND), class_queue.size, class_queue.tokens, cost)
        of_all = Excess.over(policy, len(self.by_id), self.tokens, cost)
        if not of_class and not of_all:
            return []
        below = [lower.evictable for lower in self.class_queues[:level]]
        same = class_queue.evictable
        rest = of_all.minus(sum(one.requests for one in below), sum(one.tokens for one in below))
        own = Excess(max(of_class.requests, rest.requests), max(of_class.tokens, rest.tokens))
        giver = same.heaviest_tenant(own) if own else None
        if own and (giver is None or not same.can_evict(giver, own, newcomer.arrival.tenant)):
            return None
        gone: list[QueuedRequest] = []
        while own and giver is not None:
            gone.append(self._evict_youngest(giver))
            own, of_all = own.minus(1, gone[-1].cost), of_all.minus(1, gone[-1].cost)
        for lower in below:
            while of_all and (heaviest := lower.heaviest_tenant(of_all)) is not None:
                gone.append(self._evict_youngest(heaviest))
                of_all = of_all.minus(1, gone[-1].cost)
        return gone

    def exceeded(self, policy: QueuePolicy, newcomer: QueuedRequest) -> str:
        """The bound that keeps a newcomer out, which does not wait here; see `QueuePolicy.exceeded`."""
        level = newcomer.arrival.request_class
        class_queue = self.class_queues[level]
        of_class = QueuedAmount(class_queue.size, class_queue.tokens)
        return policy.exceeded(level, of_class, QueuedAmount(len(self.by_id), self.tokens), newcomer.cost)

    def _evict_youngest(self, tenant_queue: TenantQueue) -> QueuedRequest:
        waiting = next(reversed(tenant_queue.evictable.values()))
        self.remove(waiting.arrival.request_id)
        return waiting

    def begun(self) -> list[Arrival]:
        """Those that have begun, in arbitrary order. O(of these)."""
        return [self.by_id[request_id].arrival for request_id in self._by_age[True]]

    def oldest(self) -> list[QueuedRequest]:
        """The requests whose longest wait counts from the earliest moments: one that has begun, and another one."""
        return [self.by_id[top[1]] for ages in self._by_age.values() if (top := ages.peek()) is not None]

    def next_deadline(self) -> tuple[float, QueuedRequest] | None:
        """The earliest deadline and its request; None if no request has one."""
        top = self._by_deadline.peek()
        return None if top is None else (top[0][0], self.by_id[top[1]])
