"""Requests at the quota actor that wait for answers before they can be decided.

Invariant: a request is here until all its answers have come, or its time is over; then it is taken out once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.core.limits.messages import LimitRequest
from serve_app.core.limits.scopes import Scope

Answer = tuple[str, str]  # scope, and the router that is to give its credit back; empty: the store is asked


@dataclass(slots=True)
class Undecided:
    """One request. `until`: it waits no longer; infinite: until the actor has recovered."""

    router: str
    request: LimitRequest
    until: float = math.inf
    answers: set[Answer] = field(default_factory=set)
    scopes: tuple[Scope, ...] = ()


class UndecidedRequests:
    """See the module. O(log n) per request, O(n) per answer."""

    def __init__(self) -> None:
        self._by_ticket: dict[str, Undecided] = {}
        self._ready: deque[str] = deque()
        self._timers: list[tuple[float, str]] = []

    def add(self, undecided: Undecided) -> None:
        self._by_ticket[undecided.request.ticket] = undecided
        for scope in undecided.scopes:
            scope.undecided += 1
        if undecided.until < math.inf:
            heapq.heappush(self._timers, (undecided.until, undecided.request.ticket))

    def take(self, ticket: str) -> Undecided | None:
        """Take a request out; None: it is not here."""
        undecided = self._by_ticket.pop(ticket, None)
        for scope in () if undecided is None else undecided.scopes:
            scope.undecided -= 1
        return undecided

    def on_answer(self, answer: Answer) -> None:
        """An answer has come."""
        for ticket, undecided in self._by_ticket.items():
            if answer in undecided.answers:
                undecided.answers.discard(answer)
                if not undecided.answers:
                    self._ready.append(ticket)

    def end_router_session(self, router: str) -> None:
        """A router's session has ended: it asks again, and gives no answers of that session."""
        for ticket, undecided in list(self._by_ticket.items()):
            if undecided.router == router:
                self.take(ticket)
            for answer in [one for one in undecided.answers if one[1] == router]:
                self.on_answer(answer)

    def set_all_ready(self) -> None:
        """The actor has recovered."""
        self._ready += self._by_ticket

    def take_ready(self, now: float) -> Iterator[Undecided]:
        """Take out the requests that can be decided, in order; each before the next is looked at."""
        while self._timers and self._timers[0][0] <= now:
            self._ready.append(heapq.heappop(self._timers)[1])
        while self._ready:
            undecided = self.take(self._ready.popleft())
            if undecided is not None:
                yield undecided

    def next_due(self) -> float | None:
        """When the time of the next one is over; also of one that was taken out before."""
        return self._timers[0][0] if self._timers else None
