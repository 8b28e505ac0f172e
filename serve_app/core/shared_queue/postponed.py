"""Requests that arrive while their model recovers: they are admitted together, a part in each event, models in turn
and of each the oldest first.

Invariant: no request of a model that arrives later is admitted before those of it that were postponed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from operator import itemgetter
from typing import NamedTuple

from serve_app.core.queue import Arrival
from serve_app.core.shared_queue.model_turns import ModelTurns
from serve_app.core.shared_queue.scope import AT_ONCE

HAND_IN_S = 0.05  # for all routers to submit their waiting requests again: half a dozen round trips


class PostponedRequest(NamedTuple):
    """Its deadline and its time are in the actor's clock."""

    router: str
    model: str
    arrival: Arrival
    arrived_s: float


class PostponedRequests:
    """The requests. O(1) per method, unless stated."""

    def __init__(self) -> None:
        self.by_router: dict[str, dict[str, PostponedRequest]] = {}  # by router and ticket
        self.recovering: frozenset[str] = frozenset()  # models whose queues can grant nothing yet
        self._gather_until: dict[str, float] = {}  # by recovered model: when its requests are admitted
        self._ready = ModelTurns[tuple[str, str]]()  # by ticket: routers and tickets of those that are admitted next

    def recover(self, models: frozenset[str], now: float) -> None:
        """Exactly these models recover; the others have recovered."""
        self.gather(self.recovering - models, now)
        self.recovering = models

    def gather(self, models: Iterable[str], now: float) -> None:
        """These models have recovered: wait until all routers have submitted their requests again."""
        self._gather_until.update(dict.fromkeys(models, now + HAND_IN_S))

    def gathers(self, model: str, now: float) -> bool:
        """Whether a request of this model that arrives is postponed."""
        return model in self.recovering or model in self._ready or now < self._gather_until.get(model, now)

    def add(self, router: str, model: str, arrival: Arrival, arrived_s: float) -> None:
        postponed = PostponedRequest(router, model, arrival, arrived_s)
        self.by_router.setdefault(router, {})[arrival.request_id] = postponed
        if model in self._ready:
            self._ready.add(model, arrival.request_id, (router, arrival.request_id))

    def has(self, router: str, ticket: str) -> bool:
        """Whether a request is here."""
        return ticket in self.by_router.get(router, ())

    def forget(self, router: str, ticket: str) -> PostponedRequest | None:
        """A request has ended, or is admitted; returns it. An unknown ticket changes nothing."""
        requests = self.by_router.get(router, {})
        found = requests.pop(ticket, None)
        if found is not None and not requests:
            del self.by_router[router]
        return found

    def forget_router(self, router: str) -> None:
        """A router's incarnation has ended."""
        self.by_router.pop(router, None)

    def take(self, now: float) -> list[PostponedRequest]:
        """The requests to admit next, at most `AT_ONCE`. O(n log n) once when a model has recovered."""
        for model in [model for model, until in self._gather_until.items() if until <= now]:
            del self._gather_until[model]
            waits = [
                (one.arrived_s, (one.router, ticket))
                for requests in self.by_router.values()
                for ticket, one in requests.items()
                if one.model == model
            ]
            for _, (router, ticket) in sorted(waits, key=itemgetter(0)):
                self._ready.add(model, ticket, (router, ticket))
        taken: list[PostponedRequest] = []
        while len(taken) < AT_ONCE and (known := self._ready.take()) is not None:
            found = self.forget(*known)
            if found is not None:
                taken.append(found)
        return taken

    def next_due(self) -> float | None:
        """When `take` has something; None: nothing is scheduled. O(models)."""
        return -inf if self._ready else min(self._gather_until.values(), default=None)
