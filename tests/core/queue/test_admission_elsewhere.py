"""What a line hears of what happens without it: capacity in other hands, service by others, waits that began before."""

from __future__ import annotations

from benchmarks.common.own_pools import set_replica
from serve_app.core.pools import Holder
from serve_app.core.queue import Admission, Arrival, Grant, QueuePolicy, RefusalReason, Refuse
from serve_app.types import RequestClass

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW


def make_queue(max_queued: int = 10, slots: int = 2, kv_tokens: int | None = None, **policy: float) -> Admission:
    admission = Admission(QueuePolicy(max_queued=max_queued, max_wait_s=60.0, **policy))  # type: ignore[arg-type]
    set_replica(admission, "r", slots, 0.0, kv_tokens)
    return admission


def arrival(name: str, level: RequestClass = NORMAL, tenant: str = "t", slots: int = 1, cost: int = 1) -> Arrival:
    return Arrival(name, level, tenant, slots, cost)


def free_on(admission: Admission) -> tuple[int, float]:
    replica = admission.capacity.replicas["r"]
    return max(0, replica.slots_left), max(0.0, replica.kv_left)


def test_what_is_in_other_hands_is_not_granted_and_is_waited_for() -> None:
    admission = make_queue(slots=2, kv_tokens=100)
    pool = admission.capacity.replicas["r"].pool
    other = Holder("other")
    pool.charge(other, 1, 60)
    assert free_on(admission) == (1, 40)
    assert admission.on_arrive(arrival("large", slots=2), 0.0) == [], "it fits once the rest is back: not too large"
    pool.give_back(other, 1, 0)
    assert admission.on_returned(1.0) == [Grant("large", "r", 1.0)]
    assert free_on(admission) == (0, 39)


def test_the_wait_elsewhere_counts() -> None:
    admission = make_queue(slots=1)
    admission.on_arrive(arrival("runs"), 0.0)
    assert admission.on_arrive(arrival("old"), 10.0, waited_s=55.0) == []
    assert (
        next(action for action in admission.on_tick(15.0) if isinstance(action, Refuse)).reason is RefusalReason.TIMEOUT
    )


def test_who_was_served_elsewhere_comes_after_who_was_not() -> None:
    admission = make_queue(slots=1)
    admission.on_arrive(arrival("runs", tenant="other"), 0.0)
    admission.on_arrive(arrival("served", tenant="heavy"), 0.0)
    admission.on_arrive(arrival("light", tenant="light"), 1.0)
    admission.on_uncounted_usage(NORMAL, "heavy", 1000, 1000)
    assert [action.request_id for action in admission.on_done("runs", 2.0)] == ["light"]


def test_service_of_a_class_in_which_nobody_is_leaves_nothing_behind() -> None:
    admission = make_queue()
    for number in range(100):
        admission.on_uncounted_usage(LOW, f"t{number}", 10, 10)
    assert admission.scheduler.queue.class_queues[LOW].tenant_queues == {}


def test_a_queue_is_full_for_a_class_when_only_higher_ones_fill_it() -> None:
    admission = make_queue(max_queued=2, slots=1)
    admission.on_arrive(arrival("runs"), 0.0)
    for name in ("a", "b"):
        assert not admission.is_full(LOW)
        admission.on_arrive(arrival(name, HIGH), 0.0)
    assert [admission.is_full(level) for level in (LOW, NORMAL, HIGH)] == [True, True, False]
    refused = admission.on_arrive(arrival("c", NORMAL), 0.0)
    assert [action.reason for action in refused if isinstance(action, Refuse)] == [RefusalReason.QUEUE_FULL]
