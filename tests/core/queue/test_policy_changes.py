"""Bounds of the line that change while requests wait; `test_admission_properties` has every interleaving of it."""

from __future__ import annotations

import dataclasses

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, QueuePolicy, TenantPolicy
from tests.core.queue.events import CRITICAL, HIGH, LOW, admission, arrival, arrive, of, where

PEOPLE_WAIT = QueuePolicy(max_queued=100, max_wait_s=60.0, no_replica_wait_s=25.0)


def changed(queue: Admission, now: float, **bounds: float) -> dict[str, str]:
    """What a change of these bounds does to whom."""
    return where(queue.on_policy(dataclasses.replace(PEOPLE_WAIT, **bounds), now))  # type: ignore[arg-type]


def test_a_shorter_queue_refuses_newcomers_and_nobody_who_is_in_it() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "q1", "q2", "q3")
    assert changed(queue, 1.0, max_queued=1) == {}
    assert queue.waiting == 3
    assert where(arrive(queue, "late", now=1.0)) == {"late": "queue_full"}
    assert where(queue.on_done("running", 2.0)) == {"q1": "a"}
    assert where(queue.on_done("q1", 3.0)) == {"q2": "a"}
    assert where(arrive(queue, "later", now=3.0)) == {"later": "queue_full"}  # one waits: as many as may
    assert where(queue.on_done("q2", 4.0)) == {"q3": "a"}
    assert arrive(queue, "now", now=4.0) == []


def test_in_a_queue_that_is_too_long_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    queue = admission(a=1)
    arrive(queue, "running")
    arrive(queue, "l1", "l2", "l3", cls=LOW)
    changed(queue, 1.0, max_queued=1)
    assert where(queue.on_arrive(arrival("urgent", HIGH), 1.0)) == {"l3": "shed"}
    assert queue.waiting == 3


def test_a_longer_queue_takes_more() -> None:
    queue = admission(max_queued=0, a=1)
    assert where(arrive(queue, "running", "refused")) == {"running": "a", "refused": "queue_full"}
    assert changed(queue, 1.0, max_queued=1) == {}
    assert arrive(queue, "waits", now=1.0) == []


def test_a_shorter_wait_ends_the_wait_of_those_beyond_it_at_once() -> None:
    queue = admission(a=1)
    arrive(queue, "running", "old")
    arrive(queue, "young", now=8.0)
    assert changed(queue, 10.0, max_wait_s=5.0) == {"old": "timeout"}
    assert queue.next_due() == 13.0
    assert where(queue.on_tick(13.0)) == {"young": "timeout"}


def test_a_longer_wait_gives_those_who_wait_more_time() -> None:
    queue = admission(max_wait_s=5.0, a=1)
    arrive(queue, "running", "waits")
    assert changed(queue, 4.0, max_wait_s=9.0) == {}
    assert queue.next_due() == 9.0
    assert queue.on_tick(8.0) == []
    assert where(queue.on_tick(9.0)) == {"waits": "timeout"}


def test_without_a_replica_the_wait_for_one_follows_its_own_bound() -> None:
    queue = admission()
    arrive(queue, "waits", cls=CRITICAL)
    assert queue.next_due() == 25.0
    assert changed(queue, 1.0, no_replica_wait_s=3.0) == {}
    assert queue.next_due() == 3.0
    assert where(queue.on_tick(3.0)) == {"waits": "no_replica"}


def test_a_share_given_while_others_wait_lets_its_tenant_run_at_once_where_it_fits() -> None:
    queue = Admission(PEOPLE_WAIT)
    set_replica(queue, "a", 4, 0.0, kv_tokens=100)
    assert where(queue.on_arrive(of("x", "running", output=50), 0.0)) == {"running": "a"}
    assert queue.on_arrive(of("u", "large", output=80), 0.0) == []  # first, and too large for now: it keeps the replica
    assert queue.on_arrive(of("v", "small", output=10), 0.0) == []
    policy = dataclasses.replace(PEOPLE_WAIT, tenants={"v": TenantPolicy(share=0.5)})
    assert where(queue.on_policy(policy, 0.0)) == {"small": "a"}
