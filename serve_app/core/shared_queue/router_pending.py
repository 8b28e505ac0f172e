"""The requests of a router that wait, submitted to the quota actor or not yet.

Rules
- Order while the actor is away: higher classes first, then by original arrival time.
- A request that was in the actor's queue is marked accepted: it keeps its age in another queue, or in the next actor's.
- A ticket belongs to an incarnation. A request without one is submitted again, with the time already waited.

Invariant: a waiting request is in every index or in none.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue import Arrival, QueuedAmount, QueuePolicy, QueueStatus
from serve_app.types import RequestClass

REFUSAL_GRACE_S = 0.5  # after the end of a wait: the actor's own refusal arrives before that


@dataclass(slots=True)
class PendingRequest:
    """A waiting request. `ticket`: its id at the actor; empty: not submitted. `submitted_in`: the number of the event
    that submitted it. `status`: its queue position in the actor's last answer; None: no answer. `status_requested`: a
    request for it is open."""

    model: str
    arrival: Arrival
    arrived_s: float
    ticket: str = ""
    submitted_in: int = 0
    status: QueueStatus | None = None
    status_requested: bool = False

    @property
    def request_id(self) -> str:
        return self.arrival.request_id

    @property
    def first_arrived_s(self) -> float:
        """When it first arrived: the order among the requests of a class."""
        return self.arrived_s - self.arrival.age_s


class PendingRequests:
    """Waiting requests by id, model, ticket and end of their wait. O(log n) per method, unless stated."""

    def __init__(self) -> None:
        self.by_request_id: dict[str, PendingRequest] = {}
        self.queues: dict[str, dict[RequestClass, KeyedHeap]] = {}  # ids by arrival, of models with waiting requests
        self._tokens: Counter[tuple[str, RequestClass]] = Counter()  # estimated
        self.tickets: dict[str, PendingRequest] = {}
        self._deadlines = KeyedHeap()
        self._numbers = itertools.count()

    def count(self, model: str) -> int:
        """The number of waiting requests of a model."""
        return sum(map(len, self.queues.get(model, {}).values()))

    def count_by_class(self, model: str) -> dict[RequestClass, int]:
        """The number of waiting requests of a model, by requested class."""
        queues = self.queues.get(model, {})
        return {level: len(queues.get(level, ())) for level in RequestClass}

    def has_others(self, model: str, tenant: str) -> bool:
        """Whether a request of a model waits for a tenant other than this one. O(waiting requests of the tenant)."""
        queues = self.queues.get(model, {}).values()
        return any(self.by_request_id[one].arrival.tenant != tenant for queue in queues for one in queue)

    def tokens(self, model: str) -> int:
        """The KV tokens that the waiting requests of a model are estimated to need."""
        return sum(self._tokens[model, level] for level in RequestClass)

    def oldest_wait_s(self, model: str, level: RequestClass, now: float) -> float:
        """For how long the request of a class that has waited longest has done so; 0: none waits. O(1), or O(n) while
        one waits again after a loss: it is the first of its class, but may have waited for less than others."""
        queue = self.queues.get(model, {}).get(level)
        if queue is None or (top := queue.peek()) is None:
            return 0.0
        since = self.by_request_id[top[1]].arrived_s
        if top[0][0] < since:
            since = min(self.by_request_id[one].arrived_s for one in queue)
        return max(0.0, now - since)

    def add(self, waiting: PendingRequest, longest_wait_s: float) -> None:
        """Add a request that may wait so long."""
        request_id = waiting.request_id
        model = waiting.model
        level = waiting.arrival.request_class
        self.by_request_id[request_id] = waiting
        self._tokens[model, level] += waiting.arrival.cost
        queues = self.queues.setdefault(model, {})
        queues.setdefault(level, KeyedHeap()).set(request_id, (waiting.first_arrived_s, next(self._numbers)))
        self.set_wait_end(waiting, waiting.arrived_s + longest_wait_s)

    def set_wait_end(self, waiting: PendingRequest, ends_s: float) -> None:
        """The longest wait of a request ends at this moment, or at its deadline."""
        deadline = waiting.arrival.deadline
        due = ends_s if deadline is None else min(ends_s, deadline)
        self._deadlines.set(waiting.request_id, (due + REFUSAL_GRACE_S, next(self._numbers)))

    def remove(self, request_id: str) -> PendingRequest | None:
        """Remove and return a waiting request; None: unknown id."""
        waiting = self.by_request_id.pop(request_id, None)
        if waiting is None:
            return None
        model = waiting.model
        level = waiting.arrival.request_class
        self.tickets.pop(waiting.ticket, None)
        self.queues[model][level].discard(request_id)
        self._deadlines.discard(request_id)
        self._tokens[model, level] -= waiting.arrival.cost
        if not self.count(model):
            del self.queues[model]
            for level in RequestClass:
                self._tokens.pop((model, level), None)
        return waiting

    def first(self, model: str, may_run: Callable[..., bool] = lambda *_: True) -> PendingRequest | None:
        """The next request to grant of those that may run, None: none. O(n log n) if the very next one may not."""
        tops = (heap.peek() for _, heap in sorted(self.queues.get(model, {}).items(), reverse=True))
        first = next((self.by_request_id[top[1]] for top in tops if top is not None), None)
        if first is None or may_run(model, first.arrival.fingerprint, first.arrival.avoid_replicas):
            return first
        waiting = [one for one in self.by_request_id.values() if one.model == model]
        waiting.sort(key=lambda request: (-request.arrival.request_class, request.first_arrived_s))
        arrivals = ((one, one.arrival) for one in waiting)
        return next((one for one, it in arrivals if may_run(model, it.fingerprint, it.avoid_replicas)), None)

    def hand_in(self, waiting: PendingRequest, ticket: str, submitted_in: int) -> None:
        """A request was submitted to the actor's queue under this ticket, with the event of this number."""
        waiting.ticket = ticket
        waiting.submitted_in = submitted_in
        self.tickets[ticket] = waiting

    def not_handed_in(self, limit: int, is_excluded: Callable[[str], bool]) -> list[PendingRequest]:
        """At most `limit` requests not yet submitted, without excluded models: higher classes first, then the oldest.
        O(n)."""
        if not limit or len(self.tickets) == len(self.by_request_id):
            return []
        found = (one for one in self.by_request_id.values() if not one.ticket and not is_excluded(one.model))
        return heapq.nsmallest(limit, found, lambda request: (-request.arrival.request_class, request.first_arrived_s))

    def exceeded(self, model: str, policy: QueuePolicy, level: RequestClass) -> str:
        """The bound that a class, or all classes together, have reached (`QueuePolicy.exceeded`); empty: none."""
        counts = self.count_by_class(model)
        of_class = QueuedAmount(counts[level], self._tokens[model, level])
        return policy.exceeded(level, of_class, QueuedAmount(sum(counts.values()), self.tokens(model)))

    def take_ticket(self, ticket: str) -> PendingRequest | None:
        """The actor has decided on a ticket: remove and return its request; None: unknown ticket."""
        return self.remove(self.tickets[ticket].request_id) if ticket in self.tickets else None

    def forget_tickets(self) -> None:
        """The actor's queue is lost or a new one: no request counts as submitted."""
        self.tickets.clear()
        for waiting in self.by_request_id.values():
            if waiting.ticket:
                waiting.arrival = replace(waiting.arrival, accepted=True)
            waiting.ticket = ""
            waiting.status = None
            waiting.status_requested = False

    def first_overdue(self, now: float) -> PendingRequest | None:
        """A request whose wait is over; None: there is none."""
        return None if (top := self._deadlines.peek()) is None or now < top[0][0] else self.by_request_id[top[1]]

    def next_due(self) -> float | None:
        """The time at which the next wait is over; None: none waits."""
        return None if (top := self._deadlines.peek()) is None else top[0][0]
