"""Who may run, where, and who is refused: one bounded line, classes x tenants, in front of the replicas of one model.

Rules
- Order: strict between classes, with a guaranteed minimum share for each class that waits (`core.queue.min_share`).
- Inside a class tenants share fairly by their weights, each served by age; who is below its guaranteed share
  comes first (`core.queue.class_queue`, `.vtc_charges`, `.guaranteed_shares`). A guarantee does not pass a higher
  class.
- No more than a replica runs: slots and KV tokens granted on a replica never exceed what it has (`.capacity`).
- Nothing idles: while slots are free, whoever fits runs, with three exceptions. Some slots may be kept for the classes
  from `high` up while these come (`.guard_slots`). The first of a class that does not fit
  keeps the replica nearest to having what it wants; requests behind it (its class, and lower ones) fill the other
  replicas only. So small requests cannot starve a large one, and a large one holds back one replica at most, until
  what runs there has ended or its own wait is over. Higher classes pass it, unless it is due by the minimum share.
  And of requests of one size (slots, and tokens within a factor of two) nobody passes the first.
- A full line refuses, unless somebody has to give a place back (`.eviction`).
- A refusal comes as early as it can be known: who by the forecast cannot start in time is refused at once, with
  the wait that the measured drain predicts (`core.queue.wait_forecast`).

Invariant: every arrival ends as exactly one of granted, refused, cancelled while waiting, or still waits.

Events in, actions out: a method takes an event and `now` (seconds of one monotonic clock; an earlier one counts as the
latest seen) and returns what to do, for any request, in order. Each is O(log n) in the requests waiting and in the
replicas. The quota actor carries the actions out and calls `on_tick` when
`next_due` has come.
"""

from __future__ import annotations

import math

from serve_app.core.queue.cold_start import StartUp
from serve_app.core.queue.events import (
    Action,
    Arrival,
    Grant,
    QueueStatus,
    Reason,
    Refuse,
    ReplicaUse,
    Snapshot,
    refusal_error,
)
from serve_app.core.queue.eviction import make_room
from serve_app.core.queue.policy import ClassBound, Policy, TenantPolicy
from serve_app.core.queue.scheduler import Running
from serve_app.core.queue.snapshot import Tally, snapshot
from serve_app.core.queue.tenant_queue import Waiting
from serve_app.core.queue.wait_forecast import Backlog, Forecast
from serve_app.types import RequestClass

__all__ = [
    "Action",
    "Admission",
    "Arrival",
    "ClassBound",
    "Grant",
    "Policy",
    "QueueStatus",
    "Reason",
    "Refuse",
    "ReplicaUse",
    "Snapshot",
    "TenantPolicy",
    "refusal_error",
]

DEFAULT_RETRY_AFTER_S = 5.0  # nothing measured yet: about one short answer of a model that has just started
MAX_RETRY_AFTER_S = 300.0  # further ahead the load will have changed


