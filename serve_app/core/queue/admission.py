"""Which requests are granted, and where, and which are refused: the bounded queue (classes x tenants) of one model.

Rules
- Order: strict between classes, with a guaranteed minimum share for each waiting class (`core.queue.min_share`).
- Inside a class, tenants share fairly by weight; a tenant's requests are served oldest first. Tenants below their
  guaranteed share come first in their class (`core.queue.class_queue`, `.scheduler`). A
  guaranteed share never passes a higher class.
- Capacity: slots and KV tokens granted on a replica never exceed its size (`.capacity`). A request whose holder has
  ended is not granted when its turn comes: it is refused, and its router is not there to read it.
- Work conserving: while slots are free, any request that fits runs, with five exceptions. 1. Guard slots are kept
  free for the classes from `high` up while these arrive (`.drain_rate`). 2. If the first request of a class does not
  fit, the replica that is nearest to fitting it is held back; requests behind it (same class and lower) fill the other
  replicas only. So small requests cannot starve a large one, and a large one holds back at most one replica, until the
  requests there have ended or its own wait is over. Higher classes pass it, unless it is due by the minimum share.
  3. Of one size (equal slots, tokens within a factor of two) none passes the first. 4. KV debt closes a replica.
  5. What comes free at once is granted a part in each event (`EventGrants`).
- A full queue refuses the newcomer, unless another request has to be evicted for it (`.queue`).
- The longest wait of a request that has begun counts from its arrival here, or from the last moment at which its class
  was served: a request of the class was granted, or the class earned of its minimum share. So it ends only if its class
  gets nothing for so long, or if at its end no replica could run the request.
- Early refusal: a request that by the forecast cannot start in time is refused at once, with the wait that the measured
  drain rate predicts (`core.queue.wait_forecast`).

Invariant: every arrival is in exactly one state: granted, refused, cancelled while waiting, or waiting.

Events in, actions out: a method takes an event and `now` (seconds of one monotonic clock; a value before the latest
seen counts as the latest) and returns the actions in order, for any request. Each method is O(log n) in waiting
requests and in replicas. The quota actor carries out the actions and calls `on_tick` when `next_due` is reached.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from serve_app.core.pools import Holder, RequestPool
from serve_app.core.queue.cold_start import ReplicaStart
from serve_app.core.queue.events import (
    Action,
    Arrival,
    BegunRun,
    Grant,
    QueueStatus,
    RefusalReason,
    Refuse,
    WaitReason,
)
from serve_app.core.queue.policy import QueuePolicy
from serve_app.core.queue.scheduler import INPUT_WEIGHT, OUTPUT_WEIGHT, Scheduler
from serve_app.core.queue.session_place import SessionPlace
from serve_app.core.queue.snapshot import Snapshot, snapshot
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.core.queue.wait_forecast import WaitForecast
from serve_app.types import RequestClass

DEFAULT_RETRY_AFTER_S = 5.0  # nothing measured yet: about one short answer of a model that has just started
NO_BOUND = 2**62  # grants in an event
MAX_RETRY_AFTER_S = 300.0  # further ahead the load will have changed


@dataclass(slots=True)
class EventGrants:
    """How many requests the queues of all models may still grant in this event of the caller. A request that arrives or
    ends in it allows one more."""

    count: int


class Admission:
    """The queue of one model and the requests that run on its replicas.

    Args:
        session_tokens: as `Scheduler`; `on_pool` follows each change.
        event_grants: bounds the grants of an event, if much comes free at once; then `next_due` is now. None: no bound.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        session_tokens: Callable[[str], int] = lambda tenant: 0,
        event_grants: EventGrants | None = None,
    ) -> None:
        self._event_grants = event_grants or EventGrants(NO_BOUND)
        self.scheduler = Scheduler(policy, session_tokens)
        self._holder = Holder("")  # of requests that belong to no router
        self._has_more = False  # whether more requests may be granted than the last event has granted
        self._unsettled: set[str] = set()  # replicas whose change has failed: the next one repeats it
        self.queue = self.scheduler.queue
        self.capacity = self.scheduler.capacity
        self.forecast = WaitForecast(self.scheduler)
        self._replica_start = ReplicaStart()
        self._now = -math.inf
        self._no_slots_since: float | None = -math.inf  # since when no replica has slots; None: some replica has slots
        self._refused = Counter[RefusalReason]()

    def on_arrive(
        self,
        arrival: Arrival,
        now: float,
        waited_s: float = 0.0,
        holder: Holder | None = None,
        place: SessionPlace | None = None,
    ) -> list[Action]:
        """A request arrives that has already waited `waited_s` in another queue. Its grant is charged to `holder`;
        None: to this queue itself. `place`: of its session.

        Raises:
            ValueError: a request of this id waits or runs already; the state is unchanged.
        """
        request_id = arrival.request_id
        if request_id in self.queue.by_id or request_id in self.scheduler.running:
            raise ValueError(f"{request_id!r} waits or runs already")
        actions = self.on_tick(now)
        if arrival.deadline is not None and arrival.deadline <= self._now:
            return [*actions, self._refuse(arrival, RefusalReason.DEADLINE)]
        if place is not None and not place.could_take(arrival.slots, arrival.cost):
            place = None
        if place is None and self._no_slots_since is None and self.capacity.is_too_large(arrival):
            return [*actions, self._refuse(arrival, RefusalReason.TOO_LARGE)]
        arrived_s = self._now - waited_s
        self._event_grants.count += 1
        wait_from_s = self._now if arrival.has_begun else arrived_s
        waiting = self.queue.add(arrival, arrived_s, wait_from_s, holder or self._holder, place)
        if place is not None and place.may_take(arrival.slots, arrival.cost):
            return actions + self._serve_place(place)
        if self._no_slots_since is not None:
            self._replica_start.begin(self._now)
        actions += self._grant_waiting()
        if self._has_more:
            return actions  # it may be one of the next to be granted
        if request_id in self.queue.by_id:
            if self._no_slots_since is not None:
                waiting.waits_for = WaitReason.NO_REPLICA
            elif waiting.waits_for is None:
                is_first = self._is_first(waiting)
                shortage = self.capacity.shortage
                waiting.waits_for = shortage(*waiting.need) if is_first else WaitReason.TURN
            actions += self._enforce_bounds(waiting)
        return actions + self._stop_for_waiting()  # not for one that is refused

    def on_begun(self, begun: BegunRun, holder: Holder, place: SessionPlace | None, now: float) -> list[Action]:
        """A request has begun elsewhere, in an account of `holder`; from now on it counts as one that was granted here.
        `place`: of its session, in which it runs.

        Raises:
            ValueError: a request of this id waits or runs already; the state is unchanged.
        """
        request_id = begun.arrival.request_id
        if request_id in self.queue.by_id or request_id in self.scheduler.running:
            raise ValueError(f"{request_id!r} waits or runs already")
        actions = self.on_tick(now)
        self.scheduler.begun(begun, holder, place, self._now)
        return actions + self._stop_for_waiting()

    def on_cancel(self, request_id: str, now: float) -> list[Action]:
        """The client of a waiting or running request has left. An unknown id changes nothing."""
        actions = self.on_tick(now)
        run = self.scheduler.running.get(request_id)
        if run is not None:
            actions += self._serve_place(self.scheduler.end(request_id, None, run.charged_output))
        elif self.queue.remove(request_id) is None:
            return actions
        return actions + self._grant_all()

    def hand_over(self, request_id: str) -> None:
        """Return what a granted request holds to its replica's pool, and grant it to nobody: the caller takes it now.
        The request ends with `on_done`."""
        run = self.scheduler.running[request_id]
        self.capacity.empty(run.replica_id, request_id, run.holder)

    def on_progress(self, request_id: str, tokens: int, now: float, prompt_tokens: int | None = None) -> list[Action]:
        """A granted request has produced `tokens` more output tokens. An unknown id changes nothing.
        `prompt_tokens`: of its prompt, now that its engine has counted them; they replace the estimate.

        Raises:
            ValueError: negative tokens; the state is unchanged.
        """
        if tokens < 0 or (prompt_tokens or 0) < 0:
            raise ValueError(f"{request_id!r}: tokens is {tokens}, prompt_tokens {prompt_tokens}")
        self.scheduler.progress(request_id, tokens, prompt_tokens)
        return self.on_tick(now) + self._grant_all()  # fair order has changed: another request is next and may fit

    def on_done(
        self,
        request_id: str,
        now: float,
        prompt_tokens: int | None = None,
        output_tokens: int | None = None,
        returned: tuple[int, int] | None = None,
    ) -> list[Action]:
        """A granted request has ended, with or without success; tokens None: unknown, the estimate counts.
        `returned`: slots and KV tokens that its account returns; None: what it was granted.

        The id of an unknown or a waiting request changes nothing: a wait ends by a grant, a refusal or a cancel only.

        Raises:
            ValueError: negative tokens; the state is unchanged.
        """
        if (prompt_tokens or 0) < 0 or (output_tokens or 0) < 0:
            raise ValueError(f"{request_id!r}: prompt_tokens is {prompt_tokens}, output_tokens {output_tokens}")
        actions = self.on_tick(now)
        if request_id not in self.scheduler.running:
            return actions
        actions += self._serve_place(self.scheduler.end(request_id, prompt_tokens, output_tokens, returned))
        self._event_grants.count += 1
        return actions + self._grant_all()

    def on_pool(self, replica_id: str, pool: RequestPool | None, now: float, session_kv: int = 0) -> list[Action]:
        """A replica grants from this pool from now on, or the pool has another size.

        Args:
            pool: None: it drains, or nothing can be granted on it for another reason.
            session_kv: KV tokens of the pool's space that sessions hold. A request that fits only after a session ends
                does not hold back the replica; if it fits on no replica beside the sessions, later requests pass it.
        """
        if replica_id not in self._unsettled and self.capacity.is_as_known(replica_id, pool, session_kv):
            return []
        self._unsettled.add(replica_id)
        refusals = self._expire_waits(now)  # by the capacity before the change
        is_new = replica_id not in self.capacity.replicas
        self.capacity.set_pool(replica_id, pool, session_kv)
        self.scheduler.update_below_share(self.scheduler.shares)
        actions = refusals + self._after_replica_change(is_new)
        self._unsettled.discard(replica_id)
        return actions

    def on_returned(self, now: float) -> list[Action]:
        """Something was returned to a replica's pool, but not by a request of this queue."""
        return self.on_tick(now) + self._grant_all()

    def on_place_returned(self, lease: str, now: float) -> list[Action]:
        """The place of a session was returned, but not by a request of this queue."""
        actions = self.on_tick(now)
        waiting = self.queue.first_for(lease)
        return actions + ([] if waiting is None else self._serve_place(waiting.place)) + self._grant_all()

    def end_session(self, lease: str) -> None:
        """A session has ended: no request may take its place any more. O(those that could)."""
        self.queue.end_session(lease)

    def on_kv_debt(self, replica_id: str, request_class: RequestClass | None, now: float) -> list[Action]:
        """A replica is in KV debt: running requests, of this class at most, need more KV tokens than were free.

        Requests of this class and below do not start there until the next report; classes above do.
        None: the KV debt is repaid.
        """
        actions = self.on_tick(now)
        self.capacity.set_kv_debt(replica_id, request_class)
        return actions + self._grant_all()

    def on_uncounted_usage(
        self, request_class: RequestClass, tenant: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A tenant was served without this queue (by router credit); its counter in the class is charged."""
        tokens = INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        self.queue.class_queues[request_class].charge_uncounted(tenant, tokens)

    def on_replica_gone(self, replica_id: str, now: float) -> list[Action]:
        """A replica is dead: its slots and the requests that ran there are removed.

        Such a request may arrive again with the same id; then no `on_done` for its first run may follow.
        """
        actions = self.on_tick(now)
        self.scheduler.drop_replica(replica_id)
        return actions + self._after_replica_change(is_new=False)

    def on_policy(self, policy: QueuePolicy, now: float) -> list[Action]:
        """New bounds and shares, for waiting requests too; a queue now above its bound refuses none of them."""
        self.scheduler.set_policy(policy)
        return self.on_tick(now) + self._grant_all()  # with new shares another request is first and may fit

    def on_tick(self, now: float) -> list[Action]:
        """Set the clock to `now` and refuse the requests whose wait is over; the first step of every event."""
        actions = self._expire_waits(now)
        if actions or self._has_more or self.scheduler.preemption.next_due() <= now:
            actions += self._grant_all()
        return actions

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.queue.by_id)

    def ahead(self, request_class: RequestClass) -> tuple[tuple[RequestClass, int], ...]:
        """Waiting requests of this class and above, by class; classes with none are left out."""
        waiting = [(level, self.queue.class_queues[level].size) for level in reversed(RequestClass)]
        return tuple((level, count) for level, count in waiting if level >= request_class and count)

    @property
    def is_contended(self) -> bool:
        """Whether every arrival has to be decided here: requests wait, or some bound is zero."""
        return bool(self.queue.by_id) or self.scheduler.policy.has_zero_bound

    def next_due(self) -> float | None:
        """The moment for the next `on_tick`; None while no request waits."""
        if self._has_more:
            return self._now
        oldest = self.queue.oldest()
        if not oldest:
            return None
        due = min(*map(self._wait_ends, oldest), self.scheduler.preemption.next_due())
        deadline = self.queue.next_deadline()
        return due if deadline is None else min(deadline[0], due)

    def slots_by_tenant(self, request_class: RequestClass, most: int) -> dict[str, int] | None:
        """The slots that each tenant waits for in a class; None if more than `most` tenants wait."""
        class_queue = self.queue.class_queues[request_class]
        if class_queue.waiting_tenant_count > most:
            return None
        return {tenant_queue.tenant: tenant_queue.slots for tenant_queue in class_queue.waiting_tenants()}

    def kv_demand(self) -> dict[RequestClass, dict[str, int]]:
        """About how many KV tokens requests wait for, by class and tenant. A class whose requests wait for some other
        reason is left out. O(waiting tenants)."""
        found = dict[RequestClass, dict[str, int]]()
        capacity = self.capacity
        for level in RequestClass:
            demand = dict[str, int]()
            lacks = False
            for tenant_queue in self.queue.class_queues[level].waiting_tenants():
                need = tenant_queue.first.need
                demand[tenant_queue.tenant] = need[1] * len(tenant_queue.order)
                lacks = lacks or not capacity.could_fit(*need)
                lacks = lacks or (not capacity.fits(*need) and capacity.shortage(*need) is WaitReason.KV_TOKENS)
            if lacks:
                found[level] = demand
        return found

    def is_full(self, request_class: RequestClass) -> bool:
        """Whether an arrival of this class is refused for every tenant because higher classes fill the queue. False if
        requests of its class or below wait: then eviction decides by tenant."""
        queue = self.queue
        policy = self.scheduler.policy
        if any(class_queue.size for class_queue in queue.class_queues[: request_class + 1]):
            return False
        tokens = policy.max_queued_tokens
        return len(queue.by_id) >= policy.max_queued > 0 or (tokens is not None and queue.tokens >= tokens > 0)

    def status(self, request_id: str, now: float) -> QueueStatus | None:
        """Position and expected start of a request; None if it does not wait. The wait counts from `now`."""
        waiting = self.queue.by_id.get(request_id)
        if waiting is None:
            return None
        status = self.forecast.status(waiting)
        if self._no_slots_since is None:
            return status
        return replace(status, expected_start_s=self._replica_start.remaining_s(max(now, self._now)))

    def wait_reasons(self) -> Iterator[tuple[QueuedRequest, WaitReason]]:
        """What each waiting request waits for now. O(waiting requests)."""
        no_replica = self._no_slots_since is not None
        lacking = {} if no_replica else self.scheduler.lacking()
        otherwise = WaitReason.NO_REPLICA if no_replica else WaitReason.TURN
        for request_id, waiting in self.queue.by_id.items():
            yield waiting, lacking.get(request_id, otherwise)

    def snapshot(self, now: float) -> Snapshot:
        """The present state in figures. O(replicas + tenants)."""
        return snapshot(self.scheduler, self.forecast, self._refused, max(now, self._now))

    def _expire_waits(self, now: float) -> list[Action]:
        """Set the clock to `now` and refuse the requests whose wait is over."""
        self._now = now = max(now, self._now)
        busy = self.capacity.used - self.scheduler.unmeasured_slots
        self.scheduler.drain_rate.advance(now, busy, self.capacity.slots)
        if not self.queue.by_id:
            return []
        actions: list[Action] = []
        while (deadline := self.queue.next_deadline()) is not None and deadline[0] <= now:
            actions.append(self._remove_and_refuse(deadline[1], RefusalReason.DEADLINE))
        while over := [one for one in self.queue.oldest() if self._wait_ends(one) <= now]:
            for request in over:
                served_s = self._served_since(request)
                if served_s is None:
                    actions.append(self._remove_and_refuse(request, self._expiry_reason(request)))
                else:
                    self.queue.set_wait_from(request, served_s)
        return actions

    def _served_since(self, waiting: QueuedRequest) -> float | None:
        """When the class of a request that has begun was served last, if that was in its wait; None: the wait ends."""
        if not waiting.arrival.has_begun or self._no_slots_since is not None:
            return None
        served_s = self.queue.class_queues[waiting.arrival.request_class].served_s
        return served_s if served_s > waiting.wait_from_s and self.capacity.could_fit(*waiting.need) else None

    def _grant_all(self) -> list[Action]:
        """Grant all requests that can run, in order; then stop running requests for others that wait."""
        return self._grant_waiting() + self._stop_for_waiting()

    def _stop_for_waiting(self) -> list[Action]:
        return [*self.scheduler.preemption.choose(self._now)] if self.queue.by_id and not self._has_more else []

    def _grant_waiting(self) -> list[Action]:
        """Grant requests that can run, in order, as far as the event may."""
        actions: list[Action] = []
        left = self._event_grants
        waiting_by_id = self.queue.by_id
        while waiting_by_id and left.count > 0 and (taken := self.scheduler.grant_next(self._now)) is not None:
            waiting, replica_id = taken
            request_id = waiting.arrival.request_id
            if replica_id is None:
                actions.append(Refuse(request_id, RefusalReason.LOST, None))
            else:
                was_due = self.scheduler.running[request_id].was_due
                waited_s = self._now - waiting.arrived_s
                actions.append(Grant(request_id, replica_id, waited_s, waiting.waits_for, was_due=was_due))
            left.count -= 1
        self._has_more = left.count <= 0 and bool(waiting_by_id)
        return actions

    def _serve_place(self, place: SessionPlace | None) -> list[Action]:
        """Grant the place of a session to the first request that fits it, if it is free."""
        waiting = None if place is None else self.queue.first_for(place.pool.name)
        if waiting is None or place is None:
            return []
        waited_s = self._now - waiting.arrived_s
        self.scheduler.grant_place(waiting, self._now)
        why = WaitReason.SESSION if waited_s else None
        return [Grant(waiting.arrival.request_id, place.replica_id, waited_s, why, place.pool.name)]

    def _enforce_bounds(self, waiting: QueuedRequest) -> list[Action]:
        """Apply the forecast and the bounds of the queue to an arrival that has to wait."""
        if waiting.arrival.accepted:
            return []
        if (late := self._late_reason(waiting)) is not None:
            return [self._remove_and_refuse(waiting, late)]
        gone = self.queue.evict_for(self.scheduler.policy, waiting)
        if gone is None:
            self.queue.remove(waiting.arrival.request_id)
            full = self.queue.exceeded(self.scheduler.policy, waiting)
            return [self._refuse(waiting.arrival, RefusalReason.QUEUE_FULL, full)]
        refusals: list[Action] = [self._refuse(one.arrival, RefusalReason.SHED) for one in gone]
        return refusals + self._grant_waiting() if gone else []

    def _late_reason(self, waiting: QueuedRequest) -> RefusalReason | None:
        """Why, by the forecast, a request that has just arrived cannot start in time; None: it can."""
        deadline = waiting.arrival.deadline
        if self._is_first(waiting):
            return None  # it takes the next free slot, whenever that is; if it is refused, a lower class gets the slot
        wait_s = self.forecast.newest_wait_s(waiting)
        if wait_s is None:
            return None
        start = self._now + wait_s
        if deadline is not None and start > deadline:
            return RefusalReason.DEADLINE
        return RefusalReason.TIMEOUT if start > waiting.arrived_s + self.scheduler.policy.max_wait_s else None

    def _is_first(self, arrived: QueuedRequest) -> bool:
        """Whether an arrival is the only waiting request of its class and above."""
        return sum(one.size for one in self.queue.class_queues[arrived.arrival.request_class :]) == 1

    def _after_replica_change(self, is_new: bool) -> list[Action]:
        had_slots = self._no_slots_since is None
        if self.capacity.slots:
            if not had_slots:
                self._replica_start.replica_ready(self._now, is_new)
            self._no_slots_since = None
        else:
            if had_slots:
                self._no_slots_since = self._now
            if self.queue.by_id:
                self._replica_start.begin(self._now)
        actions = self._grant_all()
        if self.capacity.slots and not had_slots:  # from now on the others wait for something else
            for waiting in self.queue.by_id.values():
                if waiting.waits_for is WaitReason.NO_REPLICA:
                    waiting.waits_for = WaitReason.TURN
        return actions

    def _wait_ends(self, waiting: QueuedRequest) -> float:
        policy = self.scheduler.policy
        start = waiting.wait_from_s
        end = start + policy.longest_wait_s(has_begun=waiting.arrival.has_begun)
        no_slots_since = self._no_slots_since
        return end if no_slots_since is None else min(end, max(start, no_slots_since) + policy.no_replica_wait_s)

    def _expiry_reason(self, waiting: QueuedRequest) -> RefusalReason:
        if self._no_slots_since is not None:
            return RefusalReason.NO_REPLICA
        capacity = self.capacity
        slots, cost, placement = waiting.need
        if capacity.could_fit(slots, cost, placement):
            return RefusalReason.TIMEOUT
        # A replica was large enough when the request arrived; that replica has left or shrunk and none replaced it.
        if capacity.is_too_large(waiting.arrival):
            return RefusalReason.TOO_LARGE
        return RefusalReason.SESSIONS if capacity.could_fit(slots, 0, placement) else RefusalReason.NO_REPLICA

    def _remove_and_refuse(self, waiting: QueuedRequest, reason: RefusalReason) -> Refuse:
        self.queue.remove(waiting.arrival.request_id)
        return self._refuse(waiting.arrival, reason)

    def _refuse(self, arrival: Arrival, reason: RefusalReason, full: str = "") -> Refuse:
        self._refused[reason] += 1
        if reason is RefusalReason.TOO_LARGE:
            return Refuse(arrival.request_id, reason, None)
        if self._no_slots_since is not None:
            return Refuse(arrival.request_id, reason, self._replica_start.remaining_s(self._now), full)
        wait_s = self.forecast.arrival_wait_s(arrival.request_class, arrival.slots, arrival.tenant)
        retry_s = DEFAULT_RETRY_AFTER_S if wait_s is None else min(wait_s, MAX_RETRY_AFTER_S)
        return Refuse(arrival.request_id, reason, retry_s, full)
