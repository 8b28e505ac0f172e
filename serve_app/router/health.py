"""Which replicas have failed and get no requests, or one at a time: `core.routing.outliers` with a clock and a timer.

Invariant: each request sent to a replica has exactly one result. A replica on probation has one request, its probe,
unless it is the only replica: limiting the only replica would gain nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.core.routing import (
    Eject,
    FailureKind,
    OutlierAction,
    OutlierDetector,
    OutlierState,
    OutlierVerdict,
    Probe,
)
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError

logger = logging.getLogger("ray.serve")


class Health:
    """The health of the replicas of one model, as one router observes it.

    Args:
        on_change: called with a replica whose availability may have changed.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._outliers = OutlierDetector()
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self._replicas: set[str] = set()
        self._probes: dict[str, str | None] = {}  # by replica on probation: the request id of its probe; None: not sent
        self.ejections = dict.fromkeys(FailureKind, 0)  # so far, by reason

    @property
    def ejected_count(self) -> int:
        """Number of replicas that are ejected or on probation."""
        return self._outliers.ejected_count

    def add(self, replica_id: str) -> None:
        """Add a replica that takes requests."""
        self._replicas.add(replica_id)
        self._outliers.on_replica(replica_id, time.monotonic())

    def remove(self, replica_id: str) -> None:
        """Remove a replica; if it comes back, it has no history."""
        self._replicas.discard(replica_id)
        self._probes.pop(replica_id, None)
        self._perform(self._outliers.on_replica_gone(replica_id, time.monotonic()))

    def is_healthy(self, replica_id: str) -> bool:
        """Whether a replica is neither ejected nor on probation."""
        return self._outliers.state(replica_id) is OutlierState.HEALTHY

    def is_on_probation(self, replica_id: str) -> bool:
        return self._outliers.state(replica_id) is OutlierState.PROBATION

    def takes_one_request(self, replica_id: str) -> bool:
        """Whether the replica takes one request at a time: it is on probation and not the only replica."""
        return self.is_on_probation(replica_id) and len(self._replicas) > 1

    def is_usable(self, replica_id: str) -> bool:
        """Whether the replica takes a request now."""
        if self.takes_one_request(replica_id):
            return self._needs_probe(replica_id)
        return self._outliers.state(replica_id) is not OutlierState.EJECTED

    def replica_to_probe(self) -> str | None:
        """A replica whose probe has not been sent yet."""
        return next((name for name, probe in self._probes.items() if probe is None), None)

    def on_granted(self, request_id: str, replica_id: str) -> None:
        """Take a granted request as the replica's probe, if it needs one."""
        if self._needs_probe(replica_id):
            self._probes[replica_id] = request_id

    def on_released(self, request_id: str, replica_id: str) -> None:
        """The request has released its grant; if it was a probe without a result, the replica needs another probe."""
        if self._probes.get(replica_id) == request_id:
            self._probes[replica_id] = None

    def track_result(self, replica_id: str) -> ResultReporter:
        """Begin to track a request that is sent to the replica now."""
        return ResultReporter(self, replica_id, time.monotonic())

    def record_result(self, replica_id: str, verdict: OutlierVerdict, sent_at: float) -> None:
        """Record the result of a request that was sent to the replica at `sent_at`."""
        self._perform(self._outliers.on_result(replica_id, verdict, sent_at, time.monotonic()))

    def _needs_probe(self, replica_id: str) -> bool:
        return self._probes.get(replica_id, "") is None

    def _perform(self, actions: list[OutlierAction]) -> None:
        for action in actions:
            self._probes.pop(action.replica_id, None)
            if isinstance(action, Probe):
                self._probes[action.replica_id] = None
            elif isinstance(action, Eject):
                self.ejections[action.reason] += 1
                logger.warning(
                    "replica %s gets no requests for %.0f s (%s)",
                    action.replica_id,
                    action.duration_s,
                    action.reason.value,
                )
            else:
                logger.info("replica %s gets requests again", action.replica_id)
            self._on_change(action.replica_id)
        if actions:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._outliers.next_due()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._outliers.on_tick(time.monotonic()))
        self._set_timer()  # the loop's clock may be early by its resolution; then nothing was due


class ResultReporter:
    """Reports the one result of a request that was sent to a replica.

    A probe reports at its first frame, to end the probation soon; any other request at its end, since an engine that
    breaks every answer in the middle has failed, too. Until the result is known, the end counts as the client's.
    """

    def __init__(self, health: Health, replica_id: str, sent_at: float) -> None:
        self._health = health
        self._replica_id = replica_id
        self._sent_at = sent_at
        self._verdict: OutlierVerdict = OutlierVerdict.CLIENT
        self._is_reported = False

    def on_first_frame(self, status: int) -> None:
        """The first frame has arrived, with this HTTP status."""
        if status < 400:
            self._verdict = OutlierVerdict.OK
        elif status >= 500:
            self._verdict = OutlierVerdict.FAILED
        if self._health.is_on_probation(self._replica_id):
            self.report()

    def on_error(self, error: ServeAppError, *, connection_lost: bool) -> None:
        """The request failed; `connection_lost`: its connection to the replica broke."""
        if connection_lost or isinstance(error, EngineUnreachable):
            self._verdict = OutlierVerdict.LOST
        elif isinstance(error, EngineFailed) and error.code == EngineFailed.code:  # other codes name the client's fault
            self._verdict = OutlierVerdict.FAILED

    def report(self) -> None:
        """Report the result. Idempotent."""
        if not self._is_reported:
            self._is_reported = True
            self._health.record_result(self._replica_id, self._verdict, self._sent_at)
