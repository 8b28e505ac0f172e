"""Properties of admission under any interleaving: against a second implementation, and on their own."""

from __future__ import annotations

import gc
import itertools
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve_app.core.admission import Action, Admission, Arrival, Grant, Policy, Reason, Refuse
from serve_app.core.heap import SLACK, KeyedHeap
from serve_app.core.line import Waiting
from serve_app.types import RequestClass
from tests.core.reference_admission import Reference, Request

REPLICAS = ("a", "b", "c", "d")
OFF_GRID = 0.0123  # deadlines fall between the other moments, so that rounding in the prediction cannot decide
spans = st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 12.0])
classes = st.sampled_from(RequestClass)
waits = st.sampled_from([2.0, 4.0, 8.0, 16.0])


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
        max_queued=st.integers(0, 8),
        max_wait_s=st.sampled_from([3.0, 10.0, 40.0]),
        no_replica_wait_s=waits,
        lifts=st.tuples(waits, waits, waits),
        slots=st.lists(st.integers(0, 6), max_size=4),
    )
    def start(
        self,
        max_queued: int,
        max_wait_s: float,
        no_replica_wait_s: float,
        lifts: tuple[float, float, float],
        slots: list[int],
    ) -> None:
        high, normal, low = sorted(lifts)
        self.policy = Policy(max_queued, max_wait_s, no_replica_wait_s, (low, normal, high))
        self.most = max_queued  # who may wait; more than the bound only where it was lowered under them
        self.admission = Admission(self.policy)
        self.reference = Reference(self.policy)
        for replica, count in zip(REPLICAS, slots, strict=False):
            self.set_slots(replica, count, 0.0)

    # Events.

    @rule(
        request_class=classes,
        slots=st.integers(1, 6) | st.just(1),
        patience_s=st.none() | st.sampled_from([-1.0, 1.0, 4.0, 9.0]),
        affinity=st.none() | st.sampled_from(REPLICAS),
        tokens=st.integers(0, 100),
        span=spans,
    )
    def arrive(
        self,
        request_class: RequestClass,
        slots: int,
        patience_s: float | None,
        affinity: str | None,
        tokens: int,
        span: float,
    ) -> None:
        self.now += span
        deadline = None if patience_s is None else self.now + patience_s + OFF_GRID
        arrival = Arrival(f"q{next(self.ids)}", request_class, "t", slots, tokens, deadline, affinity)
        self.arrived += 1
        self.reference.pass_time(self.now)
        self.compare(self.admission.on_tick(self.now))
        self.reference.arrive(arrival)
        self.compare(self.admission.on_arrive(arrival, self.now))

    @rule(request_class=classes, count=st.integers(2, 6), span=spans)
    def arrive_together(self, request_class: RequestClass, count: int, span: float) -> None:
        """As above in a burst, and time passes in the arrival itself instead of in a tick."""
        self.now += span
        for _ in range(count):
            arrival = Arrival(f"q{next(self.ids)}", request_class, "t")
            self.arrived += 1
            self.reference.pass_time(self.now)
            self.reference.arrive(arrival)
            self.compare(self.admission.on_arrive(arrival, self.now), ordered=False)

    @rule(number=st.integers(0, 60), span=spans)
    def cancel(self, number: int, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.end(f"q{number}", cancel=True)
        self.compare(self.admission.on_cancel(f"q{number}", self.now), ordered=False)
        again = self.admission.snapshot(self.now)
        assert self.admission.on_cancel(f"q{number}", self.now) == []
        assert self.admission.snapshot(self.now) == again

    @precondition(lambda self: any(r.replica for r in self.reference.requests.values()))
    @rule(choice=st.integers(0, 1000), tokens=st.integers(0, 50), span=spans)
    def done(self, choice: int, tokens: int, span: float) -> None:
        self.now += span
        running = [name for name, r in self.reference.requests.items() if r.replica]
        request_id = running[choice % len(running)]
        self.reference.pass_time(self.now)
        self.reference.end(request_id, cancel=False)
        self.compare(self.admission.on_done(request_id, self.now, tokens), ordered=False)
        again = self.admission.snapshot(self.now)
        assert self.admission.on_done(request_id, self.now, tokens) == []
        assert self.admission.snapshot(self.now) == again

    @rule(number=st.integers(0, 60))
    def done_without_a_grant(self, number: int) -> None:
        request = self.reference.requests.get(f"q{number}")
        if request is None or not request.replica:
            before = self.admission.snapshot(self.now)
            assert self.admission.on_done(f"q{number}", self.now) == []
            assert self.admission.snapshot(self.now) == before

    @rule(replica=st.sampled_from(REPLICAS), slots=st.integers(0, 6), span=spans)
    def set_slots(self, replica: str, slots: int, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.replica(replica, slots)
        self.compare(self.admission.on_replica(replica, slots, self.now), ordered=False)

    @rule(
        max_queued=st.integers(0, 8),
        max_wait_s=st.sampled_from([3.0, 10.0, 40.0]),
        no_replica_wait_s=waits,
        span=spans,
    )
    def change_bounds(self, max_queued: int, max_wait_s: float, no_replica_wait_s: float, span: float) -> None:
        """They hold for those who wait, too, and nobody is refused because the line has become too long."""
        self.now += span
        waiting = len(self.reference.waiting())
        self.policy = Policy(max_queued, max_wait_s, no_replica_wait_s, self.policy.lift_after_s)
        self.reference.policy = self.policy
        self.reference.pass_time(self.now)
        actions = self.admission.on_policy(self.policy, self.now)
        assert not {a.reason for a in actions if isinstance(a, Refuse)} & {Reason.QUEUE_FULL, Reason.SHED}
        self.compare(actions, ordered=False)
        self.most = max(max_queued, min(waiting, len(self.reference.waiting())))

    @rule(replica=st.sampled_from(REPLICAS), span=spans)
    def lose(self, replica: str, span: float) -> None:
        self.now += span
        self.reference.pass_time(self.now)
        self.reference.replica(replica, None)
        self.compare(self.admission.on_replica_gone(replica, self.now), ordered=False)

    @rule()
    def come_due(self) -> None:
        """Nothing happens before `next_due`; at `next_due` something does, or somebody is lifted."""
        due = self.admission.next_due()
        if due is None:
            return
        assert due > self.now
        lifted = self.admission.snapshot(self.now).lifted
        assert self.admission.on_tick((self.now + due) / 2) == []
        assert self.admission.snapshot(self.now).lifted == lifted
        self.reference.pass_time((self.now + due) / 2)
        self.now = due
        self.reference.pass_time(due)
        before = self.admission.snapshot(due).lifted
        actions = self.admission.on_tick(due)
        assert actions or self.admission.snapshot(due).lifted != before
        self.compare(actions)

    @precondition(lambda self: self.reference.requests)
    @rule(choice=st.integers(0, 1000))
    def arrive_twice(self, choice: int) -> None:
        names = list(self.reference.requests)
        request = self.reference.requests[names[choice % len(names)]]
        if request.status == "waiting" or request.replica:
            before = self.admission.snapshot(self.now)
            with pytest.raises(ValueError, match="waits or runs already"):
                self.admission.on_arrive(request.arrival, self.now + 1.0)
            assert self.admission.snapshot(self.now) == before

    # Checks.

    def compare(self, actions: list[Action], ordered: bool = True) -> None:
        """The actions are what the reference did; and, seen one by one, they keep the rules."""
        grants = [a for a in actions if isinstance(a, Grant)]
        refusals = [a for a in actions if isinstance(a, Refuse)]
        assert [(g.request_id, g.replica_id, g.waited_s) for g in grants] == self.reference.grants
        assert sorted((r.request_id, r.reason.value) for r in refusals) == sorted(self.reference.refusals)
        assert len({a.request_id for a in actions}) == len(actions)
        for refusal in refusals:
            assert (refusal.retry_after_s is None) == (refusal.reason is Reason.TOO_LARGE)
            assert refusal.retry_after_s is None or refusal.retry_after_s >= 0.0
        self.check_grants_one_by_one([g.request_id for g in grants], ordered)
        self.reference.grants, self.reference.refusals = [], []

    def check_grants_one_by_one(self, granted: list[str], ordered: bool) -> None:
        """Undo the grants of this event from the record and give them again, looking at each moment."""
        requests = self.reference.requests
        given = [(requests[name], requests[name].replica) for name in granted]
        for request, _ in given:
            request.status, request.replica = "waiting", ""
        for request, replica in given:
            assert self.reference.free(replica) >= request.slots, "over-commit"
            for other in self.reference.waiting() if ordered else []:
                if other.level > request.level:
                    self.check_kept_back(other)
                if other.level == request.level and other.slots == request.slots:
                    assert other.entered >= request.entered, "not first come first served"
            request.status, request.replica = "granted", replica

    def check_kept_back(self, request: Request) -> None:
        """A request that fits somewhere may wait only for larger ones before it, each keeping one replica at most."""
        fits = [r for r in self.reference.slots if self.reference.free(r) >= request.slots]
        order = self.reference.waiting()
        before = order[: order.index(request)]
        assert len(fits) <= len({other.level for other in before if other.slots > request.slots})

    @invariant()
    def check_nothing_idles(self) -> None:
        for request in self.reference.waiting():
            self.check_kept_back(request)

    @invariant()
    def check_snapshot(self) -> None:
        seen = self.admission.snapshot(self.now)
        requests = self.reference.requests.values()
        waiting = self.reference.waiting()
        ends = sum(seen.granted.values()) + sum(seen.refused.values()) + seen.cancelled_waiting
        assert seen.arrived == self.arrived == ends + sum(seen.waiting.values())
        assert sum(seen.granted.values()) == sum(r.status == "granted" for r in requests)
        assert sum(seen.refused.values()) == sum(r.status == "refused" for r in requests)
        assert seen.cancelled_waiting == sum(r.status == "cancelled" for r in requests)
        self.most = max(self.policy.max_queued, min(self.most, len(waiting)))
        assert len(waiting) <= self.most
        for cls in RequestClass:
            assert seen.waiting[cls.label] == sum(r.arrival.request_class == cls for r in waiting)
        assert seen.waiting_slots == sum(r.slots for r in waiting)
        assert seen.waiting_tokens == sum(r.arrival.cost_tokens for r in waiting)
        assert seen.oldest_wait_s == max((self.now - r.arrived for r in waiting), default=0.0)
        aged = [r for r in waiting if r.arrival.request_class < RequestClass.CRITICAL]
        bounds = self.policy.lift_after_s
        assert seen.lifted == sum(r.arrived + bounds[r.arrival.request_class] <= self.now for r in aged)
        assert {r: (use.slots, use.used) for r, use in seen.replicas.items()} == {
            r: (slots, self.reference.used(r)) for r, slots in self.reference.slots.items()
        }
        assert self.admission.next_due() == self.reference.next_due()

    @invariant()
    def check_predictions(self) -> None:
        for cls in RequestClass:
            expected = self.reference.predicted_wait(cls)
            assert self.admission.predicted_wait_s(cls) == (expected and pytest.approx(expected, rel=1e-6))


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.tuples(st.floats(0, 9), st.integers(0, 3))), max_size=300))
@settings(deadline=None)
def test_heap_knows_its_smallest_and_forgets_what_left(steps: list[tuple[int, tuple[float, int] | None]]) -> None:
    heap, plain = KeyedHeap(), dict[str, tuple[float, int]]()
    for number, key in steps:
        if key is None:
            heap.discard(str(number))
            plain.pop(str(number), None)
        else:
            heap.set(str(number), key)
            plain[str(number)] = key
        assert heap.peek() == min(((key, item) for item, key in plain.items()), default=None)
        assert len(heap) == len(plain)
        assert len(heap._entries) <= 2 * len(plain) + SLACK


def count_waiting() -> int:
    gc.collect()
    return sum(isinstance(thing, Waiting) for thing in gc.get_objects())


def test_cancelled_requests_leave_nothing_in_memory() -> None:
    admission = Admission(Policy(max_queued=1000, max_wait_s=1e9))
    admission.on_replica("a", 1, 0.0)
    for number in range(101):  # one runs, a hundred wait through it all
        admission.on_arrive(Arrival(f"stays{number}", RequestClass.NORMAL, "t"), 0.0)

    def cycles(count: int, start: float) -> None:
        for number in range(count):
            now = start + number * 1e-3
            late = now + 1e6 if number % 2 else None
            admission.on_arrive(Arrival(f"q{number}", RequestClass(number % 4), "t", 1, 9, late), now)
            assert admission.on_cancel(f"q{number}", now) == []

    cycles(2_000, 0.0)
    waiting = count_waiting()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cycles(100_000, 2.0)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 64 * 1024  # a single kept reference per cycle would be 100 times this
    assert count_waiting() == waiting
    assert admission.snapshot(200.0).cancelled_waiting == 102_000
