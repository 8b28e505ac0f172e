"""Which replicas failed, and so get no requests, or one: `core.routing.outliers` with a clock and the timer for what
falls due.

Invariant: each request sent has one result. A replica on probation has one request that was sent since, its probe,
unless it is the only replica: nothing is gained where nobody else could serve.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from serve_app.core.routing import Action, Eject, FailureKind, Outliers, Probe, State, Verdict
from serve_app.errors import EngineFailed, EngineUnreachable, ServeAppError

logger = logging.getLogger("ray.serve")


class Health:
    """The replicas of one model as one router has found them.

    Args:
        on_change: called with a replica that may have more or less to do from now on.
    """

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._outliers = Outliers()
        self._on_change = on_change
        self._timer: asyncio.TimerHandle | None = None
        self._replicas: set[str] = set()
        self._probes: dict[str, str | None] = {}  # by replica on probation: the request that is its probe, once sent
        self.ejections = dict.fromkeys(FailureKind, 0)  # so far, by reason

    @property
    def out(self) -> int:
        """Replicas that are ejected or on probation."""
        return self._outliers.out

    def came(self, replica_id: str) -> None:
        """A replica takes requests."""
        self._replicas.add(replica_id)
        self._outliers.on_replica(replica_id, time.monotonic())

    def gone(self, replica_id: str) -> None:
        """A replica takes none any more; if it comes back it is as new."""
        self._replicas.discard(replica_id)
        self._probes.pop(replica_id, None)
        self._perform(self._outliers.on_gone(replica_id, time.monotonic()))

    def well(self, replica_id: str) -> bool:
        """Whether nothing is known against a replica."""
        return self._outliers.state(replica_id) is State.IN

    def on_trial(self, replica_id: str) -> bool:
        return self._outliers.state(replica_id) is State.PROBATION

    def takes_one(self, replica_id: str) -> bool:
        """Whether the replica is on probation, where it takes one request at a time; the only replica takes all."""
        return self.on_trial(replica_id) and len(self._replicas) > 1

    def usable(self, replica_id: str) -> bool:
        """Whether the replica takes a request now."""
        if self.takes_one(replica_id):
            return self._wants_probe(replica_id)
        return self._outliers.state(replica_id) is not State.EJECTED

    def wanting(self) -> str | None:
        """A replica whose probe is still to be sent."""
        return next((name for name, probe in self._probes.items() if probe is None), None)

    def begin(self, request_id: str, replica_id: str) -> None:
        """A request has a place on the replica."""
        if self._wants_probe(replica_id):
            self._probes[replica_id] = request_id

    def end(self, request_id: str, replica_id: str) -> None:
        """It has given the place back; a probe without a result is followed by another."""
        if self._probes.get(replica_id) == request_id:
            self._probes[replica_id] = None

    def sent(self, replica_id: str) -> Sent:
        """A request goes to the replica now."""
        return Sent(self, replica_id, time.monotonic())

    def ended(self, replica_id: str, verdict: Verdict, sent: float) -> None:
        """What a request that was sent at this moment says of its replica."""
        self._perform(self._outliers.on_result(replica_id, verdict, sent, time.monotonic()))

    def _wants_probe(self, replica_id: str) -> bool:
        return self._probes.get(replica_id, "") is None

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._probes.pop(action.replica_id, None)
            if isinstance(action, Probe):
                self._probes[action.replica_id] = None
            elif isinstance(action, Eject):
                self.ejections[action.why] += 1
                logger.warning(
                    "replica %s gets no requests for %.0f s (%s)", action.replica_id, action.for_s, action.why.value
                )
            else:
                logger.info("replica %s gets requests again", action.replica_id)
            self._on_change(action.replica_id)
        if actions:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._outliers.next_due()
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._outliers.on_tick(time.monotonic()))
        self._wait()  # the loop's clock may be early by its resolution, and then nothing was due


class Sent:
    """A request that was sent to a replica: tells its one result.

    On a replica on probation that is its first frame, which is what is waited for; else its end, since an engine that
    breaks every answer in the middle has failed, too. Until something is known it is the client's doing.
    """

    def __init__(self, health: Health, replica_id: str, sent: float) -> None:
        self._health = health
        self._replica_id = replica_id
        self._sent = sent
        self._verdict: Verdict = Verdict.CLIENT
        self._told = False

    def began(self, status: int) -> None:
        """The first frame has come, with this HTTP status."""
        if status < 400:
            self._verdict = Verdict.OK
        elif status >= 500:
            self._verdict = Verdict.FAILED
        if self._health.on_trial(self._replica_id):
            self.over()

    def broke(self, error: ServeAppError, *, lost: bool) -> None:
        """It cannot go on; `lost`: the connection broke."""
        if lost or isinstance(error, EngineUnreachable):
            self._verdict = Verdict.LOST
        elif isinstance(error, EngineFailed) and error.code == EngineFailed.code:  # else it names what the client did
            self._verdict = Verdict.FAILED

    def over(self) -> None:
        """It has ended; again changes nothing."""
        if not self._told:
            self._told = True
            self._health.ended(self._replica_id, self._verdict, self._sent)
