"""Outlier detection: which replicas get no requests for a while because requests on them have failed.

Rules
- A replica is ejected when the connection to it is lost, when `MAX_CONSECUTIVE_FAILURES` requests in a row have failed
  on it since its engine had died, or when, of at least `MIN_RESULTS` recent results, `MAX_FAILURE_RATE` are such
  failures. Disconnects of a client, and errors that a living engine answers, do not count.
- The first ejection lasts `FIRST_EJECTION_S`, each next one twice as long, up to `MAX_EJECTION_S`; each
  `FORGET_EJECTIONS_S` without an ejection reduces the count by one. Then the replica gets one request, the probe (the
  half-open state of a circuit breaker): success readmits the replica, failure ejects it again, any other end leads to
  another probe.
- Results of requests that were sent before the replica's last change of state do not count.
- At most `MAX_EJECTED_SHARE` of the replicas, and at least one, may be ejected or on probation: if more fail, the cause
  is hardly the replicas, and to refuse all requests would be worse. If the removal of a replica lowers that limit, the
  replica whose ejection ends first is readmitted.
- While no other replica is healthy, an ejection lasts `FIRST_EJECTION_S`: a longer one would be an outage.

Invariant: after every event, at most `max_ejected` replicas are ejected or on probation.

Events in, actions out; `now` is in seconds of one monotonic clock. `on_result` is O(1) unless it ejects, all others
O(replicas) at most.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from serve_app.core.times import FIRST_EJECTION_S, FORGET_EJECTIONS_S, MAX_EJECTION_S

MAX_CONSECUTIVE_FAILURES = 3  # two failures in a row can be chance
MAX_FAILURE_RATE = 0.5  # above it any other replica is better
MIN_RESULTS = 10.0  # fewer results give no reliable rate
WINDOW_S = 30.0  # results fade by 1/e in it; a replica with load has several results in it
MAX_EJECTED_SHARE = 0.5  # for few, expensive replicas; Envoy's 10% is meant for many


class OutlierVerdict(enum.Enum):
    """The result of a request with regard to its replica."""

    OK = "ok"  # the replica produced output
    FAILED = "failed"  # the replica said that its engine has died
    LOST = "lost"  # the connection to the replica broke: one such result ejects
    CLIENT = "client"  # a bad request, one that the engine could not handle, or the client left: does not count


class FailureKind(enum.StrEnum):
    """Why a replica was ejected; a label of the metrics."""

    LOST = "lost"
    CONSECUTIVE = "consecutive"
    RATE = "rate"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Eject:
    """Send no request to the replica until a `Probe` or `Readmit`."""

    replica_id: str
    duration_s: float
    reason: FailureKind


@dataclass(frozen=True, slots=True)
class Probe:
    """Send exactly one request to the replica."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """The replica is healthy again: send requests as to any other."""

    replica_id: str


OutlierAction = Eject | Probe | Readmit


class OutlierState(enum.Enum):
    HEALTHY = "in"
    EJECTED = "ejected"
    PROBATION = "probation"


@dataclass(slots=True)
class _ObservedReplica:
    state_since: float
    state: OutlierState = OutlierState.HEALTHY
    ejection_ends_at: float = math.inf  # infinite while not ejected
    ejections: int = 0
    consecutive_failures: int = 0
    failures: float = 0.0
    results: float = 0.0
    counted_at: float = 0.0  # the last result, if any

    def enter_state(self, state: OutlierState, now: float) -> None:
        self.state = state
        self.state_since = now
        self.ejection_ends_at = math.inf
        self.consecutive_failures = 0
        self.failures = 0.0
        self.results = 0.0
        self.counted_at = now

    def count_result(self, failed: bool, now: float) -> None:
        keep = math.exp(-max(0.0, now - self.counted_at) / WINDOW_S)
        self.counted_at = max(self.counted_at, now)
        self.failures = self.failures * keep + failed
        self.results = self.results * keep + 1.0
        self.consecutive_failures = self.consecutive_failures + 1 if failed else 0


class OutlierDetector:
    """The health of the replicas of one model, as one router observes it."""

    def __init__(self) -> None:
        self._replicas: dict[str, _ObservedReplica] = {}

    @property
    def ejected_count(self) -> int:
        """Replicas that are ejected or on probation."""
        return sum(replica.state is not OutlierState.HEALTHY for replica in self._replicas.values())

    @property
    def max_ejected(self) -> int:
        """The most replicas that may be ejected or on probation: at least one if there is a replica."""
        count = len(self._replicas)
        return min(count, max(1, math.floor(MAX_EJECTED_SHARE * count)))

    def state(self, replica_id: str) -> OutlierState | None:
        """None: an unknown replica."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.state

    def on_replica(self, replica_id: str, now: float) -> None:
        """Add a replica; a known one changes nothing."""
        self._replicas.setdefault(replica_id, _ObservedReplica(now))

    def on_replica_gone(self, replica_id: str, now: float) -> list[OutlierAction]:
        """Remove a replica; an unknown one changes nothing. Returns `Readmit` for replicas above the new limit."""
        self._replicas.pop(replica_id, None)
        actions: list[OutlierAction] = []
        while self.ejected_count > self.max_ejected:  # first one on probation, else the one whose ejection ends first
            out = [(name, one) for name, one in self._replicas.items() if one.state is not OutlierState.HEALTHY]
            first, _ = min(out, key=lambda entry: (entry[1].state is OutlierState.EJECTED, entry[1].ejection_ends_at))
            actions.append(self._readmit(first, now))
        return actions

    def on_result(self, replica_id: str, verdict: OutlierVerdict, sent_at: float, now: float) -> list[OutlierAction]:
        """A request has ended or has produced its first token. Each sent request has exactly one result.

        If a failure that calls for an ejection returns no `Eject`, `max_ejected` is reached: the caller waits before
        it tries the replica again.

        Args:
            sent_at: the moment at which the request was sent to the replica.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state is OutlierState.EJECTED or sent_at < replica.state_since:
            return []
        if replica.state is OutlierState.PROBATION:
            if verdict is OutlierVerdict.OK:
                return [self._readmit(replica_id, now)]
            if verdict is OutlierVerdict.CLIENT:
                return [Probe(replica_id)]
            return [self._eject(replica_id, replica, FailureKind.PROBE, now)]
        if verdict is OutlierVerdict.CLIENT:
            return []
        replica.count_result(verdict is not OutlierVerdict.OK, now)
        why = self._ejection_reason(replica, verdict)
        if why is None or self.ejected_count >= self.max_ejected:
            return []
        return [self._eject(replica_id, replica, why, now)]

    def on_tick(self, now: float) -> list[OutlierAction]:
        """Put the replicas on probation whose ejection is over."""
        due = [name for name, replica in self._replicas.items() if replica.ejection_ends_at <= now]
        for replica_id in due:
            self._replicas[replica_id].enter_state(OutlierState.PROBATION, now)
        return [Probe(replica_id) for replica_id in due]

    def next_due(self) -> float | None:
        """When the next ejection ends; None: no replica is ejected."""
        due = min((replica.ejection_ends_at for replica in self._replicas.values()), default=math.inf)
        return None if due == math.inf else due

    def _ejection_reason(self, replica: _ObservedReplica, verdict: OutlierVerdict) -> FailureKind | None:
        if verdict is OutlierVerdict.OK:
            return None  # a success never ejects, even if it completes `MIN_RESULTS`
        if verdict is OutlierVerdict.LOST:
            return FailureKind.LOST
        if replica.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            return FailureKind.CONSECUTIVE
        if replica.results >= MIN_RESULTS and replica.failures >= MAX_FAILURE_RATE * replica.results:
            return FailureKind.RATE
        return None

    def _eject(self, replica_id: str, replica: _ObservedReplica, reason: FailureKind, now: float) -> Eject:
        if reason is not FailureKind.PROBE:
            forgiven = int((now - replica.state_since) / FORGET_EJECTIONS_S)
            replica.ejections = max(0, replica.ejections - forgiven)
        replica.enter_state(OutlierState.EJECTED, now)
        alone = self.ejected_count == len(self._replicas)
        for_s = FIRST_EJECTION_S if alone else min(MAX_EJECTION_S, FIRST_EJECTION_S * 2.0 ** min(replica.ejections, 30))
        replica.ejections += 1
        replica.ejection_ends_at = now + for_s
        return Eject(replica_id, for_s, reason)

    def _readmit(self, replica_id: str, now: float) -> Readmit:
        self._replicas[replica_id].enter_state(OutlierState.HEALTHY, now)
        return Readmit(replica_id)
