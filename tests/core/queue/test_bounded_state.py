"""What admission remembers of requests that have left: nothing."""

from __future__ import annotations

import gc
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.keyed_heap import SLACK, KeyedHeap
from serve_app.core.queue import Admission, Arrival, QueuePolicy, TenantPolicy
from serve_app.core.queue.tenant_queue import QueuedRequest
from serve_app.types import RequestClass


@given(st.lists(st.tuples(st.integers(0, 12), st.none() | st.tuples(st.floats(0, 9), st.integers(0, 3))), max_size=300))
@settings(deadline=None)
def test_heap_knows_its_smallest_and_forgets_what_left(steps: list[tuple[int, tuple[float, int] | None]]) -> None:
    heap = KeyedHeap()
    plain = dict[str, tuple[float, int]]()
    for number, key in steps:
        if key is None:
            heap.discard(str(number))
            plain.pop(str(number), None)
        elif (first := heap.peek()) is not None and first[1] == str(number):
            heap.replace_first(key)
            plain[str(number)] = key
        else:
            heap.set(str(number), key)
            plain[str(number)] = key
        assert heap.peek() == min(((key, item) for item, key in plain.items()), default=None)
        assert list(heap.in_order()) == sorted((key, item) for item, key in plain.items())
        assert len(heap) == len(plain)
        assert len(heap.entries) <= 2 * len(plain) + SLACK


def count_waiting() -> int:
    gc.collect()
    return sum(isinstance(thing, QueuedRequest) for thing in gc.get_objects())


def test_cancelled_requests_leave_nothing_in_memory() -> None:
    admission = Admission(QueuePolicy(max_queued=1000, max_wait_s=1e9))
    set_replica(admission, "a", 1, 0.0)
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
        cycles(5_000, 2.0)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 64 * 1024  # a single kept reference per cycle would be five times this
    assert count_waiting() == waiting >= 100
    assert (admission.waiting, len(admission.scheduler.running)) == (100, 1)


def test_finished_requests_and_tenants_who_left_leave_nothing_in_memory() -> None:
    """Every request arrives, waits, runs, reports and ends; every fourth is lost with its replica."""
    tenants = {"t1": TenantPolicy(2.0, 0.3)}
    admission = Admission(QueuePolicy(max_queued=1000, max_wait_s=1e9, tenants=tenants))

    def cycles(count: int, start: float) -> None:
        for number in range(count):
            now = start + number * 1e-3
            set_replica(admission, "a", 1, now, 50)
            names = [f"q{number}.{turn}" for turn in range(3)]
            for turn, name in enumerate(names):
                tenant = f"t{number * 3 + turn}" if number % 2 else f"t{turn}"
                cost = 10 + number % 30
                admission.on_arrive(Arrival(name, RequestClass(number % 4), tenant, 1, cost, prompt_tokens=5), now)
            for turn, name in enumerate(names):
                admission.on_progress(name, 3, now)
                if turn == 2 and number % 4 == 0:
                    admission.on_replica_gone("a", now)
                else:
                    admission.on_done(name, now, 5, 20)

    cycles(1_000, 0.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        cycles(2_000, 2.0)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 32 * 1024  # 6,000 requests of 3,000 tenants: less than a reference each
    seen = admission.snapshot(20.0)
    assert (admission.waiting, seen.tenants.keys()) == (0, {"t1"})
    assert sum(one.granted for one in seen.classes.values()) == 9_000


def test_replicas_that_came_and_went_leave_nothing_in_memory() -> None:
    """Nothing waits, so that no look for what could stop follows what has changed."""
    admission = Admission(QueuePolicy(max_queued=1000, max_wait_s=1e9))
    for number in range(100):
        set_replica(admission, f"replica-{number}", 2, float(number))
        admission.on_arrive(Arrival(f"q{number}", RequestClass.NORMAL, "t", preemptible=True), float(number))
        if number >= 3:
            admission.on_replica_gone(f"replica-{number - 3}", float(number))
        assert len(admission.capacity.changed) <= 4
