"""Which request runs next, and which run: connects the queue with the replicas.

The order: first the request that is due by the minimum share, if any (`core.queue.min_share`), of each class that has a
waiting class above it or must leave the guard slots free; then the classes from the highest down, each with its next
request or, if that does not fit, with the first request behind it that fits elsewhere; classes below the guarded ones
only while more than the guard slots are free (`core.queue.guard_slots`).

Invariant: a running request is counted in capacity, charges and shares, or in none of them.
"""

from __future__ import annotations

import math

from serve_app.core.queue import guard_slots
from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.drain_rate import DrainRate
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.guaranteed_shares import GuaranteedShares
from serve_app.core.queue.policy import QueuePolicy
from serve_app.core.queue.queue import RequestQueue
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.core.queue.vtc_charges import INPUT_WEIGHT, OUTPUT_WEIGHT, VtcCharges
from serve_app.types import RequestClass


class Scheduler:
    """The running requests. O(log n) per method unless its docstring says otherwise."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._running: dict[str, Arrival] = {}
        self._charges = VtcCharges()
        self.capacity = Capacity()
        self.guaranteed_shares = GuaranteedShares(policy.tenants)
        self.drain_rate = DrainRate()
        self._versions_at_stall: tuple[int, ...] = ()  # the last result of `_versions` at which no request could run
        self._below_share: set[str] = set()  # tenants below their share
        self.queue = RequestQueue(lambda tenant: self._policy.weight(tenant), self._below_share.__contains__)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def set_policy(self, policy: QueuePolicy) -> None:
        """Replace weights, guaranteed shares and minimum share. O(tenants)."""
        shares = set(self.guaranteed_shares.tenants_with_share())
        self._policy = policy
        self.guaranteed_shares.set_shares(policy.tenants)
        self.queue.refresh_weights()
        self._update_shares(*shares, *self.guaranteed_shares.tenants_with_share())

    def grant_next(self) -> tuple[QueuedRequest, str] | None:
        """Grant the next request that can run and remove it from the queue; returns it with its replica id.

        O(size classes) if the first request of a class does not fit.
        """
        capacity = self.capacity
        if not capacity.most_free_slots:
            return None
        kept = self.guard_slots(RequestClass.LOW)
        if (state := self._versions(kept)) == self._versions_at_stall:
            return None
        try:
            found = self._find_next(capacity.free <= kept)
            if found is None:
                self._versions_at_stall = state
                return None
            return found[0], self._grant(*found)
        finally:
            capacity.release_held_back()

    def guard_slots(self, request_class: RequestClass) -> int:
        """Free slots that a class may not take: they are kept for the guarded classes."""
        if request_class >= guard_slots.GUARDED_FROM or not self._policy.guard_slots_share:
            return 0
        part = self.drain_rate.drain_part(guard_slots.GUARDED_FROM)
        return guard_slots.guard_slots(self._policy.guard_slots_share, self.capacity.slots, part)

    def progress(self, request_id: str, tokens: int) -> None:
        """A running request has produced `tokens` more output tokens."""
        self._charges.progress(request_id, tokens)

    def charge_uncounted(
        self, request_class: RequestClass, tenant: str, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Charge a tenant for tokens of this model that it was served without this queue."""
        tokens = INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        weight = self._policy.weight(tenant)
        self.queue.class_queues[request_class].charge_uncounted(tenant, weight, self.is_below_share(tenant), tokens)

    def done(self, request_id: str, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """A running request has ended after these tokens; None: unknown, its estimate counts."""
        self._charges.done(request_id, prompt_tokens, output_tokens)
        self._give_back(request_id)

    def cancel(self, request_id: str) -> None:
        """A running request was cancelled; the output that it has produced is charged."""
        self._charges.cancelled(request_id)
        self._give_back(request_id)

    def set_replica(
        self, replica_id: str, slots: int, kv_tokens: int | None, used_elsewhere: tuple[int, int], session_kv: int
    ) -> None:
        """A replica has this size from now on. O(tenants with a share)."""
        self.capacity.set_replica(replica_id, slots, kv_tokens, used_elsewhere, session_kv)
        self._update_shares(*self.guaranteed_shares.tenants_with_share())

    def drop_replica(self, replica_id: str) -> None:
        """A replica is gone with its running requests. O(these requests + tenants with a share)."""
        for request_id in self.capacity.drop_replica(replica_id):
            self._charges.cancelled(request_id)
            self._remove_running(request_id)
        self._update_shares(*self.guaranteed_shares.tenants_with_share())

    def _versions(self, guard_slot_count: int) -> tuple[int, ...]:
        """While this is unchanged, so is the result of `_find_next`.

        That depends on replicas, heads, guard slots, and minimum shares, which grow by grants only.
        """
        low, normal, high, critical = self.queue.class_queues
        return self.capacity.changes, low.changes, normal.changes, high.changes, critical.changes, guard_slot_count

    def _find_next(self, only_guard_slots_free: bool) -> tuple[QueuedRequest, bool] | None:
        """The next request, and whether it is due by the minimum share of its class."""
        class_queues, capacity = self.queue.class_queues, self.capacity
        heads = self._class_heads()
        keeping: set[RequestClass] = set()
        for at, (level, _) in enumerate(heads):
            if not at and not (only_guard_slots_free and level < guard_slots.GUARDED_FROM):
                continue  # it is served next in its own turn, below
            owed = class_queues[level].min_share.due_request(class_queues[level].tenant_queues, capacity.could_fit)
            if owed is not None:
                capacity.set_asking_class(level)
                if capacity.fits(owed.slots, owed.cost, owed.placement):
                    return owed, True
                class_queues[level].min_share.on_blocked(
                    class_queues[level].tenant_queues[owed.arrival.tenant], owed.cost
                )
                capacity.hold_back(owed.slots, owed.cost, owed.placement)
                keeping.add(level)
        for level, head in heads:
            if only_guard_slots_free and level < guard_slots.GUARDED_FROM:
                continue
            capacity.set_asking_class(level)
            if capacity.fits(head.slots, head.cost, head.placement):
                return head, False
            if level not in keeping:
                capacity.hold_back(head.slots, head.cost, head.placement)
            most_free = capacity.most_free_slots
            if not most_free:
                return None
            behind = class_queues[level].first_that_fits(capacity.fits, most_free, capacity.most_free_tokens)
            if behind is not None:
                return behind, False
        return None

    def _class_heads(self) -> list[tuple[RequestClass, QueuedRequest]]:
        """For each class, the highest first, its first request that some replica could run beside its sessions."""
        possible, found = self.capacity.could_fit, []
        for level in self.queue.waiting_classes():
            class_queue = self.queue.class_queues[level]
            head = class_queue.first()
            if head is not None and not possible(head.slots, head.cost, head.placement):
                head = class_queue.first_that_fits(possible, math.inf, math.inf)
            if head is not None:
                found.append((level, head))
        return found

    def _grant(self, waiting: QueuedRequest, was_due: bool) -> str:
        arrival, level = waiting.arrival, self.queue.class_queues[waiting.queue_class]
        self._charges.begin(waiting, level)
        level.min_share.charge(level.tenant_queues[arrival.tenant], waiting.cost, was_due)
        self.queue.remove(arrival.request_id)
        replica_id = self.capacity.take(
            arrival.request_id, waiting.slots, waiting.cost, arrival.affinity, waiting.placement
        )
        self.drain_rate.on_granted(waiting.queue_class, arrival.slots)
        self._running[arrival.request_id] = arrival
        self._add_use(arrival, 1)
        if self._policy.min_share:
            earned = self._policy.min_share * waiting.cost
            for class_queue in self.queue.class_queues:
                if class_queue.size:
                    class_queue.min_share.earn(earned, class_queue.weight, class_queue.tenant_queues)
        return replica_id

    def _give_back(self, request_id: str) -> None:
        self.drain_rate.on_released(self.capacity.give_back(request_id))
        self._remove_running(request_id)

    def _remove_running(self, request_id: str) -> None:
        self._add_use(self._running.pop(request_id), -1)

    def _add_use(self, arrival: Arrival, sign: int) -> None:
        self.guaranteed_shares.add_use(arrival.tenant, sign * arrival.slots, sign * arrival.cost)
        if self.guaranteed_shares.has_share(arrival.tenant):
            self._update_shares(arrival.tenant)

    def is_below_share(self, tenant: str) -> bool:
        """Whether a tenant uses less than its guaranteed share."""
        return self.guaranteed_shares.is_below_share(tenant, self.capacity.slots, self.capacity.kv_tokens)

    def _update_shares(self, *tenants: str) -> None:
        for tenant in tenants:
            owed = self.is_below_share(tenant)
            if owed is not (tenant in self._below_share):
                self._below_share ^= {tenant}
                self.queue.set_below_share(tenant, owed)
