"""Which request runs next, and which run: connects the queue with the replicas.

The order: first the request that is due by the minimum share, if any (`core.queue.min_share`), of each class that has a
waiting class above it or must leave the guard slots free; then the classes from the highest down, each with its next
request or, if that does not fit, with the first request behind it that fits elsewhere; classes below the guarded ones
only while more than the guard slots are free (`core.queue.drain_rate`).

A tenant is below its guaranteed share while it uses less than that part of all slots and, if KV tokens are bounded,
also less than that part of all KV tokens, those of its agent sessions included: the resource that it uses most counts.
Other tenants may use an idle share. Once the tenant waits, it is first in its class for freed slots until it has its
share, so it gets it as soon as that much comes free: within 2 s if answers take less. No running request is stopped for
it; one is stopped only for a higher class, or after its quantum for shorter ones (`core.queue.preemption`).

A running request is charged to its tenant's counter (`core.queue.class_queue`): input tokens at the start, output
tokens as produced. As in VTC, an output token costs two input tokens. At the end the charges are corrected to the
engine's token counts; until then they raise no counter of a tenant that comes. A request that has
begun has paid for its prompt, and is not charged for it again.

A request in the place of its session (`core.queue.session_place`) is charged to its tenant, too. It uses nothing of
the replicas: it costs its class no minimum share, is not stopped for others, and its end frees nothing for them.

Invariant: a running request is counted in charges and use, and in capacity unless it was handed over
(`Admission.hand_over`), or in none of them. An ended request has charged
its tenant exactly its known use, and is removed. A tenant without running requests takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from serve_app.core.pools import Holder
from serve_app.core.queue.capacity import Capacity
from serve_app.core.queue.drain_rate import GUARDED_FROM, DrainRate, guard_slots
from serve_app.core.queue.events import BegunRun, WaitReason
from serve_app.core.queue.policy import QueuePolicy
from serve_app.core.queue.preemption import Preemption
from serve_app.core.queue.queue import RequestQueue
from serve_app.core.queue.session_place import SessionPlace
from serve_app.core.queue.stoppable_runs import GrantedRequest
from serve_app.core.queue.tenant_queue import QueuedRequest, TenantQueue
from serve_app.types import RequestClass

INPUT_WEIGHT = 1.0  # as in the paper and in the prices of providers
OUTPUT_WEIGHT = 2.0  # an output token costs an engine step of its own; its price is two to five times that of input
_HIGHEST_FIRST = tuple(reversed(RequestClass))


class Scheduler:
    """The running requests. O(log n) per method unless its docstring says otherwise.

    Args:
        session_tokens: the KV tokens that open sessions of a tenant hold on the replicas.
    """

    def __init__(self, policy: QueuePolicy, session_tokens: Callable[[str], int] = lambda tenant: 0) -> None:
        self._session_tokens = session_tokens
        self.policy = policy
        self.running: dict[str, GrantedRequest] = {}
        self.unmeasured_slots = 0  # of running requests that began elsewhere
        self.in_places: dict[str, GrantedRequest] = {}  # those in the place of a session
        self.capacity = Capacity()
        self.drain_rate = DrainRate()
        self.use: dict[str, tuple[int, int]] = {}  # slots and KV tokens of running requests, by tenant
        self.shares = _shares(policy)  # guaranteed, by tenant
        self._versions_at_stall: tuple[int, ...] = ()  # the last versions at which no request could run
        self.queue = RequestQueue(lambda name: TenantQueue(name, self.policy.weight(name), self.is_below_share(name)))
        self.preemption = Preemption(self.queue.class_queues, self.capacity, self.guard_slots)

    def set_policy(self, policy: QueuePolicy) -> None:
        """Replace weights, guaranteed shares and minimum share. O(tenants)."""
        before, self.policy, self.shares = self.shares, policy, _shares(policy)
        for class_queue in self.queue.class_queues:
            class_queue.set_weights(policy.weight)
        self.update_below_share([*before, *self.shares])

    def grant_next(self, now: float) -> tuple[QueuedRequest, str | None] | None:
        """Grant the next request that can run and remove it from the queue; returns it with its replica id, or with
        None: its holder has ended, and it is granted nothing.

        O(size classes) if the first request of a class does not fit.
        """
        capacity = self.capacity
        if not capacity.most_free_slots:
            return None
        kept = self.guard_slots(RequestClass.LOW)
        # While these are unchanged, so is what `_find_next` finds: by replicas, heads, guard slots, and minimum shares,
        # which grow by grants only.
        low, normal, high, critical = self.queue.class_queues
        versions = capacity.changes, low.changes, normal.changes, high.changes, critical.changes, kept
        if versions == self._versions_at_stall:
            return None
        try:
            found = self._find_next(capacity.free <= kept)
            if found is None:
                self._versions_at_stall = versions
                return None
            if found[0].holder.is_final:
                self.queue.remove(found[0].arrival.request_id)
                return found[0], None
            return found[0], self._grant(*found, now)
        finally:
            capacity.release_held_back()

    def grant_place(self, waiting: QueuedRequest, now: float) -> None:
        """Grant a waiting request the place of its session, which is free, and remove it from the queue."""
        place = waiting.place
        assert place is not None
        place.take(waiting.holder, waiting.cost)
        run = self._begin(waiting, place.replica_id, now)
        run.place = place
        self.queue.remove(waiting.arrival.request_id)
        self.in_places[waiting.arrival.request_id] = run

    def begun(self, begun: BegunRun, holder: Holder, place: SessionPlace | None, now: float) -> None:
        """A request runs that was not granted here: what it takes is in its holder's account already."""
        arrival = begun.arrival
        request_id = arrival.request_id
        class_queue = self.queue.class_queues[arrival.request_class]
        tenant_queue = class_queue.begin_run(arrival.tenant)
        prompt = max(1, begun.prompt_tokens or arrival.prompt_tokens)
        since_s = now - begun.running_s
        run = GrantedRequest(arrival, begun.replica_id, holder, class_queue, tenant_queue, prompt, since_s, place=place)
        run.charged_output = begun.output_tokens
        if not begun.is_paid:
            self._charge_prompt(run, is_counted=begun.prompt_tokens > 0)
            class_queue.charge(tenant_queue, OUTPUT_WEIGHT * begun.output_tokens)
        self.running[request_id] = run
        if place is not None:
            self.in_places[request_id] = run
            return
        run.began_elsewhere = True
        run.was_due = begun.was_due
        self.capacity.add_run(begun.replica_id, request_id, arrival.slots, arrival.cost)
        self.unmeasured_slots += arrival.slots
        self.preemption.begin(run)
        self._add_use(arrival.tenant, arrival.slots, arrival.cost)

    def guard_slots(self, request_class: RequestClass) -> int:
        """Free slots that a class may not take: they are kept for the guarded classes."""
        share = self.policy.guard_slots_share
        if request_class >= GUARDED_FROM or not share:
            return 0
        return guard_slots(share, self.capacity.slots, self.drain_rate.drain_part(GUARDED_FROM))

    def progress(self, request_id: str, tokens: int, prompt_tokens: int | None = None) -> None:
        """A request has produced `tokens` more output tokens; `prompt_tokens`: as counted by its engine. An unknown id
        changes nothing."""
        run = self.running.get(request_id)
        if run is not None:
            more_prompt = 0 if prompt_tokens is None else max(1, prompt_tokens) - run.charged_prompt
            if prompt_tokens is not None:
                _confirm(run)
            run.charged_prompt += more_prompt
            run.charged_output += tokens
            if run.place is None:
                self.preemption.grown(run)
            run.class_queue.charge(run.tenant_queue, INPUT_WEIGHT * more_prompt + OUTPUT_WEIGHT * tokens)

    def end(
        self,
        request_id: str,
        prompt_tokens: int | None,
        output_tokens: int | None,
        returned: tuple[int, int] | None = None,
    ) -> SessionPlace | None:
        """A running request has ended after these tokens; None: unknown, its estimate counts. `returned`: slots and KV
        tokens that its account returns; None: what it was granted. Returns the place of its session, if it ran
        there."""
        run = self.running.pop(request_id)
        if output_tokens is None:
            estimated = run.arrival.cost - run.charged_prompt - run.arrival.produced_tokens
            output_tokens = max(run.charged_output, estimated)
        if run.place is not None:
            run.place.give_back(run.holder, returned)
            del self.in_places[request_id]
        else:
            self.capacity.give_back(run.replica_id, request_id, run.holder, returned)
            if run.stopping_s is None and not run.began_elsewhere:  # one that stops comes back: it drains no faster
                self.drain_rate.on_released(run.arrival.slots)
        self._settle(run, prompt_tokens, output_tokens)
        return run.place

    def drop_replica(self, replica_id: str) -> None:
        """A replica is gone with its running requests, those in places of sessions included. O(these requests + tenants
        with a share + sessions with a running request)."""
        for request_id in self.capacity.drop_replica(replica_id):
            self._settle(self.running.pop(request_id), None, None)
        in_places = [run for run in self.in_places.values() if run.replica_id == replica_id]
        for run in in_places:
            self.end(run.arrival.request_id, None, run.charged_output)
        self.preemption.replica_gone()
        self.update_below_share(self.shares)

    def lacking(self) -> dict[str, WaitReason]:
        """What the requests lack now that would be next in their classes, by request id; any other waits for its turn,
        classes below included while nothing is free. O(1)."""
        capacity = self.capacity
        heads = self._class_heads()
        if capacity.most_free_slots:  # as the last look has found
            found = {head.arrival.request_id: head.waits_for for _, head in heads if head.waits_for is not None}
        else:
            found = {head.arrival.request_id: capacity.shortage(*head.need) for _, head in heads[:1]}
        for class_queue in self.queue.class_queues:
            first = class_queue.first() if class_queue.size else None
            if first is not None and not capacity.could_fit(*first.need):
                found[first.arrival.request_id] = capacity.shortage(*first.need)
        return found

    def is_below_share(self, tenant: str) -> bool:
        """Whether a tenant uses less than its guaranteed share."""
        share = self.shares.get(tenant, 0.0)
        capacity = self.capacity
        slots, tokens = self.use.get(tenant, (0, 0))
        tokens += self._session_tokens(tenant)
        return slots < share * capacity.slots and tokens < share * capacity.kv_tokens

    def _find_next(self, only_guard_slots_free: bool) -> tuple[QueuedRequest, bool] | None:
        """The next request, and whether it is due by the minimum share of its class."""
        class_queues = self.queue.class_queues
        capacity = self.capacity
        heads = self._class_heads()
        keeping: set[RequestClass] = set()
        for at, (level, _) in enumerate(heads):
            if not at and not (only_guard_slots_free and level < GUARDED_FROM):
                continue  # it is served next in its own turn, below
            owed = class_queues[level].min_share.due_request(capacity.could_fit)
            if owed is not None:
                capacity.set_asking_class(level)
                if capacity.fits(*owed.need):
                    return owed, True
                class_queues[level].min_share.on_blocked(owed)
                capacity.hold_back(*owed.need)
                keeping.add(level)
        for at, (level, head) in enumerate(heads):
            if only_guard_slots_free and level < GUARDED_FROM:
                head.waits_for = WaitReason.GUARD_SLOTS
                continue
            capacity.set_asking_class(level)
            if capacity.fits(*head.need):
                return head, False
            head.waits_for = capacity.shortage(*head.need)
            if level not in keeping:
                capacity.hold_back(*head.need)
            most_free = capacity.most_free_slots
            if not most_free:
                for _, below in heads[at + 1 :]:
                    below.waits_for = WaitReason.TURN
                return None
            behind = class_queues[level].first_that_fits(capacity.fits, most_free, capacity.most_free_tokens)
            if behind is not None:
                return behind, False
        return None

    def _class_heads(self) -> list[tuple[RequestClass, QueuedRequest]]:
        """For each class, the highest first, its first request that some replica could run beside its sessions."""
        possible = self.capacity.could_fit
        found = []
        for level in _HIGHEST_FIRST:
            class_queue = self.queue.class_queues[level]
            head = class_queue.first() if class_queue.size else None
            if head is not None and not possible(*head.need):
                head = class_queue.first_that_fits(possible, math.inf, math.inf)
            if head is not None:
                found.append((level, head))
        return found

    def _grant(self, waiting: QueuedRequest, was_due: bool, now: float) -> str:
        arrival = waiting.arrival
        replica_id = self.capacity.take(waiting)
        run = self._begin(waiting, replica_id, now)
        run.was_due = was_due
        class_queue = run.class_queue
        class_queue.granted += 1
        class_queue.granted_tokens += waiting.unpaid
        class_queue.min_share.charge(run.tenant_queue, waiting.unpaid, was_due)
        class_queue.served_s = now
        self.queue.remove(arrival.request_id)
        self.drain_rate.granted[arrival.request_class] += waiting.slots
        self.preemption.begin(run)
        self._add_use(arrival.tenant, waiting.slots, waiting.cost)
        if self.policy.min_share:
            earned = self.policy.min_share * waiting.unpaid
            for other in self.queue.class_queues:
                if other.size:
                    other.min_share.earn(earned, other.weight)
                    other.served_s = now
        return replica_id

    def _begin(self, waiting: QueuedRequest, replica_id: str, now: float) -> GrantedRequest:
        """A granted request runs; its tenant is charged for its prompt."""
        arrival = waiting.arrival
        class_queue = self.queue.class_queues[arrival.request_class]
        tenant_queue = class_queue.tenant_queues[arrival.tenant]
        prompt = max(1, arrival.prompt_tokens)  # at least 1, or a tenant with empty prompts would always be next
        run = GrantedRequest(arrival, replica_id, waiting.holder, class_queue, tenant_queue, prompt, now)
        class_queue.running += 1
        self._charge_prompt(run)
        self.running[arrival.request_id] = run
        return run

    def _charge_prompt(self, run: GrantedRequest, *, is_counted: bool = False) -> None:
        """Charge a request's prompt to its tenant. `is_counted`: by its engine; else it is an estimate."""
        if run.arrival.has_begun:
            return  # its tenant has paid for it
        tokens = INPUT_WEIGHT * run.charged_prompt
        run.class_queue.charge(run.tenant_queue, tokens)
        if not is_counted:
            run.unconfirmed = run.charged_prompt
            run.tenant_queue.unconfirmed += tokens

    def _settle(self, run: GrantedRequest, prompt_tokens: int | None, output_tokens: int | None) -> None:
        """Correct the charges of an ended request to these tokens, and end its use. None: as charged."""
        _confirm(run)
        more_prompt = 0 if prompt_tokens is None else max(1, prompt_tokens) - run.charged_prompt
        more_output = 0 if output_tokens is None else output_tokens - run.charged_output
        run.class_queue.charge(run.tenant_queue, INPUT_WEIGHT * more_prompt + OUTPUT_WEIGHT * more_output)
        run.class_queue.end_run()
        if run.place is None:
            self.unmeasured_slots -= run.arrival.slots * run.began_elsewhere
            self.preemption.end(run)
            self._add_use(run.arrival.tenant, -run.arrival.slots, -run.arrival.cost)

    def _add_use(self, tenant: str, slots: int, tokens: int) -> None:
        """Add slots and KV tokens to a tenant's use; negative: release them."""
        had_slots, had_tokens = self.use.get(tenant, (0, 0))
        self.use[tenant] = had_slots + slots, had_tokens + tokens
        if self.use[tenant] == (0, 0):
            del self.use[tenant]
        if tenant in self.shares:
            self.update_below_share((tenant,))

    def update_below_share(self, tenants: Iterable[str]) -> None:
        """The use or the share of these tenants, or what the replicas have, has changed. O(tenants)."""
        for tenant in tenants:
            below_share = self.is_below_share(tenant)
            for class_queue in self.queue.class_queues:
                class_queue.set_below_share(tenant, below_share)


def _confirm(run: GrantedRequest) -> None:
    """What its tenant is charged for its prompt is no estimate any more."""
    run.tenant_queue.unconfirmed -= INPUT_WEIGHT * run.unconfirmed
    run.unconfirmed = 0


def _shares(policy: QueuePolicy) -> dict[str, float]:
    """The guaranteed shares by tenant."""
    return {name: tenant.share for name, tenant in policy.tenants.items() if tenant.share > 0}
