"""Runs that began without a grant of the queue: they count as its own, and their account has what they take already."""

from __future__ import annotations

import pytest

from serve_app.core.pools import Holder
from serve_app.core.queue import INPUT_WEIGHT, OUTPUT_WEIGHT, Admission, BegunRun, Preempt
from tests.core.queue.events import HIGH, LOW, NORMAL, admission, arrival, arrive, of, state, where


def begun(queue: Admission, holder: Holder, run: BegunRun, now: float = 0.0) -> list[object]:
    """It runs in the holder's account, and the queue hears of it."""
    queue.capacity.replicas[run.replica_id].pool.charge(holder, run.arrival.slots, run.arrival.cost)
    return [*queue.on_begun(run, holder, None, now)]


def counter(queue: Admission, tenant: str) -> float:
    return queue.queue.class_queues[NORMAL].tenant_queues[tenant].counter


def test_it_takes_nothing_more_of_the_pool_and_its_end_returns_what_is_reported() -> None:
    queue = admission(e=4)
    holder = Holder("r0")
    pool = queue.capacity.replicas["e"].pool
    for name in ("kept", "returned"):
        begun(queue, holder, BegunRun(arrival(name, slots=2), "e", 0.0))
    assert (pool.used_slots, queue.capacity.used, queue.capacity.free) == (4, 4, 0)
    waits = arrive(queue, "waits")
    assert where(waits) == {}
    assert where(queue.on_done("kept", 1.0, 1, 1, (0, 0))) == {}
    assert (pool.used_slots, queue.capacity.used) == (4, 2)
    assert where(queue.on_done("returned", 2.0, 1, 1, (2, 2))) == {"waits": "e"}
    assert (pool.used_slots, queue.capacity.used) == (3, 1)


def test_one_of_a_lower_class_stops_for_a_request_that_waits_as_soon_as_it_is_known() -> None:
    queue = admission(e=1)
    holder = Holder("r0")
    run = BegunRun(arrival("low", LOW, preemptible=True), "e", 5.0)
    queue.capacity.replicas["e"].pool.charge(holder, 1, 1)
    assert arrive(queue, "high", cls=HIGH) == []
    assert queue.on_begun(run, holder, None, 1.0) == [Preempt("low", "e")]
    assert where(queue.on_done("low", 1.1, 1, 1, (1, 1))) == {"high": "e"}


def test_the_one_that_has_run_for_less_time_stops_first() -> None:
    queue = admission(e=2)
    holder = Holder("r0")
    for name, running_s in (("old", 50.0), ("young", 5.0)):
        begun(queue, holder, BegunRun(arrival(name, LOW, preemptible=True), "e", running_s))
    assert arrive(queue, "high", cls=HIGH) == [Preempt("young", "e")]


@pytest.mark.parametrize(("counted", "is_paid"), [(0, False), (30, False), (30, True)])
def test_its_tenant_is_charged_for_what_it_has_used_and_pays_once(counted: int, is_paid: bool) -> None:
    queue = admission(e=4)
    arrive(queue, "holds the class")
    run = BegunRun(of("t", "a", prompt=10), "e", 1.0, counted, 7, is_paid)
    begun(queue, Holder("r0"), run)
    prompt = counted or 10
    charged = 0.0 if is_paid else INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * 7
    assert counter(queue, "t") == charged
    queue.on_progress("a", 3, 1.0)
    assert counter(queue, "t") == charged + OUTPUT_WEIGHT * 3
    queue.on_done("a", 2.0, 40, 12, (0, 0))
    assert counter(queue, "t") == charged + INPUT_WEIGHT * (40 - prompt) + OUTPUT_WEIGHT * 5


def test_a_tenant_whose_requests_run_elsewhere_is_not_behind_one_that_comes_later() -> None:
    queue = admission(e=2)
    holder = Holder("r0")
    for name in ("a", "b"):
        begun(queue, holder, BegunRun(of("t", name, prompt=1000), "e", 1.0, 1000, 500))
    queue.on_arrive(of("other", "first"), 1.0)
    queue.on_arrive(of("t", "second"), 1.0)
    assert counter(queue, "other") == counter(queue, "t")


def test_one_whose_id_waits_or_runs_changes_nothing() -> None:
    queue = admission(e=1)
    arrive(queue, "runs", "waits")
    before = state(queue)
    for name in ("runs", "waits"):
        with pytest.raises(ValueError, match="waits or runs already"):
            queue.on_begun(BegunRun(arrival(name), "e", 0.0), Holder("r0"), None, 0.0)
    assert state(queue) == before
