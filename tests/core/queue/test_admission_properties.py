"""Properties of admission under any interleaving: against a second implementation, and on their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from serve_app.core.pools import UNBOUNDED, RequestPool, TokenSpace
from serve_app.core.queue import (
    Action,
    Admission,
    Arrival,
    ClassBound,
    Grant,
    QueuePolicy,
    RefusalReason,
    Refuse,
    TenantPolicy,
)
from serve_app.types import RequestClass
from tests.core.queue.events import state
from tests.core.queue.reference_admission import Reference
from tests.effort import effort

REPLICAS = ("a", "b", "c", "d")
TENANTS = ("t", "u", "v", "w")
OFF_GRID = 0.0123  # deadlines fall between the other moments, so that rounding in the prediction cannot decide
waited = st.sampled_from([0.0, 0.0, 0.5, 1.5])  # elsewhere, before it came; less than any longest wait
spans = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 12.0])
classes = st.sampled_from(RequestClass)
tenants = st.sampled_from(TENANTS)
waits = st.sampled_from([2.0, 4.0, 8.0, 16.0])
kv_sizes = st.none() | st.integers(0, 60)
constraints = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "only_replica": st.sampled_from(REPLICAS),
        "avoid_replicas": st.frozensets(st.sampled_from(REPLICAS), max_size=3),
    },
)
# Weights are powers of two, so that sums of tokens over them are exact in whatever order.
rights = st.dictionaries(
    tenants, st.builds(TenantPolicy, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.0, 0.1, 0.25])), max_size=3
)
bounds = st.dictionaries(classes, st.builds(ClassBound, st.none() | st.integers(0, 4), st.none() | st.integers(0, 60)))


class AdmissionMachine(RuleBasedStateMachine):
    """Drives `Admission` and the reference with the same events.

    The checks named `check_*` use the reference only as a record of who is where, not of what should be decided.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = itertools.count()
        self.arrived = 0

    @initialize(
        max_queued=st.integers(0, 8) | st.just(30),
        max_wait_s=st.sampled_from([3.0, 10.0, 40.0]),
        no_replica_wait_s=waits,
        more=st.fixed_dictionaries(
            {
                "max_queued_tokens": st.none() | st.integers(0, 300),
                "classes": bounds,
                "tenants": rights,
                "min_share": st.sampled_from([0.0, 0.05, 0.3]),
            }
        ),
        sizes=st.lists(st.tuples(st.integers(0, 6), kv_sizes), max_size=4),
    )
    def start(self, max_queued, max_wait_s, no_replica_wait_s, more, sizes) -> None:  # type: ignore[no-untyped-def]
        self.policy = QueuePolicy(max_queued, max_wait_s, no_replica_wait_s, **more)
        self.most = max_queued  # who may wait; more than the bound only where it was lowered under them
        self.admission = Admission(self.policy)
        self.reference = Reference(self.policy)
        for replica, (slots, kv_tokens) in zip(REPLICAS, sizes, strict=False):
            self.set_size(replica, slots, kv_tokens, 0, 0.0)

    # Events.

    @rule(
        of=st.tuples(classes, tenants),
        slots=st.integers(1, 6) | st.just(1),
        patience_s=st.none() | st.sampled_from([-1.0, 1.0, 4.0, 9.0]),
        affinity=st.none() | st.sampled_from(REPLICAS),
        tokens=st.tuples(st.integers(0, 40), st.integers(0, 20)),
        where=constraints,
        waited_s=waited,
        span=spans,
    )
    def arrive(
        self,
        of: tuple[RequestClass, str],
        slots: int,
        patience_s: float | None,
        affinity: str | None,
        tokens: tuple[int, int],
        where: dict[str, Any],
        waited_s: float,
        span: float,
    ) -> None:
        self.now += span
        deadline = None if patience_s is None else self.now + patience_s + OFF_GRID
        prompt, output = tokens
        arrival = Arrival(
            f"q{next(self.ids)}", *of, slots, prompt + output, deadline, affinity, prompt_tokens=prompt, **where
        )
        self.arrived += 1
        self.reference.pass_time(self.now)
        self.compare(self.admission.on_tick(self.now))
        self.reference.arrive(arrival, waited_s)
        self.compare(self.admission.on_arrive(arrival, self.now, waited_s))

    @rule(
        request_class=classes,
        of=st.lists(tenants, min_size=2, max_size=6),
        runs=st.sampled_from([{}, {"accepted": True}, {"accepted": True, "produced_tokens": 2}]),
        waited_s=waited,
        span=spans,
    )
    def arrive_together(
        self, request_class: RequestClass, of: list[str], runs: dict[str, Any], waited_s: float, span: float
    ) -> None:
        """As above in a burst, and time passes in the arrival itself instead of in a tick."""
        self.now += span
        for tenant in of:
            arrival = Arrival(f"q{next(self.ids)}", request_class, tenant, 1, 9, prompt_tokens=3, **runs)
            self.arrived += 1
            self.reference.pass_time(self.now)
            self.reference.arrive(arrival, waited_s)
            self.compare(self.admission.on_arrive(arrival, self.now, waited_s))
            if runs and self.reference.requests[arrival.request_id].status == "waiting":
                self.most = max(self.most, len(self.reference.waiting()))

    @rule(
        wanted=st.lists(
            st.tuples(classes, tenants, st.sampled_from([1, 1, 3]), st.integers(1, 40), constraints),
            min_size=5,
            max_size=12,
        )
    )
    def rush(self, wanted: list[tuple[RequestClass, str, int, int, dict[str, Any]]]) -> None:
        """Many at once, so that there is an order to be kept."""
        for request_class, tenant, slots, tokens, where in wanted:
            name = f"q{next(self.ids)}"
            arrival = Arrival(name, request_class, tenant, slots, tokens, prompt_tokens=tokens // 2, **where)
            self.arrived += 1
            self.reference.pass_time(self.now)
            self.reference.arrive(arrival)
            self.compare(self.admission.on_arrive(arrival, self.now))

    @precondition(lambda self: self.reference.running())
    @rule(uses=st.lists(st.tuples(st.integers(0, 1000), st.none() | st.integers(0, 30)), min_size=2, max_size=8))
    def churn(self, uses: list[tuple[int, int | None]]) -> None:
        """Many end, one after the other."""
        for choice, output in uses:
            if running := self.reference.running():
                request_id = running[choice % len(running)].arrival.request_id
                self.reference.pass_time(self.now)
                self.reference.end(request_id, False, None, output)
                self.compare(self.admission.on_done(request_id, self.now, None, output))

    @rule(number=st.integers(0, 120), span=spans)
    def cancel(self, number: int, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.end(f"q{number}", cancel=True)
        self.compare(self.admission.on_cancel(f"q{number}", self.now))
        again = state(self.admission, self.now)
        assert self.admission.on_cancel(f"q{number}", self.now) == []
        assert state(self.admission, self.now) == again

    @precondition(lambda self: self.reference.running())
    @rule(choice=st.integers(0, 1000), tokens=st.integers(0, 20), span=spans)
    def progress(self, choice: int, tokens: int, span: float) -> None:
        running = self.reference.running()
        request_id = running[choice % len(running)].arrival.request_id
        self.reference.progress(request_id, tokens)
        self.now += span
        self.reference.pass_time(self.now)
        self.compare(self.admission.on_progress(request_id, tokens, self.now))

    @precondition(lambda self: self.reference.running())
    @rule(
        choice=st.integers(0, 1000),
        use=st.tuples(st.none() | st.integers(0, 30), st.none() | st.integers(0, 30)),
        span=spans,
    )
    def done(self, choice: int, use: tuple[int | None, int | None], span: float) -> None:
        self.now += span
        running = self.reference.running()
        request_id = running[choice % len(running)].arrival.request_id
        self.reference.pass_time(self.now)
        self.reference.end(request_id, False, *use)
        self.compare(self.admission.on_done(request_id, self.now, *use))
        again = state(self.admission, self.now)
        assert self.admission.on_done(request_id, self.now, *use) == []
        assert self.admission.on_progress(request_id, 5, self.now) == []
        assert state(self.admission, self.now) == again

    @rule(number=st.integers(0, 120))
    def done_without_a_grant(self, number: int) -> None:
        request = self.reference.requests.get(f"q{number}")
        if request is None or not request.replica:
            before = state(self.admission, self.now)
            assert self.admission.on_done(f"q{number}", self.now) == []
            assert state(self.admission, self.now) == before

    @rule(
        replica=st.sampled_from(REPLICAS),
        slots=st.integers(0, 6),
        kv_tokens=kv_sizes,
        reserved=st.sampled_from([0, 0, 20, 70]),
        span=spans,
    )
    def set_size(self, replica: str, slots: int, kv_tokens: int | None, reserved: int, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.replica(replica, slots, kv_tokens, reserved)
        known = self.admission.capacity.replicas.get(replica)
        pool = RequestPool(replica, TokenSpace(), slots) if known is None else known.pool
        pool.slots = slots
        pool.space.capacity = pool.space.limit = UNBOUNDED if kv_tokens is None else kv_tokens
        pool.space.hold(reserved - pool.space.held)
        self.compare([*self.admission.on_pool(replica, pool, self.now, reserved), *self.admission.on_tick(self.now)])

    @rule(replica=st.sampled_from(REPLICAS), level=st.none() | classes, span=spans)
    def kv_debt(self, replica: str, level: RequestClass | None, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.kv_debt(replica, level)
        self.compare(self.admission.on_kv_debt(replica, level, self.now))

    @rule(
        max_queued=st.integers(0, 8),
        max_wait_s=st.sampled_from([3.0, 10.0, 40.0]),
        no_replica_wait_s=waits,
        tenants=rights,
        span=spans,
    )
    def change_policy(self, max_queued, max_wait_s, no_replica_wait_s, tenants, span) -> None:  # type: ignore[no-untyped-def]
        """It holds for those who wait, too, and nobody is refused because the line has become too long."""
        self.now += span
        waiting = len(self.reference.waiting())
        self.policy = QueuePolicy(max_queued, max_wait_s, no_replica_wait_s, tenants=tenants, min_share=0.1)
        self.reference.policy = self.policy
        self.reference.pass_time(self.now)
        actions = self.admission.on_policy(self.policy, self.now)
        assert not {a.reason for a in actions if isinstance(a, Refuse)} & {RefusalReason.QUEUE_FULL, RefusalReason.SHED}
        self.compare(actions)
        self.most = max(max_queued, min(waiting, len(self.reference.waiting())))

    @rule(replica=st.sampled_from(REPLICAS), span=spans)
    def lose(self, replica: str, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.replica(replica, None)
        self.compare(self.admission.on_replica_gone(replica, self.now))

    @rule()
    def come_due(self) -> None:
        """Nothing happens before `next_due`; at `next_due` something does, or what has begun waits on."""
        due = self.admission.next_due()
        if due is None:
            return
        assert due > self.now
        assert self.admission.on_tick((self.now + due) / 2) == []
        self.reference.pass_time((self.now + due) / 2)
        self.now = due
        self.reference.pass_time(due)
        actions = self.admission.on_tick(due)
        assert actions or any(request.arrival.has_begun for request in self.reference.waiting())
        self.compare(actions)

    @precondition(lambda self: self.reference.requests)
    @rule(choice=st.integers(0, 1000))
    def arrive_twice(self, choice: int) -> None:
        names = list(self.reference.requests)
        request = self.reference.requests[names[choice % len(names)]]
        if request.status == "waiting" or request.replica:
            before = state(self.admission, self.now)
            with pytest.raises(ValueError, match="waits or runs already"):
                self.admission.on_arrive(request.arrival, self.now + 1.0)
            assert state(self.admission, self.now) == before

    # Checks.

    def compare(self, actions: list[Action]) -> None:
        """The actions are what the reference did, and nothing is given away twice."""
        grants = [a for a in actions if isinstance(a, Grant)]
        refusals = [a for a in actions if isinstance(a, Refuse)]
        assert [(g.request_id, g.replica_id, g.waited_s) for g in grants] == self.reference.grants
        assert sorted((r.request_id, r.reason.value) for r in refusals) == sorted(self.reference.refusals)
        assert len({a.request_id for a in actions}) == len(actions)
        for refusal in refusals:
            assert (refusal.retry_after_s is None) == (refusal.reason is RefusalReason.TOO_LARGE)
            assert refusal.retry_after_s is None or refusal.retry_after_s >= 0.0
        for grant in grants:
            replica = grant.replica_id
            if replica not in self.reference.slots:  # granted by the time that passed, and lost in the same event
                continue
            assert self.reference.used(replica) <= self.reference.slots[replica], "more slots than there are"
            kv_used = sum(r.cost for r in self.reference.running() if r.replica == replica)
            assert kv_used <= self.reference.tokens[replica], "more tokens than there are"
        self.reference.grants = []
        self.reference.refusals = []

    @invariant()
    def check_nothing_idles(self) -> None:
        """A request that fits somewhere may wait only for those before it, each class keeping one replica at most."""
        order = self.reference.waiting()
        for at, request in enumerate(order):
            fits = [replica for replica in self.reference.slots if self.reference.fits(request, replica)]
            if not any(other.level == request.level and other.size == request.size for other in order[:at]):
                assert len(fits) <= len({other.level for other in order if other is not request})

    @invariant()
    def check_snapshot(self) -> None:
        seen = self.admission.snapshot(self.now)
        requests = self.reference.requests.values()
        waiting = self.reference.waiting()
        running = self.reference.running()
        granted, cancelled = (sum(r.status == status for r in requests) for status in ("granted", "cancelled"))
        assert sum(one.granted for one in seen.classes.values()) == granted
        assert sum(seen.refused.values()) == sum(r.status == "refused" for r in requests)
        assert self.arrived == granted + sum(seen.refused.values()) + cancelled + self.admission.waiting
        assert self.admission.waiting == len(waiting)
        assert self.admission.scheduler.running.keys() == {r.arrival.request_id for r in running}
        self.most = max(self.policy.max_queued, min(self.most, len(waiting)))
        assert len(waiting) <= self.most
        for cls in RequestClass:
            of_class = [r for r in waiting if r.arrival.request_class == cls]
            figures = seen.classes[cls.label]
            assert figures.waiting == len(of_class)
            assert figures.waiting_tokens == sum(r.cost for r in of_class)
        for tenant in TENANTS:
            figures = seen.tenants.get(tenant)
            queues = [[r for r in group if r.tenant == tenant] for group in (waiting, running)]
            if figures is None:
                assert queues == [[], []]
                assert not self.reference.owed(tenant)
                continue
            assert (figures.waiting, figures.waiting_tokens) == (len(queues[0]), sum(r.cost for r in queues[0]))
            assert (figures.slots, figures.kv_tokens) == (
                sum(r.slots for r in queues[1]),
                sum(r.cost for r in queues[1]),
            )
            assert figures.below_share == self.reference.owed(tenant)
        assert self.admission.queue.tokens == sum(r.cost for r in waiting)
        assert seen.oldest_wait_s == max((self.now - r.arrived for r in waiting), default=0.0)
        replicas = self.admission.capacity.replicas
        assert {r: (one.slots, one.pool.used_slots) for r, one in replicas.items()} == {
            r: (slots, self.reference.used(r)) for r, slots in self.reference.slots.items()
        }
        assert self.admission.capacity.free == sum(self.reference.free(r) for r in replicas)
        assert self.admission.next_due() == self.reference.next_due()

    @invariant()
    def check_predictions(self) -> None:
        history = self.reference.history
        for cls in RequestClass:
            for tenant in TENANTS[:3]:
                expected = history.wait_of_newcomer(self.reference, cls, tenant)
                seen = self.admission.forecast.arrival_wait_s(cls, 1, tenant)
                assert seen == (expected and pytest.approx(expected, rel=1e-6))
        for request in self.reference.waiting():
            status = self.admission.status(request.arrival.request_id, self.now)
            assert status is not None
            assert (status.queue_class, status.position) == (request.level, history.position(self.reference, request))

    @invariant()
    def check_service(self) -> None:
        """Every tenant has been charged what it used."""
        seen = {
            (number, lane.tenant): lane.counter
            for number, level in enumerate(self.admission.queue.class_queues)
            for lane in level.tenant_queues.values()
        }
        assert seen == self.reference.served


HISTORIES = effort(8, 1000)  # each is 40 events, after each of which everything is compared


def test_admission_equals_the_reference_in_any_order_of_events() -> None:
    run_state_machine_as_test(AdmissionMachine, settings=settings(max_examples=HISTORIES, stateful_step_count=40))
