"""When a router stops its requests on replicas that drain.

A replica drains since it says so, or since it has left Serve's set (a scale-down, a rolling change, a leaving node).
What is left at the deadline continues elsewhere: the router takes it back before the replica ends with it.
What the replica has not given back `OVERDUE_S` later is given up with its connection: it should have ended, by itself
or by Serve, and stands still with its connections open (a process that the kernel cannot kill, a node that hangs).

Invariant: while a replica drains, its deadline is never put off; then no request waits for it longer than `OVERDUE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.core.times import OVERDUE_S


class DrainTimers:
    """One timer for each replica that drains.

    Args:
        stop_all: stops all requests on a replica, to continue elsewhere; may be called twice.
        give_up: ends the requests that are still there.
    """

    def __init__(self, stop_all: Callable[[str], object], give_up: Callable[[str], object]) -> None:
        self._stop_all = stop_all
        self._give_up = give_up
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}  # with the deadline: uvloop's handles have none

    def begin(self, replica_id: str, within_s: float) -> None:
        """A replica drains: its requests may finish within this time."""
        loop = asyncio.get_running_loop()
        due = loop.time() + within_s
        known = self._timers.get(replica_id)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        self._timers[replica_id] = due, loop.call_at(due, self._on_due, replica_id, due)

    def end(self, replica_id: str) -> None:
        """The replica takes requests again, or is gone."""
        known = self._timers.pop(replica_id, None)
        if known is not None:
            known[1].cancel()

    def _on_due(self, replica_id: str, due: float) -> None:
        overdue = asyncio.get_running_loop().call_at(due + OVERDUE_S, self._give_up, replica_id)
        self._timers[replica_id] = due, overdue  # first: where nothing is left to stop, the replica is dropped
        self._stop_all(replica_id)
