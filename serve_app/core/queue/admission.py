"""Which requests are granted, and where, and which are refused: the bounded queue (classes x tenants) of one model.

Rules
- Order: strict between classes, with a guaranteed minimum share for each waiting class (`core.queue.min_share`).
- Inside a class, tenants share fairly by weight; a tenant's requests are served oldest first. Tenants below their
  guaranteed share come first in their class (`core.queue.class_queue`, `.vtc_charges`, `.guaranteed_shares`). A
  guaranteed share never passes a higher class.
- Capacity: slots and KV tokens granted on a replica never exceed its size (`.capacity`).
- Work conserving: while slots are free, any request that fits runs, with four exceptions. 1. Guard slots are kept
  free for the classes from `high` up while these arrive (`.guard_slots`). 2. If the first request of a class does not
  fit, the replica that is nearest to fitting it is held back; requests behind it (same class and lower) fill the other
  replicas only. So small requests cannot starve a large one, and a large one holds back at most one replica, until the
  requests there have ended or its own wait is over. Higher classes pass it, unless it is due by the minimum share.
  3. Of one size (equal slots, tokens within a factor of two) none passes the first. 4. KV debt closes a replica.
- A full queue refuses the newcomer, unless another request has to be evicted for it (`.eviction`).
- Early refusal: a request that by the forecast cannot start in time is refused at once, with the wait that the measured
  drain rate predicts (`core.queue.wait_forecast`).

Invariant: every arrival is in exactly one state: granted, refused, cancelled while waiting, or waiting.

Events in, actions out: a method takes an event and `now` (seconds of one monotonic clock; a value before the latest
seen counts as the latest) and returns the actions in order, for any request. Each method is O(log n) in waiting
requests and in replicas. The quota actor carries out the actions and calls `on_tick` when `next_due` is reached.
"""

from __future__ import annotations

import math

from serve_app.core.queue.cold_start import ReplicaStart
from serve_app.core.queue.events import (
    Action,
    Arrival,
    Grant,
    QueueStatus,
    RefusalReason,
    Refuse,
    ReplicaUse,
    Snapshot,
    refusal_error,
)
from serve_app.core.queue.eviction import evict_for
from serve_app.core.queue.policy import ClassBound, QueuePolicy, TenantPolicy
from serve_app.core.queue.scheduler import Scheduler
from serve_app.core.queue.snapshot import QueueCounters, snapshot
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.core.queue.wait_forecast import Backlog, WaitForecast
from serve_app.types import RequestClass

__all__ = [
    "Action",
    "Admission",
    "Arrival",
    "ClassBound",
    "Grant",
    "QueuePolicy",
    "QueueStatus",
    "RefusalReason",
    "Refuse",
    "ReplicaUse",
    "Snapshot",
    "TenantPolicy",
    "refusal_error",
]

DEFAULT_RETRY_AFTER_S = 5.0  # nothing measured yet: about one short answer of a model that has just started
MAX_RETRY_AFTER_S = 300.0  # further ahead the load will have changed


