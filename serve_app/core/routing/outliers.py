"""Which replicas get no requests for a while because those they got have failed.

Rules
- A replica is ejected when the connection to it is lost, when `CONSECUTIVE` requests in a row have failed on it, or
  when of `MIN_RESULTS` and more of late `FAILED_SHARE` have. What a client does (a request that is wrong, a disconnect)
  says nothing of the replica.
- An ejection lasts `FIRST_S`, the next one twice as long, up to `LONGEST_S`; every `FORGIVE_S` without another forgets
  one. Then the replica gets one request, the probe (a circuit breaker's half-open state): if it succeeds the replica is
  back, if it fails the replica is ejected again, if it says nothing there is another.
- Results of requests that were sent before the replica's state last changed are of the past and count for nothing.
- `MAX_OUT_SHARE` of the replicas may be out (ejected or on probation), or one: where more fail, it is hardly they who
  are at fault, and to refuse everybody would be worse. Where a departure leaves too few, who is due first is back.
- Where no other replica is in, an ejection is a pause of `FIRST_S`: longer would be an outage of our own making.

Invariant: no more are out than may be, after every event.

Events in, actions out; `now` is in seconds of one monotonic clock. `on_result` is O(1), all others O(replicas) at most.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

CONSECUTIVE = 3  # an accident happens twice in a row
FAILED_SHARE = 0.5  # above it a request is better off anywhere else
MIN_RESULTS = 10.0  # fewer are no rate
WINDOW_S = 30.0  # results fade by e in it: some requests of every replica that has work
FIRST_S = 1.0  # as long as Serve takes to notice a death
LONGEST_S = 60.0  # a replica that is well again is back within a minute
FORGIVE_S = 60.0  # as long as the longest, so that one which fails whenever it is back never starts over
MAX_OUT_SHARE = 0.5  # of few, expensive replicas; Envoy's 10% is meant for fleets


class Verdict(enum.Enum):
    """What the end of a request says of its replica."""

    OK = "ok"  # it produced something
    FAILED = "failed"  # it answered with an error of its own, or not in time
    LOST = "lost"  # the connection to it broke: one is enough
    CLIENT = "client"  # refused as wrong, or the client went away: nothing


class FailureKind(enum.StrEnum):
    """Why a replica was ejected; a label of the metrics."""

    LOST = "lost"
    CONSECUTIVE = "consecutive"
    RATE = "rate"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Eject:
    """Send nothing to the replica until another action says so."""

    replica_id: str
    for_s: float
    why: FailureKind


@dataclass(frozen=True, slots=True)
class Probe:
    """Send one request to the replica, and no second one."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """Treat the replica as any other."""

    replica_id: str


Action = Eject | Probe | Readmit


class State(enum.Enum):
    """Of a replica."""

    IN = "in"
    EJECTED = "ejected"
    PROBATION = "probation"


@dataclass(slots=True)
class _Replica:
    since: float  # when the state began
    state: State = State.IN
    due: float = math.inf  # end of the ejection
    ejections: int = 0
    in_a_row: int = 0
    failed: float = 0.0
    results: float = 0.0
    counted_at: float = 0.0

    def begin(self, state: State, now: float) -> None:
        self.state, self.since, self.due = state, now, math.inf
        self.in_a_row, self.failed, self.results, self.counted_at = 0, 0.0, 0.0, now

    def count(self, failed: bool, now: float) -> None:
        keep = math.exp(-max(0.0, now - self.counted_at) / WINDOW_S)
        self.counted_at = max(self.counted_at, now)
        self.failed = self.failed * keep + failed
        self.results = self.results * keep + 1.0
        self.in_a_row = self.in_a_row + 1 if failed else 0


class Outliers:
    """The replicas of one model."""

    def __init__(self, max_out_share: float = MAX_OUT_SHARE) -> None:
        """ValueError: the share is not within 0 and 1."""
        if not 0.0 <= max_out_share <= 1.0:
            raise ValueError(f"max_out_share is {max_out_share}")
        self._max_out_share = max_out_share
        self._replicas: dict[str, _Replica] = {}
        self._out = 0

    @property
    def out(self) -> int:
        """Replicas that are ejected or on probation."""
        return self._out

    @property
    def may_be_out(self) -> int:
        """How many may be: their share, one at least where there is any."""
        count = len(self._replicas)
        return min(count, max(1, math.floor(self._max_out_share * count)))

    def state(self, replica_id: str) -> State | None:
        """None: an unknown replica."""
        replica = self._replicas.get(replica_id)
        return None if replica is None else replica.state

    def on_replica(self, replica_id: str, now: float) -> None:
        """A replica has come; a known one changes nothing."""
        if replica_id not in self._replicas:
            self._replicas[replica_id] = _Replica(now, counted_at=now)

    def on_gone(self, replica_id: str, now: float) -> list[Action]:
        """A replica has left for good; an unknown one changes nothing."""
        gone = self._replicas.pop(replica_id, None)
        if gone is None:
            return []
        self._out -= gone.state is not State.IN
        actions: list[Action] = []
        while self._out > self.may_be_out:
            actions.append(self._readmit(self._first_due(), now))
        return actions

    def on_result(self, replica_id: str, verdict: Verdict, sent: float, now: float) -> list[Action]:
        """A request has ended, or has produced its first token. Each request that was sent has one result.

        Where a failure brings no `Eject`, as many are out as may be: wait before the same replica is tried again.

        Args:
            sent: the moment it was sent to the replica.
        """
        replica = self._replicas.get(replica_id)
        if replica is None or replica.state is State.EJECTED or sent < replica.since:
            return []
        if replica.state is State.PROBATION:
            return self._on_probe(replica_id, replica, verdict, now)
        if verdict is Verdict.CLIENT:
            return []
        replica.count(verdict is not Verdict.OK, now)
        why = self._judge(replica, verdict)
        if why is None or self._out >= self.may_be_out:
            return []
        self._out += 1
        return [self._eject(replica_id, replica, why, now)]

    def on_tick(self, now: float) -> list[Action]:
        """Put on probation whose ejection is over."""
        actions: list[Action] = []
        for replica_id, replica in self._replicas.items():
            if replica.due <= now:
                replica.begin(State.PROBATION, now)
                actions.append(Probe(replica_id))
        return actions

    def next_due(self) -> float | None:
        """When the next ejection is over."""
        due = min((replica.due for replica in self._replicas.values()), default=math.inf)
        return None if due == math.inf else due

    def _judge(self, replica: _Replica, verdict: Verdict) -> FailureKind | None:
        if verdict is Verdict.OK:
            return None  # a success is never the reason, even where it makes up the number
        if verdict is Verdict.LOST:
            return FailureKind.LOST
        if replica.in_a_row >= CONSECUTIVE:
            return FailureKind.CONSECUTIVE
        if replica.results >= MIN_RESULTS and replica.failed >= FAILED_SHARE * replica.results:
            return FailureKind.RATE
        return None

    def _on_probe(self, replica_id: str, replica: _Replica, verdict: Verdict, now: float) -> list[Action]:
        if verdict is Verdict.OK:
            return [self._readmit(replica_id, now)]
        if verdict is Verdict.CLIENT:
            return [Probe(replica_id)]
        return [self._eject(replica_id, replica, FailureKind.PROBE, now)]

    def _eject(self, replica_id: str, replica: _Replica, why: FailureKind, now: float) -> Eject:
        if why is not FailureKind.PROBE:
            forgiven = int((now - replica.since) / FORGIVE_S)
            replica.ejections = max(0, replica.ejections - forgiven)
        alone = self._out >= len(self._replicas)
        for_s = FIRST_S if alone else min(LONGEST_S, FIRST_S * 2.0 ** min(replica.ejections, 30))
        replica.ejections += 1
        replica.begin(State.EJECTED, now)
        replica.due = now + for_s
        return Eject(replica_id, for_s, why)

    def _readmit(self, replica_id: str, now: float) -> Readmit:
        self._out -= 1
        self._replicas[replica_id].begin(State.IN, now)
        return Readmit(replica_id)

    def _first_due(self) -> str:
        """Of those who are out: on probation before ejected, then whose ejection ends first."""
        out = (name for name, replica in self._replicas.items() if replica.state is not State.IN)
        return min(out, key=lambda name: (self._replicas[name].state is State.EJECTED, self._replicas[name].due))
