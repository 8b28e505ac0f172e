"""Requests that arrive while their model recovers: they are admitted together, the oldest first, a part in each event.

Invariant: no request that arrives later is admitted before those that were postponed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.requests import AT_ONCE

HAND_IN_S = 0.05  # for all routers to submit their waiting requests again: half a dozen round trips


class PostponedRequest(NamedTuple):
    """Its deadline and its time are in the actor's clock."""

    router: str
    model: str
    arrival: Arrival
    arrived_s: float


class PostponedRequests:
    """The requests, by ticket. O(1) per method, unless stated."""

    def __init__(self) -> None:
        self.by_ticket: dict[str, PostponedRequest] = {}
        self._gather_until: dict[str, float] = {}  # by recovered model: when its requests are admitted
        self._ready: dict[str, deque[str]] = {}  # by model: the tickets that are admitted next, the first one first

    def gather(self, models: Iterable[str], now: float) -> None:
        """These models have recovered: wait until all routers have submitted their requests again."""
        self._gather_until.update(dict.fromkeys(models, now + HAND_IN_S))

    def gathers(self, model: str, now: float) -> bool:
        """Whether a request of this model that arrives is postponed."""
        return model in self._ready or now < self._gather_until.get(model, now)

    def add(self, router: str, model: str, arrival: Arrival, arrived_s: float) -> None:
        self.by_ticket[arrival.request_id] = PostponedRequest(router, model, arrival, arrived_s)
        if model in self._ready:
            self._ready[model].append(arrival.request_id)

    def forget(self, ticket: str) -> None:
        """A request has ended. An unknown ticket changes nothing."""
        self.by_ticket.pop(ticket, None)

    def forget_routers(self, routers: Sequence[str]) -> None:
        """Routers' incarnations have ended. O(postponed requests)."""
        for ticket in [one for one, found in self.by_ticket.items() if found.router in routers]:
            del self.by_ticket[ticket]

    def take(self, now: float) -> list[PostponedRequest]:
        """The requests to admit next, at most `AT_ONCE`. O(n log n) once when a model has recovered."""
        for model in [model for model, until in self._gather_until.items() if until <= now]:
            del self._gather_until[model]
            waits = [(one.arrived_s, ticket) for ticket, one in self.by_ticket.items() if one.model == model]
            self._ready[model] = deque(ticket for _, ticket in sorted(waits, key=itemgetter(0)))
        taken: list[PostponedRequest] = []
        for model, tickets in list(self._ready.items()):
            while tickets and len(taken) < AT_ONCE:
                found = self.by_ticket.pop(tickets.popleft(), None)
                if found is not None:
                    taken.append(found)
            if not tickets:
                del self._ready[model]
        return taken

    def next_due(self) -> float | None:
        """When `take` has something; None: nothing is scheduled. O(models)."""
        return -inf if self._ready else min(self._gather_until.values(), default=None)
