"""When a router moves its requests off replicas that drain.

A replica drains since it says so, or since it has left Serve's set (a scale-down, a rolling change, a leaving node).
What is left at the deadline is moved: the router takes it back and runs it elsewhere, before the replica ends with it.

Invariant: while a replica drains, its deadline never moves back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DrainTimers:
    """One timer for each replica that drains. Args: move_all: moves all requests off a replica; may be called twice."""

    def __init__(self, move_all: Callable[[str], object]) -> None:
        self._move_all = move_all
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}  # with its time: uvloop's handles have none

    def begin(self, replica_id: str, within_s: float) -> None:
        """A replica drains: its requests may finish within this time."""
        loop = asyncio.get_running_loop()
        due = loop.time() + within_s
        known = self._timers.get(replica_id)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        self._timers[replica_id] = due, loop.call_at(due, self._move_all, replica_id)

    def end(self, replica_id: str) -> None:
        """The replica takes requests again, or is gone."""
        known = self._timers.pop(replica_id, None)
        if known is not None:
            known[1].cancel()
