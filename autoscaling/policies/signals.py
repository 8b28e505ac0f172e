"""What a scaling policy sees of one model, and what it answers: frozen values.

Requests are counted, not sequences: a request with n=8 counts once. Counts are numbers as of the newest samples, which
may be a metrics interval or two old.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signals:
    """One model at one moment.

    Args:
        running: engine replicas that Serve counts as running.
        target: how many Serve wants at present.
        waiting: requests in the routers' lines.
        granted: requests the routers have given to engine replicas; a request is in one router, and either waits or is
            granted.
        executing: requests the running engine replicas say they run.
        complete: whether every router replica that runs has told its numbers lately.
        rung: whether a router says through Serve that somebody waits for a first replica, without saying how many.
        min_replicas, max_replicas: the bounds.
        target_ongoing: requests a replica should have, waiting ones included.
        look_back_s: the span to average over, in seconds.
        blocked: replicas that wait for memory; more of them would wait behind those.
        now: seconds of one monotonic clock.

    Raises:
        ValueError: a bound or a count that is out of range or not a number.
    """

    running: int
    target: int
    waiting: float
    granted: float
    executing: float
    complete: bool
    rung: bool
    min_replicas: int
    max_replicas: int
    target_ongoing: float
    look_back_s: float
    now: float
    blocked: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= count < float("inf") for count in (self.waiting, self.granted, self.executing, self.blocked)):
            raise ValueError(f"counts must be finite and not negative: {self}")
        if min(self.running, self.target, self.min_replicas) < 0 or self.max_replicas < self.min_replicas:
            raise ValueError(f"replica counts out of range: {self}")
        if not (self.target_ongoing > 0 and self.look_back_s >= 0 and self.now == self.now):
            raise ValueError(f"target_ongoing, look_back_s or now out of range: {self}")

    @property
    def load(self) -> float:
        """Requests there are, each counted once.

        A router samples what waits and what it has granted at one moment, so a request that moves from one to the other
        is in the sum once. Engines see what routers that are leaving still have running, which Serve tells nobody else.
        The larger of the two; their sum would count most requests twice.
        """
        return max(self.waiting + self.granted, self.executing)


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a model should have, from which load (requests, averaged), and why."""

    replicas: int
    load: float
    reason: str


@dataclass(frozen=True, slots=True)
class Room:
    """For how many more replicas memory is kept, and what is missing for others."""

    held: int
    why: str
