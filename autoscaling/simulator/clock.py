"""Virtual time: events in the order of their moments; at one moment, the first that was planned comes first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Events in order of their moments. O(log events) each."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Plan an event; one for a moment that is over happens now."""
        heapq.heappush(self._events, (max(moment, self.now), next(self._order), event))

    def after(self, span_s: float, event: Callable[[], None]) -> None:
        """Plan an event for `span_s` seconds from now."""
        heapq.heappush(self._events, (self.now + span_s, next(self._order), event))

    def every(self, span_s: float, event: Callable[[], None]) -> None:
        """Repeat an event, for the first time after one span."""

        def again() -> None:
            event()
            self.after(span_s, again)

        self.after(span_s, again)

    def run(self, span_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """So many seconds, or until something holds after an event."""
        end_s = self.now + span_s
        events = self._events
        while events and events[0][0] <= end_s and not until():
            self.now, _, event = heapq.heappop(events)
            event()
        if not until():
            self.now = end_s
