"""The input of a scaling policy for one model, and its decision: frozen values.

Requests are counted, not sequences: a request with n=8 counts once. Counts are of the newest samples, which may be one
or two metrics intervals old.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Metrics intervals after which a number of a replica counts no more: one on a busy machine misses one or two reports,
# hardly ever four in a row.
STALE_INTERVALS = 5.0


class Cause(StrEnum):
    """What has decided the number of replicas: the last rule that applied. A metric's label."""

    LOAD = "load"  # the requests that wait and run
    LOOK_BACK = "look_back"  # the load's average: the present load alone would need another number
    ROWS = "batch_rows"  # only rows of batches, which keep one replica
    FORECAST = "forecast"  # what earlier days had at this time
    COLD_START = "cold_start"  # requests wait, and no replica runs
    IDLE = "idle"  # nothing waits or runs
    STARTING = "starting"  # kept while a replica starts
    UNREPORTED = "unreported"  # kept, because not every router has reported
    ROLLOUT = "rollout"  # kept, because running replicas have to be replaced and there is no room for more
    FAILED = "failed"  # kept, because the policy failed
    MEMORY = "memory"  # fewer than the load needs: memory for more lacks
    MAX_GPUS = "max_gpus"  # fewer than the load needs: the bound of all models
    MIN_REPLICAS = "min_replicas"
    MAX_REPLICAS = "max_replicas"


@dataclass(frozen=True, slots=True)
class Signals:
    """The state of one model at one time.

    Args:
        running: engine replicas that Serve counts as running.
        target: Serve's present target number of replicas.
        waiting: requests in the routers' queues.
        granted: requests the routers have granted to engine replicas; a request is in one router, and either waits or
            is granted.
        rows: those of both that are no load: rows of batches, which use what is idle and keep one replica.
        executing: running requests reported by the running engine replicas, without such rows.
        complete: whether every running router replica has reported lately.
        cold_start_requested: whether a router reports through Serve, without a count, that a first replica is awaited.
        min_replicas, max_replicas: the bounds.
        target_ongoing: the target number of requests per replica, waiting ones included.
        look_back_s: the span to average over, in seconds.
        blocked: replicas that wait for memory; further replicas would wait behind them.
        unplaced: starting replicas for which Ray has found no place.
        outdated: running replicas that Serve still has to replace, for their settings have changed.
        stopping: replicas that are about to end, and so to leave their place.
        in_time: of those that wait, the requests that by the queue's own forecast start within their class's level.
        slots: requests that a running replica can run at once, in the mean; 0: not known.
        start_s: for how long the start of a replica has taken; 0: not known.
        arrived_tokens_s, served_tokens_s: tokens of requests that came, and that were served, a second; 0: not known.
        now: seconds of one monotonic clock.

    Counts are finite and not negative (`readings.count`). Serve and the settings have checked the bounds.
    """

    running: int
    target: int
    waiting: float
    granted: float
    executing: float
    complete: bool
    cold_start_requested: bool
    min_replicas: int
    max_replicas: int
    target_ongoing: float
    look_back_s: float
    now: float
    blocked: float = 0.0
    unplaced: int = 0
    outdated: int = 0
    stopping: int = 0
    rows: float = 0.0
    in_time: float = 0.0
    slots: float = 0.0
    start_s: float = 0.0
    arrived_tokens_s: float = 0.0
    served_tokens_s: float = 0.0

    @property
    def load(self) -> float:
        """The model's requests, each counted once, without rows that are no load.

        A router samples waiting and granted requests at one moment, so a request that moves from one to the other is
        in their sum once. Engines also count the running requests of draining routers, which Serve reports nowhere
        else. The load is the larger of the two numbers; their sum would count most requests twice.
        """
        return max(self.waiting + self.granted - self.rows, self.executing)

    @property
    def at_work(self) -> bool:
        """Whether a replica starts that has a place and memory."""
        return self.running + self.unplaced + self.blocked < self.target


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of replicas for a model, the load (requests, averaged) behind it, the reason as text and its cause."""

    replicas: int
    load: float
    reason: str
    cause: Cause = Cause.LOAD


@dataclass(frozen=True, slots=True)
class ScaleUpLimit:
    """The number of further replicas with reserved memory, and the shortage for others."""

    replicas: int
    reason: str
