"""The input of a scaling policy for one model, and its decision: frozen values.

Requests are counted, not sequences: a request with n=8 counts once. Counts are of the newest samples, which may be one
or two metrics intervals old.
"""

from __future__ import annotations

from collections.abc import Iterable
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
class ClassSignals:
    """One class of a model's requests.

    Args:
        request_class: its name.
        waiting, granted: see `Signals`; those that wait outside the queue, for a first replica or between two attempts,
            have no class here.
        in_time: of those that wait, the requests that start within the level of the class.
        forecast_s: seconds until the last waiting one starts, by the queue's own forecast; None: not known, or none
            waits.
        oldest_wait_s: seconds for which the longest waiting one has waited; 0: none waits.
    """

    request_class: str
    waiting: float = 0.0
    granted: float = 0.0
    in_time: float = 0.0
    forecast_s: float | None = None
    oldest_wait_s: float = 0.0

    @property
    def late(self) -> float:
        """Requests that start after their level, or are not known to start within it."""
        return max(0.0, self.waiting - self.in_time)


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
        classes: those that have requests, from the highest.
        waiting_tokens: KV tokens that waiting requests are estimated to need.
        arrived_tokens_s, served_tokens_s: tokens a second, prompt and output, without rows that are no load, over the
            last half minute: what came to the routers, with the estimated output, and what engines served.
        kv_use, slot_use: the shares of the KV cache and of the slots in use, 0 to 1, in the mean of running replicas.
        starting_s: for how long the oldest of the replicas that start and have a place has started; 0: none does.
        room: further replicas for which there is a place now; None: nobody knows.
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
    classes: tuple[ClassSignals, ...] = ()
    waiting_tokens: float = 0.0
    arrived_tokens_s: float = 0.0
    served_tokens_s: float = 0.0
    kv_use: float = 0.0
    slot_use: float = 0.0
    starting_s: float = 0.0
    room: int | None = None

    @property
    def load(self) -> float:
        """The model's requests, each counted once, without rows that are no load.

        A router samples waiting and granted requests at one moment, so a request that moves from one to the other is
        in their sum once. Engines also count the running requests of draining routers, which Serve reports nowhere
        else. The load is the larger of the two numbers; their sum would count most requests twice.
        """
        return max(self.waiting + self.granted - self.rows, self.executing)

    @property
    def oldest_wait_s(self) -> float:
        """Seconds for which the longest waiting request of all classes has waited; 0: none waits."""
        return max((one.oldest_wait_s for one in self.classes), default=0.0)

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


def merged(parts: Iterable[ClassSignals]) -> tuple[ClassSignals, ...]:
    """The classes of all routers from those of each: each class once, in the order of their first parts. Requests are
    added; of the waits, which all routers know of the same queue, the longest counts."""
    found: dict[str, ClassSignals] = {}
    for part in parts:
        name = part.request_class
        before = found.get(name)
        if before is None:
            found[name] = part
            continue
        forecasts = [one for one in (before.forecast_s, part.forecast_s) if one is not None]
        found[name] = ClassSignals(
            name,
            before.waiting + part.waiting,
            before.granted + part.granted,
            before.in_time + part.in_time,
            max(forecasts, default=None),
            max(before.oldest_wait_s, part.oldest_wait_s),
        )
    return tuple(found.values())
