"""The waiting requests of a router, submitted to the quota actor or not yet.

Order while the actor is away: higher classes first, then by original arrival time. A request that was in the actor's
queue is marked accepted: it keeps its age in another queue, or in the next actor's.

Invariant: a request is in every index or in none.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue import Arrival, ClassBound, QueuePolicy, QueueStatus
from serve_app.core.shared_queue.messages import SessionDraw
from serve_app.types import RequestClass


@dataclass(slots=True)
class PendingRequest:
    """A waiting request. `ticket`: its id at the actor; empty: not submitted. `status`: its queue position in the
    actor's last answer; None: no answer. `status_requested`: a request for it is open. `drawn`: what it holds of its
    session at the actor."""

    model: str
    arrival: Arrival
    arrived_s: float
    ticket: str = ""
    status: QueueStatus | None = None
    drawn: SessionDraw | None = None
    status_requested: bool = False

    @property
    def request_id(self) -> str:
        return self.arrival.request_id


class PendingRequests:
    """Waiting requests by id, model, ticket and end of their wait. O(log n) per method, unless stated."""

    def __init__(self) -> None:
        self.by_request_id: dict[str, PendingRequest] = {}
        self.queues: dict[str, dict[RequestClass, KeyedHeap]] = {}  # ids by arrival, of models with waiting requests
        self.counts: Counter[str] = Counter()  # by model, of these
        self._tokens: Counter[tuple[str, RequestClass]] = Counter()  # estimated
        self.unsent: dict[str, PendingRequest] = {}  # in order of arrival
        self.tickets: dict[str, PendingRequest] = {}
        self._deadlines = KeyedHeap()
        self._numbers = itertools.count()

    def count_by_class(self, model: str) -> dict[RequestClass, int]:
        """The number of waiting requests of a model, by requested class."""
        queues = self.queues.get(model, {})
        return {level: len(queues.get(level, ())) for level in RequestClass}

    def add(self, waiting: PendingRequest, due: float) -> None:
        """Add a request that waits until `due` at most."""
        request_id, model, level = waiting.request_id, waiting.model, waiting.arrival.request_class
        number = next(self._numbers)
        self.by_request_id[request_id] = self.unsent[request_id] = waiting
        self.counts[model] += 1
        self._tokens[model, level] += waiting.arrival.cost
        queues = self.queues.setdefault(model, {})
        queues.setdefault(level, KeyedHeap()).set(request_id, (waiting.arrived_s, number))
        self._deadlines.set(request_id, (due, number))

    def remove(self, request_id: str) -> PendingRequest | None:
        """Remove and return a waiting request; None: unknown id."""
        waiting = self.by_request_id.pop(request_id, None)
        if waiting is None:
            return None
        model, level = waiting.model, waiting.arrival.request_class
        self.unsent.pop(request_id, None)
        self.tickets.pop(waiting.ticket, None)
        self.queues[model][level].discard(request_id)
        self._deadlines.discard(request_id)
        self.counts[model] -= 1
        self._tokens[model, level] -= waiting.arrival.cost
        if not self.counts[model]:
            del self.counts[model], self.queues[model]
            for level in RequestClass:
                self._tokens.pop((model, level), None)
        return waiting

    def first(self, model: str) -> PendingRequest | None:
        """The next request to grant; None: none waits."""
        queues = self.queues.get(model, {})
        tops = (queues[level].peek() for level in sorted(queues, reverse=True))
        return next((self.by_request_id[top[1]] for top in tops if top is not None), None)

    def hand_in(self, waiting: PendingRequest, ticket: str) -> None:
        """A request was submitted to the actor's queue under this ticket."""
        waiting.ticket = ticket
        self.tickets[ticket] = waiting
        self.unsent.pop(waiting.request_id, None)

    def not_handed_in(self, limit: int, is_excluded: Callable[[str], bool]) -> list[PendingRequest]:
        """At most `limit` requests not yet submitted, without excluded models: higher classes first, then the oldest.
        O(n)."""
        if not limit or not self.unsent:
            return []
        found = (one for one in self.unsent.values() if not is_excluded(one.model))
        return heapq.nsmallest(limit, found, lambda one: (-one.arrival.request_class, one.arrived_s))

    def is_full(self, model: str, policy: QueuePolicy, level: RequestClass) -> bool:
        """Whether a class, or all classes together, have reached the bounds of the policy."""
        counts, tokens = self.count_by_class(model), {one: self._tokens[model, one] for one in RequestClass}
        bound = policy.classes.get(level, ClassBound())
        limits = (
            (counts[level], bound.max_queued),
            (tokens[level], bound.max_queued_tokens),
            (self.counts[model], policy.max_queued),
            (sum(tokens.values()), policy.max_queued_tokens),
        )
        return any(most is not None and waiting >= most for waiting, most in limits)

    def take_ticket(self, ticket: str) -> PendingRequest | None:
        """The actor has decided on a ticket: remove and return its request; None: unknown ticket."""
        waiting = self.tickets.get(ticket)
        return None if waiting is None else self.remove(waiting.request_id)

    def forget_tickets(self) -> None:
        """The actor's queue is lost or a new one: no request counts as submitted."""
        self.tickets.clear()
        for request_id, waiting in self.by_request_id.items():
            if waiting.ticket:
                waiting.arrival = replace(waiting.arrival, accepted=True)
            waiting.ticket, waiting.status, waiting.status_requested, waiting.drawn = "", None, False, None
            self.unsent[request_id] = waiting

    def first_overdue(self, now: float) -> PendingRequest | None:
        """A request whose wait is over; None: there is none."""
        top = self._deadlines.peek()
        return None if top is None or now < top[0][0] else self.by_request_id[top[1]]

    def next_due(self) -> float | None:
        """The time at which the next wait is over; None: none waits."""
        top = self._deadlines.peek()
        return None if top is None else top[0][0]
