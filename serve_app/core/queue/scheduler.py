"""What runs, and who runs next: the meeting of the line and the replicas.

The order: first, of each class that stands below another or has to leave the headroom free, the request that its
minimum share owes it, if any (`core.queue.min_share`); then the classes from the highest down, each with its next
request and, where that does not fit, with whoever behind it fits elsewhere; those below the classes of the headroom
only while more than that is free (`core.queue.guard_slots`).

Invariant: what runs is known to replicas, charges and shares alike, or to none of them.
"""

from __future__ import annotations

import math

from serve_app.core.queue import guard_slots
from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.drain_rate import DrainRate
from serve_app.core.queue.events import Arrival
from serve_app.core.queue.guaranteed_shares import Guarantees
from serve_app.core.queue.policy import Policy
from serve_app.core.queue.queue import Line
from serve_app.core.queue.tenant_queue import Waiting
from serve_app.core.queue.vtc_charges import INPUT_WEIGHT, OUTPUT_WEIGHT, Service
from serve_app.types import RequestClass


class Running:
    """The requests on replicas. O(log n) per method, save where it is said."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._arrivals: dict[str, Arrival] = {}
        self._service = Service()
        self.capacity = Capacity()
        self.guarantees = Guarantees(policy.tenants)
        self.drain = DrainRate()
        self._exhausted: tuple[int, ...] = ()  # what `_state` was when nobody could run
        self._owed: set[str] = set()  # tenants below their share
        self.line = Line(lambda tenant: self._policy.weight(tenant), self._owed.__contains__)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def set_policy(self, policy: Policy) -> None:
        """Other weights, shares and trickle from now on. O(tenants)."""
        shares = set(self.guarantees.shares())
        self._policy = policy
        self.guarantees.set_shares(policy.tenants)
        self.line.reweigh()
        self._look_at_shares(*shares, *self.guarantees.shares())

    def take_next(self) -> tuple[Waiting, str] | None:
        """Let the next one run that can, and take it out of the line; with its replica.

        O(sizes of requests) where the first of a class does not fit.
        """
        capacity = self.capacity
        if not capacity.most_free:
            return None
        kept = self.kept(RequestClass.LOW)
        if (state := self._state(kept)) == self._exhausted:
            return None
        try:
            found = self._next(capacity.free <= kept)
            if found is None:
                self._exhausted = state
                return None
            return found[0], self._take(*found)
        finally:
            capacity.reopen()

    def kept(self, level: RequestClass) -> int:
        """Free slots that a class may not take, since they are kept for the classes above."""
        if level >= guard_slots.CLASSES_FROM or not self._policy.headroom_share:
            return 0
        part = self.drain.part(guard_slots.CLASSES_FROM)
        return guard_slots.kept(self._policy.headroom_share, self.capacity.slots, part)

    def progress(self, request_id: str, tokens: int) -> None:
        """A request has produced so many more tokens."""
        self._service.progress(request_id, tokens)

    def served_elsewhere(self, level: RequestClass, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """A tenant was given so many tokens of this model without this line."""
        tokens = INPUT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        weight = self._policy.weight(tenant)
        self.line.stages[level].charge_elsewhere(tenant, weight, self.below_share(tenant), tokens)

    def done(self, request_id: str, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """A request that runs has ended after so many tokens; None: its estimate counts."""
        self._service.done(request_id, prompt_tokens, output_tokens)
        self._give_back(request_id)

    def cancel(self, request_id: str) -> None:
        """A request that runs was cancelled; what it has produced counts."""
        self._service.stopped(request_id)
        self._give_back(request_id)

    def set_replica(
        self, replica_id: str, slots: int, kv_tokens: int | None, lent: tuple[int, int], reserved: int
    ) -> None:
        """A replica has this size from now on. O(tenants with a share)."""
        self.capacity.set_replica(replica_id, slots, kv_tokens, lent, reserved)
        self._look_at_shares(*self.guarantees.shares())

    def drop(self, replica_id: str) -> None:
        """A replica is gone with what it ran. O(what it ran, tenants with a share)."""
        for request_id in self.capacity.drop(replica_id):
            self._service.stopped(request_id)
            self._forget(request_id)
        self._look_at_shares(*self.guarantees.shares())

    def _state(self, kept: int) -> tuple[int, ...]:
        """While it is the same, so is what `_next` finds.

        It looks at replicas, at heads, at minimum shares, which grow by grants alone, and at the headroom.
        """
        low, normal, high, critical = self.line.stages
        return self.capacity.changes, low.changes, normal.changes, high.changes, critical.changes, kept

    def _next(self, short: bool) -> tuple[Waiting, bool] | None:
        """The next request, and whether it is due by the minimum share of its class; `short`: no more is free than the
        headroom."""
        stages, capacity = self.line.stages, self.capacity
        heads = self._heads()
        keeping: set[RequestClass] = set()
        for at, (level, _) in enumerate(heads):
            if not at and not (short and level < guard_slots.CLASSES_FROM):
                continue  # its own turn comes next
            owed = stages[level].share.due(stages[level].lanes, capacity.possible)
            if owed is not None:
                capacity.turn(level)
                if capacity.fits(owed.slots, owed.cost, owed.where):
                    return owed, True
                stages[level].share.blocked(stages[level].lanes[owed.arrival.tenant], owed.cost)
                capacity.close(owed.slots, owed.cost, owed.where)
                keeping.add(level)
        for level, head in heads:
            if short and level < guard_slots.CLASSES_FROM:
                continue
            capacity.turn(level)
            if capacity.fits(head.slots, head.cost, head.where):
                return head, False
            if level not in keeping:
                capacity.close(head.slots, head.cost, head.where)
            most_free = capacity.most_free
            if not most_free:
                return None
            behind = stages[level].first_where(capacity.fits, most_free, capacity.most_tokens)
            if behind is not None:
                return behind, False
        return None

    def _heads(self) -> list[tuple[RequestClass, Waiting]]:
        """Of each level, from the highest, the first that some replica could hold beside its sessions."""
        possible, found = self.capacity.possible, []
        for level in self.line.levels():
            stage = self.line.stages[level]
            head = stage.first()
            if head is not None and not possible(head.slots, head.cost, head.where):
                head = stage.first_where(possible, math.inf, math.inf)
            if head is not None:
                found.append((level, head))
        return found

    def _take(self, waiting: Waiting, due: bool) -> str:
        arrival, level = waiting.arrival, self.line.stages[waiting.level]
        self._service.begin(waiting, level)
        level.share.pay(level.lanes[arrival.tenant], waiting.cost, due)
        self.line.remove(arrival.request_id)
        replica_id = self.capacity.take(
            arrival.request_id, waiting.slots, waiting.cost, arrival.affinity, waiting.where
        )
        self.drain.granted(waiting.level, arrival.slots)
        self._arrivals[arrival.request_id] = arrival
        self._use(arrival, 1)
        if self._policy.trickle_share:
            earned = self._policy.trickle_share * waiting.cost
            for stage in self.line.stages:
                if stage.size:
                    stage.share.earn(earned, stage.weight, stage.lanes)
        return replica_id

    def _give_back(self, request_id: str) -> None:
        self.drain.released(self.capacity.give_back(request_id))
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._use(self._arrivals.pop(request_id), -1)

    def _use(self, arrival: Arrival, sign: int) -> None:
        self.guarantees.use(arrival.tenant, sign * arrival.slots, sign * arrival.cost)
        if self.guarantees.has(arrival.tenant):
            self._look_at_shares(arrival.tenant)

    def below_share(self, tenant: str) -> bool:
        """Whether a tenant has less than what is guaranteed to it."""
        return self.guarantees.below(tenant, self.capacity.slots, self.capacity.kv_tokens)

    def _look_at_shares(self, *tenants: str) -> None:
        for tenant in tenants:
            owed = self.below_share(tenant)
            if owed is not (tenant in self._owed):
                self._owed ^= {tenant}
                self.line.set_owed(tenant, owed)