class Admission:
    """The queue of one model and the requests that run on its replicas."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.scheduler = Scheduler(policy)
        self.queue, self.capacity, self._drain_rate = (
            self.scheduler.queue,
            self.scheduler.capacity,
            self.scheduler.drain_rate,
        )
        self._forecast = WaitForecast(
            self.queue, self.capacity, self._drain_rate, lambda: self.policy.min_share, self.scheduler.guard_slots
        )
        self._replica_start = ReplicaStart()
        self._now = -math.inf
        self._no_slots_since: float | None = -math.inf  # since when no replica has slots; None: some replica has slots
        self._counters = QueueCounters()

    def on_arrive(self, arrival: Arrival, now: float, waited_s: float = 0.0) -> list[Action]:
        """A request arrives that has already waited `waited_s` in another queue.

        Raises:
            ValueError: a request of this id waits or runs already; the state is unchanged.
        """
        request_id = arrival.request_id
        if request_id in self.queue or request_id in self.scheduler:
            raise ValueError(f"{request_id!r} waits or runs already")
        actions = self._advance(now)
        self._counters.arrived += 1
        if arrival.deadline is not None and arrival.deadline <= self._now:
            return [*actions, self._refuse(arrival, RefusalReason.DEADLINE)]
        if self._no_slots_since is None and self.capacity.is_too_large(
            arrival.slots, arrival.cost, arrival.only_replica
        ):
            return [*actions, self._refuse(arrival, RefusalReason.TOO_LARGE)]
        waiting = self.queue.add(arrival, self._now - waited_s)
        if self._no_slots_since is not None:
            self._replica_start.begin(self._now)
        actions += self._grant_all()
        if request_id in self.queue:
            actions += self._enforce_bounds(waiting)
        return actions

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """The client of a waiting or running request has left. An unknown id changes nothing."""
        actions = self._advance(now)
        if self.queue.remove(request_id) is not None:
            self._counters.cancelled_waiting += 1
        elif request_id in self.scheduler:
            self.scheduler.cancel(request_id)
            self._counters.cancelled_running += 1
        else:
            return actions
        return actions + self._grant_all()

    def on_progress(self, request_id: str, tokens: int, now: float) -> list[Action]:
        """A granted request has produced `tokens` more output tokens. An unknown id changes nothing.

        Raises:
            ValueError: negative tokens; the state is unchanged.
        """
        if tokens < 0:
            raise ValueError(f"{request_id!r}: tokens is {tokens}")
        self.scheduler.progress(request_id, tokens)
        return self._advance(now) + self._grant_all()  # fair order has changed: another request is next and may fit

    def on_done(
        self, request_id: str, now: float, prompt_tokens: int | None = None, output_tokens: int | None = None
    ) -> list[Action]:
        """A granted request has ended, with or without success; tokens None: unknown, the estimate counts.

        The id of an unknown or a waiting request changes nothing: a wait ends by a grant, a refusal or a cancel only.

        Raises:
            ValueError: negative tokens; the state is unchanged.
        """
        if (prompt_tokens or 0) < 0 or (output_tokens or 0) < 0:
            raise ValueError(f"{request_id!r}: prompt_tokens is {prompt_tokens}, output_tokens {output_tokens}")
        actions = self._advance(now)
        if request_id not in self.scheduler:
            return actions
        self.scheduler.done(request_id, prompt_tokens, output_tokens)
        self._counters.done += 1
        self._counters.done_tokens += (prompt_tokens or 0) + (output_tokens or 0)
        return actions + self._grant_all()

    def on_replica(
        self,
        replica_id: str,
        slots: int,
        now: float,
        kv_tokens: int | None = None,
        used_elsewhere: tuple[int, int] = (0, 0),
        session_kv: int = 0,
    ) -> list[Action]:
        """A replica has this size from now on, whatever runs on it; 0 slots: it drains.

        Args:
            kv_tokens: None: KV tokens are not bounded here.
            used_elsewhere: slots and KV tokens of these in use outside this queue (router credit, sessions).
            session_kv: those of them that sessions hold. A request that fits only after a session ends does not hold
                back the replica; if it fits on no replica beside the sessions, later requests pass it.

        Raises:
            ValueError: negative slots or tokens; the state is unchanged.
        """
        if slots < 0 or session_kv < 0 or (kv_tokens is not None and kv_tokens < 0):
            raise ValueError(f"replica {replica_id!r}: slots {slots}, kv_tokens {kv_tokens}, session_kv {session_kv}")
        refusals = self._expire_waits(now)  # by the capacity before the change
        new = not self.capacity.has_replica(replica_id)
        # Set before anything is granted on it.
        self.scheduler.set_replica(replica_id, slots, kv_tokens, used_elsewhere, session_kv)
        return refusals + self._after_replica_change(new)

    def on_kv_debt(self, replica_id: str, request_class: RequestClass | None, now: float) -> list[Action]:
        """A replica is in KV debt: running requests, of this class at most, need more KV tokens than were free.

        Requests of this class and below do not start there until the next report; classes above do.
        None: the KV debt is repaid.
        """
        actions = self._advance(now)
        self.capacity.set_kv_debt(replica_id, request_class)
        return actions + self._grant_all()

    def on_uncounted_usage(
        self, request_class: RequestClass, tenant: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A tenant was served without this queue (by router credit); its counter in the class is charged."""
        self.scheduler.charge_uncounted(request_class, tenant, prompt_tokens, output_tokens)

    def on_replica_gone(self, replica_id: str, now: float) -> list[Action]:
        """A replica is dead: its slots and the requests that ran there are removed.

        Such a request may arrive again with the same id; then no `on_done` for its first run may follow.
        """
        actions = self._advance(now)
        self.scheduler.drop_replica(replica_id)
        return actions + self._after_replica_change(is_new=False)

    def on_start_reported(self, start_s: float) -> None:
        """An engine of the model reports how many seconds its own start took."""
        self._replica_start.reported(start_s)

    def on_policy(self, policy: QueuePolicy, now: float) -> list[Action]:
        """New bounds and shares, for waiting requests too; a queue now above its bound refuses none of them."""
        self.policy = policy
        self.scheduler.set_policy(policy)
        return self._advance(now) + self._grant_all()  # with new shares another request is first and may fit

    def on_tick(self, now: float) -> list[Action]:
        """Refuse the requests whose longest wait or deadline has passed."""
        return self._advance(now)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.queue)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """Waiting requests of this class and above, by class; classes with none are left out."""
        waiting = self.queue.count_by_class
        return tuple((who, waiting[who]) for who in reversed(RequestClass) if who >= request_class and waiting[who])

    @property
    def is_contended(self) -> bool:
        """Whether every arrival has to be decided here: requests wait, or some bound is zero."""
        return bool(self.queue) or self.policy.has_zero_bound

    @property
    def running(self) -> int:
        """Running requests on replicas that have slots (not on draining ones). O(replicas)."""
        return self.capacity.requests

    @property
    def measured_start_s(self) -> float | None:
        """Seconds of the last start, from the first request that needed a replica to its slots; None: not measured."""
        return self._replica_start.measured_s

    def expected_start_s(self, now: float) -> float:
        """Seconds until a replica is expected while there is none."""
        return self._replica_start.remaining_s(now)

    def next_due(self) -> float | None:
        """The moment for the next `on_tick`; None while no request waits."""
        oldest = self.queue.oldest()
        if oldest is None:
            return None
        due, wait_ends = self.queue.next_deadline(), self._wait_ends(oldest)
        return wait_ends if due is None else min(due, wait_ends)

    def predicted_wait_s(self, request_class: RequestClass, slots: int = 1, tenant: str | None = None) -> float | None:
        """Seconds that a request arriving now is expected to wait; None: nothing measured yet.

        Without a tenant: the wait behind all waiting requests of the class.
        """
        weight = 1.0 if tenant is None else self.policy.weight(tenant)
        return self._forecast.arrival_wait_s(request_class, slots, tenant, weight)

    def backlog(self, request_class: RequestClass) -> Backlog:
        """The backlog before an arrival of a class; while requests wait, its waits equal `predicted_wait_s`."""
        return self._forecast.backlog(request_class)

    def slots_by_tenant(self, request_class: RequestClass, most: int) -> dict[str, int] | None:
        """The slots that each tenant waits for in a class; None if more than `most` tenants wait."""
        level = self.queue.class_queues[request_class]
        return (
            {tenant_queue.tenant: tenant_queue.slots for tenant_queue in level.waiting_tenants()}
            if level.waiting_tenant_count <= most
            else None
        )

    def is_full(self, request_class: RequestClass) -> bool:
        """Whether an arrival of this class is refused for every tenant because higher classes fill the queue. False if
        requests of its class or below wait: then eviction decides by tenant."""
        line, policy = self.queue, self.policy
        if any(line.count_by_class[level] for level in RequestClass if level <= request_class):
            return False
        tokens = policy.max_queued_tokens
        return len(line) >= policy.max_queued > 0 or (tokens is not None and line.tokens >= tokens > 0)

    def status(self, request_id: str, now: float) -> QueueStatus | None:
        """Position and expected start of a request; None if it does not wait. The wait counts from `now`."""
        waiting = self.queue.get(request_id)
        if waiting is None:
            return None
        status = self._forecast.status(waiting)
        if self._no_slots_since is None:
            return status
        return QueueStatus(
            request_id, status.queue_class, status.position, self._replica_start.remaining_s(max(now, self._now))
        )

    def snapshot(self, now: float) -> Snapshot:
        """The present state in figures. O(replicas + tenants)."""
        return snapshot(self.scheduler, self._forecast, self._counters, max(now, self._now))

    def _advance(self, now: float) -> list[Action]:
        """Set the clock to `now` and refuse expired waits; the first step of every event."""
        actions = self._expire_waits(now)
        return actions + self._grant_all() if actions else actions

    def _expire_waits(self, now: float) -> list[Action]:
        """Set the clock to `now` and refuse the requests whose wait is over."""
        self._now = now = max(now, self._now)
        self._drain_rate.advance(now, self.capacity.used, self.capacity.slots)
        actions: list[Action] = []
        while (late := self.queue.first_past_deadline(now)) is not None:
            self.queue.remove(late.request_id)
            actions.append(self._refuse(late.arrival, RefusalReason.DEADLINE))
        while (oldest := self.queue.oldest()) is not None and self._wait_ends(oldest) <= now:
            self.queue.remove(oldest.request_id)
            actions.append(self._refuse(oldest.arrival, self._expiry_reason(oldest)))
        return actions

    def _grant_all(self) -> list[Action]:
        """Grant all requests that can run, in order."""
        grants: list[Action] = []
        while (taken := self.scheduler.grant_next()) is not None:
            waiting, replica_id = taken
            arrival = waiting.arrival
            self._counters.granted[arrival.request_class] += 1
            self._counters.granted_tokens[arrival.request_class] += arrival.cost
            grants.append(Grant(arrival.request_id, replica_id, self._now - waiting.arrived_s))
        return grants

    def _enforce_bounds(self, waiting: QueuedRequest) -> list[Action]:
        """Apply the forecast and the bounds of the queue to an arrival that has to wait."""
        arrival = waiting.arrival
        if arrival.accepted:
            return []
        # The only candidate takes the next free slot, whenever that is; if it is refused, a lower class gets the slot.
        if not self._forecast.is_only_candidate(waiting) and (late := self._late_reason(waiting)) is not None:
            self.queue.remove(arrival.request_id)
            return [self._refuse(arrival, late)]
        gone = evict_for(self.queue, self.policy, waiting)
        if gone is None:
            self.queue.remove(arrival.request_id)
            return [self._refuse(arrival, RefusalReason.QUEUE_FULL)]
        if not gone:
            return []
        return [*(self._refuse(one.arrival, RefusalReason.SHED) for one in gone), *self._grant_all()]

    def _late_reason(self, waiting: QueuedRequest) -> RefusalReason | None:
        """Why, by the forecast, a request that has just arrived cannot start in time; None: it can."""
        wait_s = self._forecast.newest_wait_s(waiting)
        if wait_s is None:
            return None
        start, deadline = self._now + wait_s, waiting.arrival.deadline
        if deadline is not None and start > deadline:
            return RefusalReason.DEADLINE
        return RefusalReason.TIMEOUT if start > waiting.arrived_s + self.policy.max_wait_s else None

    def _after_replica_change(self, is_new: bool) -> list[Action]:
        if self.capacity.slots:
            if self._no_slots_since is not None:
                self._replica_start.replica_ready(self._now, is_new)
            self._no_slots_since = None
        else:
            if self._no_slots_since is None:
                self._no_slots_since = self._now
            if len(self.queue):
                self._replica_start.begin(self._now)
        return self._grant_all()

    def _wait_ends(self, waiting: QueuedRequest) -> float:
        end = waiting.arrived_s + self.policy.max_wait_s
        if self._no_slots_since is None:
            return end
        return min(end, max(waiting.arrived_s, self._no_slots_since) + self.policy.no_replica_wait_s)

    def _expiry_reason(self, waiting: QueuedRequest) -> RefusalReason:
        if self._no_slots_since is not None:
            return RefusalReason.NO_REPLICA
        capacity, slots, cost = self.capacity, waiting.slots, waiting.cost
        if capacity.could_fit(slots, cost, waiting.placement):
            return RefusalReason.TIMEOUT
        # A replica was large enough when the request arrived; that replica has left or shrunk and none replaced it.
        if capacity.is_too_large(slots, cost, waiting.arrival.only_replica):
            return RefusalReason.TOO_LARGE
        return RefusalReason.SESSIONS if capacity.could_fit(slots, 0, waiting.placement) else RefusalReason.NO_REPLICA

    def _refuse(self, arrival: Arrival, reason: RefusalReason) -> Refuse:
        self._counters.refused[reason] += 1
        if reason is RefusalReason.TOO_LARGE:
            return Refuse(arrival.request_id, reason, None)
        if self._no_slots_since is not None:
            return Refuse(arrival.request_id, reason, self._replica_start.remaining_s(self._now))
        wait_s = self.predicted_wait_s(arrival.request_class, arrival.slots, arrival.tenant)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s)
