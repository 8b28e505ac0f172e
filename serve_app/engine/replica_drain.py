"""How an engine replica drains: until when its requests may finish, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.core.memory import DrainReport
from serve_app.core.times import MOVE_S


@dataclass(slots=True)
class ReplicaDrain:
    """The drain of one replica. Pure: times are of one monotonic clock.

    Args:
        until: when its routers stop what still runs, to continue elsewhere.
    """

    until: float
    finished: int = 0
    moved: int = 0

    def on_request_ended(self, now: float, *, by_its_router: bool) -> None:
        """A request has ended here, or its router has ended it: after the deadline, to continue it elsewhere."""
        if not by_its_router:
            self.finished += 1
        elif now >= self.until:
            self.moved += 1

    def report(self, running: int, now: float) -> DrainReport:
        """What the quota actor is told, with so many requests that still run."""
        return DrainReport(max(0.0, self.until - now), running, self.finished, self.moved)

    def left_s(self, now: float) -> float:
        """Until the replica ends with whatever still runs."""
        return self.until + MOVE_S - now