class Admission:
    """The line of one model, and what its replicas run."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._running = Running(policy)
        self._line, self._capacity, self._drain = self._running.line, self._running.capacity, self._running.drain
        self._forecast = Forecast(
            self._line, self._capacity, self._drain, lambda: self._policy.trickle_share, self._running.kept
        )
        self._start = StartUp()
        self._now = -math.inf
        self._empty_since: float | None = -math.inf  # since when no replica has had slots; None: one has
        self._tally = Tally()

    def on_arrive(self, arrival: Arrival, now: float, waited_s: float = 0.0) -> list[Action]:
        """A request asks for a place, after it has waited this long for one elsewhere.

        Raises:
            ValueError: a request of this id waits or runs already; nothing has changed then.
        """
        request_id = arrival.request_id
        if request_id in self._line or request_id in self._running:
            raise ValueError(f"{request_id!r} waits or runs already")
        actions = self._advance(now)
        self._tally.arrived += 1
        if arrival.deadline is not None and arrival.deadline <= self._now:
            return [*actions, self._refuse(arrival, Reason.DEADLINE)]
        if self._empty_since is None and self._capacity.too_large(arrival.slots, arrival.cost, arrival.only):
            return [*actions, self._refuse(arrival, Reason.TOO_LARGE)]
        waiting = self._line.add(arrival, self._now - waited_s)
        if self._empty_since is not None:
            self._start.needed(self._now)
        actions += self._decide()
        if request_id in self._line:
            actions += self._bound(waiting)
        return actions

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """The caller is gone, waiting or running. An unknown id changes nothing."""
        actions = self._advance(now)
        if self._line.remove(request_id) is not None:
            self._tally.cancelled_waiting += 1
        elif request_id in self._running:
            self._running.cancel(request_id)
            self._tally.cancelled_running += 1
        else:
            return actions
        return actions + self._decide()

    def on_progress(self, request_id: str, tokens: int, now: float) -> list[Action]:
        """A granted request has produced so many more tokens. An unknown id changes nothing.

        Raises:
            ValueError: negative tokens; nothing has changed then.
        """
        if tokens < 0:
            raise ValueError(f"{request_id!r}: tokens is {tokens}")
        self._running.progress(request_id, tokens)
        return self._advance(now) + self._decide()  # fair order has changed, and who is next may fit

    def on_done(
        self, request_id: str, now: float, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> list[Action]:
        """A granted request has ended after so many tokens, well or not; None: not known, its estimate counts.

        An unknown id changes nothing; nor does one that waits, whose end can only be a refusal or a cancel.

        Raises:
            ValueError: negative tokens; nothing has changed then.
        """
        if (prompt_tokens or 0) < 0 or (output_tokens or 0) < 0:
            raise ValueError(f"{request_id!r}: prompt_tokens is {prompt_tokens}, output_tokens {output_tokens}")
        actions = self._advance(now)
        if request_id not in self._running:
            return actions
        self._running.done(request_id, prompt_tokens, output_tokens)
        self._tally.done += 1
        self._tally.done_tokens += (prompt_tokens or 0) + (output_tokens or 0)
        return actions + self._decide()

    def on_replica(
        self,
        replica_id: str,
        slots: int,
        now: float,
        kv_tokens: int | None = None,
        lent: tuple[int, int] = (0, 0),
        reserved: int = 0,
    ) -> list[Action]:
        """A replica has these slots and KV tokens for us from now on, whatever it runs; 0 slots: it drains.

        Args:
            kv_tokens: None: KV tokens are not bounded here.
            lent: slots and KV tokens of these that are in other hands for now.
            reserved: KV tokens of the lent ones that sessions hold. A request that would fit only if one of them ended
                does not keep the replica; where no replica can hold it beside its sessions it waits aside.

        Raises:
            ValueError: negative slots or tokens; nothing has changed then.
        """
        if slots < 0 or reserved < 0 or (kv_tokens is not None and kv_tokens < 0):
            raise ValueError(f"replica {replica_id!r}: slots {slots}, kv_tokens {kv_tokens}, reserved {reserved}")
        refusals = self._end_waits(now)  # of what there was until now
        new = not self._capacity.knows(replica_id)
        self._running.set_replica(replica_id, slots, kv_tokens, lent, reserved)  # before anything is granted of it
        return refusals + self._after_replicas(new)

    def on_kv_debt(self, replica_id: str, level: RequestClass | None, now: float) -> list[Action]:
        """Running requests of this class at most have outgrown their estimates on a replica by more than was free.

        Requests of that class and below start nothing there until it is said anew; classes above are not held up.
        None: nothing is owed there any more.
        """
        actions = self._advance(now)
        self._capacity.set_debt(replica_id, level)
        return actions + self._decide()

    def on_usage(self, request_class: RequestClass, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """A tenant was served without this line; it has had that much of its class, all the same."""
        self._running.served_elsewhere(request_class, tenant, prompt_tokens, output_tokens)

    def on_replica_gone(self, replica_id: str, now: float) -> list[Action]:
        """A replica is dead: its slots are gone, and what ran there is forgotten.

        Such a request may arrive again by its id; then no `on_done` for its first run may follow.
        """
        actions = self._advance(now)
        self._running.drop(replica_id)
        return actions + self._after_replicas(new=False)

    def on_start_told(self, start_s: float) -> None:
        """An engine of the model says how many seconds its own start took."""
        self._start.told(start_s)

    def on_policy(self, policy: Policy, now: float) -> list[Action]:
        """Other bounds and rights from now on, for those who wait, too; a line now too long refuses nobody in it."""
        self._policy = policy
        self._running.set_policy(policy)
        return self._advance(now) + self._decide()  # with other shares another comes first, who may fit

    def on_tick(self, now: float) -> list[Action]:
        """Time has passed: refuses whoever has waited too long or past the deadline."""
        return self._advance(now)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """How many wait that a request of this class would stand behind, by the class they claimed."""
        waiting = self._line.claimed
        return tuple((who, waiting[who]) for who in reversed(RequestClass) if who >= request_class and waiting[who])

    @property
    def contended(self) -> bool:
        """Whether every arrival has to be decided here: somebody waits, or somebody may not."""
        return bool(self._line) or self._policy.turns_away

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
        due, wait_ends = self._line.next_deadline(), self._wait_ends(oldest)
        return wait_ends if due is None else min(due, wait_ends)

    def predicted_wait_s(self, request_class: RequestClass, slots: int = 1, tenant: str | None = None) -> float | None:
        """The wait in seconds that a request arriving now has ahead of it; None: nothing measured yet.

        Without a tenant, that of one who comes behind everybody of the class.
        """
        weight = 1.0 if tenant is None else self._policy.weight(tenant)
        return self._forecast.newcomer_s(request_class, slots, tenant, weight)

    def backlog(self, request_class: RequestClass) -> Backlog:
        """What stands before a newcomer of a class; a wait of it is that of `predicted_wait_s` where somebody waits."""
        return self._forecast.backlog(request_class)

    def lanes(self, request_class: RequestClass, most: int) -> dict[str, int] | None:
        """The slots that each tenant waits for at a class; None where more tenants wait than `most`."""
        level = self._line.stages[request_class]
        return {lane.tenant: lane.slots for lane in level.active()} if level.tenants <= most else None

    def full(self, request_class: RequestClass) -> bool:
        """Whether an arrival of this class is refused for want of room, whoever's it is: those of higher classes fill
        the line. Where somebody of its class waits it depends on the tenants."""
        line, policy = self._line, self._policy
        if any(line.claimed[level] for level in RequestClass if level <= request_class):
            return False
        tokens = policy.max_queued_tokens
        return len(line) >= policy.max_queued > 0 or (tokens is not None and line.tokens >= tokens > 0)

    def status(self, request_id: str, now: float) -> QueueStatus | None:
        """Where a request stands; None if it does not wait. The wait counts from `now`."""
        waiting = self._line.get(request_id)
        if waiting is None:
            return None
        status = self._forecast.status(waiting)
        if self._empty_since is None:
            return status
        return QueueStatus(request_id, status.level, status.position, self._start.remaining_s(max(now, self._now)))

    def snapshot(self, now: float) -> Snapshot:
        """The present state in figures. O(replicas + tenants)."""
        return snapshot(self._running, self._forecast, self._tally, max(now, self._now))

    def _advance(self, now: float) -> list[Action]:
        """Bring the clock to `now` and do what has come due; the first step of every event."""
        actions = self._end_waits(now)
        return actions + self._decide() if actions else actions

    def _end_waits(self, now: float) -> list[Action]:
        """Bring the clock to `now` and refuse those whose wait is over by then."""
        self._now = now = max(now, self._now)
        self._drain.advance(now, self._capacity.used, self._capacity.slots)
        actions: list[Action] = []
        while (late := self._line.past_deadline(now)) is not None:
            self._line.remove(late.request_id)
            actions.append(self._refuse(late.arrival, Reason.DEADLINE))
        while (oldest := self._line.oldest()) is not None and self._wait_ends(oldest) <= now:
            self._line.remove(oldest.request_id)
            actions.append(self._refuse(oldest.arrival, self._why_not_served(oldest)))
        return actions

    def _decide(self) -> list[Action]:
        """Grant what can be granted, in order."""
        grants: list[Action] = []
        while (taken := self._running.take_next()) is not None:
            waiting, replica_id = taken
            arrival = waiting.arrival
            self._tally.granted[arrival.request_class] += 1
            self._tally.granted_tokens[arrival.request_class] += arrival.cost
            grants.append(Grant(arrival.request_id, replica_id, self._now - waiting.arrived_s))
        return grants

    def _bound(self, waiting: Waiting) -> list[Action]:
        """Keep the line bounded and honest after an arrival that has to wait."""
        arrival = waiting.arrival
        if arrival.accepted:
            return []
        # Who is next takes what comes free, sooner or later than in the mean; refused, it leaves that to lower classes.
        if not self._forecast.is_next(waiting) and (late := self._too_late(waiting)) is not None:
            self._line.remove(arrival.request_id)
            return [self._refuse(arrival, late)]
        gone = make_room(self._line, self._policy, waiting)
        if gone is None:
            self._line.remove(arrival.request_id)
            return [self._refuse(arrival, Reason.QUEUE_FULL)]
        if not gone:
            return []
        return [*(self._refuse(one.arrival, Reason.SHED) for one in gone), *self._decide()]

    def _too_late(self, waiting: Waiting) -> Reason | None:
        """Why a request that has just come cannot start in time, by the forecast; None: it can."""
        wait_s = self._forecast.last_of_tenant_s(waiting)
        if wait_s is None:
            return None
        start, deadline = self._now + wait_s, waiting.arrival.deadline
        if deadline is not None and start > deadline:
            return Reason.DEADLINE
        return Reason.TIMEOUT if start > waiting.arrived_s + self._policy.max_wait_s else None

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
        capacity, slots, cost = self._capacity, waiting.slots, waiting.cost
        if capacity.possible(slots, cost, waiting.where):
            return Reason.TIMEOUT
        # It fitted when it came and has been kept for a replica of its size; none came back.
        if capacity.too_large(slots, cost, waiting.arrival.only):
            return Reason.TOO_LARGE
        return Reason.SESSIONS if capacity.possible(slots, 0, waiting.where) else Reason.NO_REPLICA

    def _refuse(self, arrival: Arrival, reason: Reason) -> Refuse:
        self._tally.refused[reason] += 1
        if reason is Reason.TOO_LARGE:
            return Refuse(arrival.request_id, reason, None)
        if self._empty_since is not None:
            return Refuse(arrival.request_id, reason, self._start.remaining_s(self._now))
        wait_s = self.predicted_wait_s(arrival.request_class, arrival.slots, arrival.tenant)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s)
