"""Who may run, where, and who is refused: one bounded line by class in front of the replicas of one model.

Rules
- Order: strict between classes, first come first served inside one; a wait beyond the class's bound lifts the request
  one class, once (`core.line`).
- No more than a replica runs: the slots granted on a replica never exceed what it has (`core.capacity`).
- Nothing idles: while a slot is free, whoever fits runs, with one exception. The first of a class that does not fit
  keeps the replica nearest to having its slots; requests behind it (its class, and lower ones) fill the other replicas
  only. So small requests cannot starve a large one, and a large one holds back one replica at most, until what runs
  there has ended or its own wait is over. Higher classes pass it.
- A full line refuses, unless somebody of a lower class waits: then the youngest of the lowest class gives its place.
- A refusal comes as early as it can be known, with the wait that the measured drain predicts (`core.drain`).

Invariant: every arrival ends as exactly one of granted, refused, cancelled while waiting, or still waits.

Events in, actions out: a method takes an event and `now` (seconds of one monotonic clock; an earlier one counts as the
latest seen) and returns what to do, for any request, in order. Each is O(log n) in the requests waiting and in the
replicas. Whoever hosts it (a router today, the quota actor later) carries the actions out and calls `on_tick` when
`next_due` has come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.core.capacity import Capacity
from serve_app.core.drain import DrainRate
from serve_app.core.events import Action, Arrival, Grant, Reason, Refuse, ReplicaUse, Snapshot, refusal_error
from serve_app.core.line import Line, Waiting
from serve_app.core.startup import StartUp
from serve_app.types import RequestClass

__all__ = [
    "Action",
    "Admission",
    "Arrival",
    "Grant",
    "Policy",
    "Reason",
    "Refuse",
    "ReplicaUse",
    "Snapshot",
    "refusal_error",
]

LIFT_LOW_AFTER_S = 30.0  # half the longest wait: the batch moves on before it times out
LIFT_NORMAL_AFTER_S = 20.0  # an agent's step that takes longer looks stuck to its owner
LIFT_HIGH_AFTER_S = 10.0  # people leave a silent page after about ten seconds
DEFAULT_NO_REPLICA_WAIT_S = 30.0  # a replica that crashed is back in less if its model is small; else say so
DEFAULT_RETRY_AFTER_S = 5.0  # nothing measured yet: about one short answer of a model that has just started
MAX_RETRY_AFTER_S = 300.0  # further ahead the load will have changed


@dataclass(frozen=True, slots=True)
class Policy:
    """The bounds of a line.

    Args:
        max_queued: requests that may wait; 0: whoever cannot run at once is refused.
        max_wait_s: the longest wait, in seconds.
        no_replica_wait_s: how long a request waits while no replica has a slot at all.
        lift_after_s: the wait after which a request of class low, normal, high is lifted, in seconds.

    Raises:
        ValueError: a bound out of range, or a class lifted later than the one below it.
    """

    max_queued: int
    max_wait_s: float
    no_replica_wait_s: float = DEFAULT_NO_REPLICA_WAIT_S
    lift_after_s: tuple[float, float, float] = (LIFT_LOW_AFTER_S, LIFT_NORMAL_AFTER_S, LIFT_HIGH_AFTER_S)

    def __post_init__(self) -> None:
        if self.max_queued < 0:
            raise ValueError(f"max_queued is {self.max_queued}")
        if not all(wait_s > 0 for wait_s in (self.max_wait_s, self.no_replica_wait_s, *self.lift_after_s)):
            raise ValueError("every wait must be above zero")
        low_s, normal_s, high_s = self.lift_after_s
        if not low_s >= normal_s >= high_s:
            raise ValueError("lift_after_s: no class may be lifted later than the one below it")


class Admission:
    """The line of one model, and what its replicas run."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._line = Line(policy.lift_after_s)
        self._capacity = Capacity()
        self._drain = DrainRate()
        self._start = StartUp()
        self._now = -math.inf
        self._empty_since: float | None = -math.inf  # since when no replica has had slots; None: one has
        self._arrived = 0
        self._granted = dict.fromkeys(RequestClass, 0)
        self._refused = dict.fromkeys(Reason, 0)
        self._cancelled_waiting = 0
        self._cancelled_running = 0
        self._done = 0
        self._done_tokens = 0

    def on_arrive(self, arrival: Arrival, now: float) -> list[Action]:
        """A request asks for a place.

        Raises:
            ValueError: a request of this id waits or runs already; nothing has changed then.
        """
        request_id = arrival.request_id
        if request_id in self._line or request_id in self._capacity:
            raise ValueError(f"{request_id!r} waits or runs already")
        actions = self._advance(now)
        self._arrived += 1
        if arrival.deadline is not None and arrival.deadline <= self._now:
            return [*actions, self._refuse(arrival, Reason.DEADLINE)]
        if self._empty_since is None and arrival.slots > self._capacity.largest:
            return [*actions, self._refuse(arrival, Reason.TOO_LARGE)]
        self._line.add(arrival, self._now)
        if self._empty_since is not None:
            self._start.needed(self._now)
        actions += self._decide()
        if request_id in self._line:
            actions += self._bound(arrival)
        return actions

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """The caller is gone, waiting or running. An unknown id changes nothing."""
        actions = self._advance(now)
        if self._line.remove(request_id) is not None:
            self._cancelled_waiting += 1
        elif self._give_back(request_id):
            self._cancelled_running += 1
        else:
            return actions
        return actions + self._decide()

    def on_done(self, request_id: str, now: float, tokens: int = 0) -> list[Action]:
        """A granted request has ended after `tokens` tokens (prompt and output), well or not.

        An unknown id changes nothing; nor does one that waits, whose end can only be a refusal or a cancel.
        """
        actions = self._advance(now)
        if not self._give_back(request_id):
            return actions
        self._done += 1
        self._done_tokens += tokens
        return actions + self._decide()

    def on_replica(self, replica_id: str, slots: int, now: float) -> list[Action]:
        """A replica has this many slots for us from now on, whatever it runs; 0: it drains.

        Raises:
            ValueError: negative slots; nothing has changed then.
        """
        if slots < 0:
            raise ValueError(f"replica {replica_id!r}: slots is {slots}")
        actions = self._advance(now)
        new = not self._capacity.knows(replica_id)
        self._capacity.set_slots(replica_id, slots)
        return actions + self._after_replicas(new)

    def on_replica_gone(self, replica_id: str, now: float) -> list[Action]:
        """A replica is dead: its slots are gone, and what ran there is forgotten.

        Such a request may arrive again by its id; then no `on_done` for its first run may follow.
        """
        actions = self._advance(now)
        self._capacity.drop(replica_id)
        return actions + self._after_replicas(new=False)

    def on_start_told(self, start_s: float) -> None:
        """An engine of the model says how many seconds its own start took."""
        self._start.told(start_s)

    def on_policy(self, policy: Policy, now: float) -> list[Action]:
        """Other bounds from now on, for those who wait, too; a line that has become too long refuses nobody in it.

        Raises:
            ValueError: other lift times, by which the line is kept in order; nothing has changed then.
        """
        if policy.lift_after_s != self._policy.lift_after_s:
            raise ValueError("lift_after_s cannot change while requests wait")
        self._policy = policy
        return self._advance(now)

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed: refuses whoever has waited too long or past the deadline, lifts whoever has aged."""
        return self._advance(now)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """How many wait that a request of this class would stand behind, by the class they claimed."""
        waiting = self._line.claimed()
        return tuple((who, waiting[who]) for who in reversed(RequestClass) if who >= request_class and waiting[who])

    @property
    def granted(self) -> int:
        """Requests on replicas that take new ones, too. O(replicas)."""
        return self._capacity.requests

    @property
    def start_s(self) -> float | None:
        """What the last start took, from the first request that needed a replica to its slots; None: not measured."""
        return self._start.measured_s

    def expected_start_s(self, now: float) -> float:
        """Seconds until a replica can be expected while there is none."""
        return self._start.remaining_s(now)

    def next_due(self) -> float | None:
        """The moment for the next `on_tick`; None while nothing can come due."""
        oldest = self._line.oldest()
        if oldest is None:
            return None
        due, wait_ends = self._line.next_due(), self._wait_ends(oldest)
        return wait_ends if due is None else min(due, wait_ends)

    def predicted_wait_s(self, request_class: RequestClass, slots: int = 1) -> float | None:
        """The wait in seconds that a request arriving now has ahead of it; None: nothing measured yet."""
        work = self._line.slots_from(request_class)
        if not work and slots <= self._capacity.most_free:
            return 0.0
        return self._wait_for(request_class, work + slots)

    def snapshot(self, now: float) -> Snapshot:
        """The present state in figures. O(replicas)."""
        oldest = self._line.oldest()
        return Snapshot(
            waiting={level.label: count for level, count in self._line.claimed().items()},
            waiting_slots=self._line.slots_from(RequestClass.LOW),
            waiting_tokens=self._line.tokens,
            lifted=self._line.lifted(),
            oldest_wait_s=0.0 if oldest is None else max(now, self._now) - oldest.arrived_s,
            replicas=dict(self._capacity.use()),
            arrived=self._arrived,
            granted={level.label: count for level, count in self._granted.items()},
            refused={reason.value: count for reason, count in self._refused.items()},
            cancelled_waiting=self._cancelled_waiting,
            cancelled_running=self._cancelled_running,
            done=self._done,
            done_tokens=self._done_tokens,
            drain_slots_per_s=self._drain.slots_per_s(self._capacity.slots),
        )

    def _advance(self, now: float) -> list[Action]:
        """Bring the clock to `now` and do what has come due; the first step of every event."""
        self._now = now = max(now, self._now)
        self._drain.advance(now, self._capacity.used, self._capacity.slots)
        if not len(self._line):
            return []
        actions: list[Action] = []
        while (late := self._line.past_deadline(now)) is not None:
            self._line.remove(late.request_id)
            actions.append(self._refuse(late.arrival, Reason.DEADLINE))
        while (oldest := self._line.oldest()) is not None and self._wait_ends(oldest) <= now:
            self._line.remove(oldest.request_id)
            actions.append(self._refuse(oldest.arrival, self._why_not_served(oldest)))
        if self._line.lift(now) or actions:
            actions += self._decide()
        return actions

    def _decide(self) -> list[Action]:
        """Grant what can be granted, in order."""
        line, capacity = self._line, self._capacity
        grants: list[Action] = []
        for level in line.levels():
            if not capacity.most_free:
                break
            head = line.first(level, capacity.largest)
            while head is not None and head.slots <= capacity.most_free:
                grants.append(self._grant(head))
                head = line.first(level, capacity.largest)
            if head is None:
                continue
            capacity.close(head.slots)
            while (behind := line.first(level, capacity.most_free)) is not None:
                grants.append(self._grant(behind))
        capacity.reopen()
        return grants

    def _bound(self, arrival: Arrival) -> list[Action]:
        """Keep the line bounded and honest after an arrival that has to wait."""
        if arrival.accepted:
            return []
        if arrival.deadline is not None:
            wait_s = self._wait_for(arrival.request_class, self._line.slots_from(arrival.request_class))
            if wait_s is not None and self._now + wait_s > arrival.deadline:
                self._line.remove(arrival.request_id)
                return [self._refuse(arrival, Reason.DEADLINE)]
        if len(self._line) <= self._policy.max_queued:
            return []
        youngest = self._line.youngest_below(arrival.request_class)
        if youngest is None:
            self._line.remove(arrival.request_id)
            return [self._refuse(arrival, Reason.QUEUE_FULL)]
        self._line.remove(youngest.request_id)
        return [self._refuse(youngest.arrival, Reason.SHED), *self._decide()]

    def _after_replicas(self, new: bool) -> list[Action]:
        if self._capacity.slots:
            if self._empty_since is not None:
                self._start.came(self._now, new)
            self._empty_since = None
        else:
            if self._empty_since is None:
                self._empty_since = self._now
            if len(self._line):
                self._start.needed(self._now)
        return self._decide()

    def _wait_ends(self, waiting: Waiting) -> float:
        end = waiting.arrived_s + self._policy.max_wait_s
        if self._empty_since is None:
            return end
        return min(end, max(waiting.arrived_s, self._empty_since) + self._policy.no_replica_wait_s)

    def _why_not_served(self, waiting: Waiting) -> Reason:
        if self._empty_since is not None:
            return Reason.NO_REPLICA
        # It fitted when it came and has been kept for a replica of its size; none came back.
        return Reason.TOO_LARGE if waiting.slots > self._capacity.largest else Reason.TIMEOUT

    def _wait_for(self, level: RequestClass, work: int) -> float | None:
        return self._drain.wait_s(level, work - self._capacity.free, self._capacity.slots)

    def _grant(self, waiting: Waiting) -> Grant:
        arrival = waiting.arrival
        self._line.remove(arrival.request_id)
        replica_id = self._capacity.take(arrival.request_id, arrival.slots, arrival.affinity)
        self._drain.granted(waiting.level, arrival.slots)
        self._granted[arrival.request_class] += 1
        return Grant(arrival.request_id, replica_id, self._now - waiting.arrived_s)

    def _give_back(self, request_id: str) -> bool:
        slots = self._capacity.give_back(request_id)
        self._drain.released(slots)
        return slots > 0

    def _refuse(self, arrival: Arrival, reason: Reason) -> Refuse:
        self._refused[reason] += 1
        if reason is Reason.TOO_LARGE:
            return Refuse(arrival.request_id, reason, None)
        if self._empty_since is not None:
            return Refuse(arrival.request_id, reason, self._start.remaining_s(self._now))
        wait_s = self.predicted_wait_s(arrival.request_class, arrival.slots)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s)
