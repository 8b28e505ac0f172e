"""Who waits at a router, handed in to the quota actor's line or not yet.

Order, for the time in which the actor is away: the higher class first, then whoever came first, however often it has
waited anew since. Who was in the actor's line is accepted: another line, or the next actor's, takes it as old as it is.

Invariant: a request is in every index or in none.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from serve_app.core.keyed_heap import KeyedHeap
from serve_app.core.queue import Arrival, ClassBound, Policy, QueueStatus
from serve_app.core.shared_queue.messages import Drawn
from serve_app.types import RequestClass

_DOWN = tuple(sorted(RequestClass, reverse=True))

Queues = dict[RequestClass, KeyedHeap]  # ids by arrival


@dataclass(slots=True)
class Waiting:
    """A request that waits. `ticket`: the actor's name for it; empty: it was not handed in. `status`: where it stands,
    by the actor's last answer; None: there was none. `looks`: it was asked for, with no answer yet. `drawn`: what
    it has of its session, in the actor's books."""

    model: str
    arrival: Arrival
    arrived_s: float
    ticket: str = ""
    status: QueueStatus | None = None
    drawn: Drawn | None = None
    looks: bool = False

    @property
    def request_id(self) -> str:
        return self.arrival.request_id


class Pending:
    """Requests by id, model, ticket and the moment at which their wait is over. O(log n) each."""

    def __init__(self) -> None:
        self._all: dict[str, Waiting] = {}
        self._queues: dict[str, Queues] = {}
        self._counts: dict[str, int] = {}
        self._tokens: Counter[tuple[str, RequestClass]] = Counter()  # estimated
        self._new: OrderedDict[str, Waiting] = OrderedDict()  # not handed in
        self._tickets: dict[str, Waiting] = {}
        self._due = KeyedHeap()
        self._entries = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._all

    def get(self, request_id: str) -> Waiting | None:
        """Who waits under this id."""
        return self._all.get(request_id)

    def places(self) -> dict[str, Waiting]:
        """Everybody who waits, by id."""
        return dict(self._all)

    def stands(self, ticket: str, status: QueueStatus) -> None:
        """The actor says where a ticket stands; one that is of no use any more changes nothing."""
        waiting = self._tickets.get(ticket)
        if waiting is not None:
            waiting.status, waiting.looks = replace(status, request_id=waiting.request_id), False

    def drew(self, drawn: Drawn) -> None:
        """The actor has drawn on a session for a ticket, or, with no tokens, on none any more."""
        waiting = self._tickets.get(drawn.ticket)
        if waiting is not None:
            waiting.drawn = drawn if drawn.slots or drawn.tokens else None

    def drawn(self) -> list[Drawn]:
        """What those who wait have of sessions. O(waiting)."""
        return [one.drawn for one in self._all.values() if one.drawn is not None]

    def count(self, model: str) -> int:
        """How many wait for a model."""
        return self._counts.get(model, 0)

    def by_class(self, model: str) -> dict[RequestClass, int]:
        """How many wait for a model, by the class they claimed."""
        queues = self._queues.get(model, {})
        return {level: len(queues.get(level, ())) for level in RequestClass}

    def models(self) -> list[str]:
        """Models for which somebody waits."""
        return list(self._counts)

    def add(self, waiting: Waiting, due: float) -> None:
        """Somebody waits, until this moment at most."""
        request_id, model = waiting.request_id, waiting.model
        self._all[request_id] = self._new[request_id] = waiting
        queues = self._queues.setdefault(model, {})
        self._counts[model] = self.count(model) + 1
        self._tokens[model, waiting.arrival.request_class] += waiting.arrival.cost
        self._entries += 1
        queues.setdefault(waiting.arrival.request_class, KeyedHeap()).set(
            request_id, (waiting.arrived_s, self._entries)
        )
        self._due.set(request_id, (due, self._entries))

    def remove(self, request_id: str) -> Waiting | None:
        """Somebody waits no more; None: nobody of that id did."""
        waiting = self._all.pop(request_id, None)
        if waiting is None:
            return None
        model = waiting.model
        self._new.pop(request_id, None)
        self._tickets.pop(waiting.ticket, None)
        self._queues[model][waiting.arrival.request_class].discard(request_id)
        self._due.discard(request_id)
        self._counts[model] -= 1
        self._tokens[model, waiting.arrival.request_class] -= waiting.arrival.cost
        if not self._counts[model]:
            del self._counts[model], self._queues[model]
            for level in RequestClass:
                self._tokens.pop((model, level), None)
        return waiting

    def first(self, model: str) -> Waiting | None:
        """Whose turn it is."""
        queues = self._queues.get(model, {})
        tops = (queues[level].peek() for level in _DOWN if level in queues)
        return next((self._all[top[1]] for top in tops if top is not None), None)

    def hand_in(self, waiting: Waiting, ticket: str) -> None:
        """Somebody is in the actor's line from now on, under this name."""
        waiting.ticket = ticket
        self._tickets[ticket] = waiting
        self._new.pop(waiting.request_id, None)

    def not_handed_in(self, most: int, but: Callable[[str], bool]) -> list[Waiting]:
        """So many of those who are not in the actor's line, save of some models: higher classes first, then whoever
        came first. O(n)."""
        if not most or not self._new:
            return []
        found = (one for one in self._new.values() if not but(one.model))
        return heapq.nsmallest(most, found, lambda one: (-one.arrival.request_class, one.arrived_s))

    def full(self, model: str, policy: Policy, level: RequestClass) -> bool:
        """Whether those of a class, or all, are as many as may wait."""
        counts, tokens = self.by_class(model), {one: self._tokens[model, one] for one in RequestClass}
        bound = policy.classes.get(level, ClassBound())
        of_class = _beyond(counts[level], bound.max_queued, tokens[level], bound.max_queued_tokens)
        most, most_tokens = policy.max_queued, policy.max_queued_tokens
        return of_class or _beyond(sum(counts.values()), most, sum(tokens.values()), most_tokens)

    def take(self, ticket: str) -> Waiting | None:
        """The actor has decided on a ticket: who had it waits no more; None: nobody waits under it (any more)."""
        waiting = self._tickets.get(ticket)
        return None if waiting is None else self.remove(waiting.request_id)

    def forget_tickets(self) -> None:
        """The actor's line is no more, or another one."""
        self._tickets.clear()
        for request_id, waiting in self._all.items():
            if waiting.ticket:
                waiting.arrival = replace(waiting.arrival, accepted=True)
            waiting.ticket, waiting.status, waiting.looks, waiting.drawn = "", None, False, None
            self._new[request_id] = waiting

    def late(self, now: float) -> Waiting | None:
        """Somebody whose wait is over."""
        top = self._due.peek()
        return None if top is None or now < top[0][0] else self._all[top[1]]

    def next_due(self) -> float | None:
        """When the next wait is over."""
        top = self._due.peek()
        return None if top is None else top[0][0]


def _beyond(requests: int, max_requests: int | None, tokens: int, max_tokens: int | None) -> bool:
    return (max_requests is not None and requests >= max_requests) or (max_tokens is not None and tokens >= max_tokens)
