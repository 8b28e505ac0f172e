"""Bounds of the line that change while requests wait; `test_admission_properties` has every interleaving of it."""

from __future__ import annotations

import dataclasses

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, QueuePolicy, TenantPolicy
from tests.core.queue.events import CRITICAL, HIGH, LOW, admission, arrival, arrive, of, where

PEOPLE_WAIT = QueuePolicy(max_queued=100, max_wait_s=60.0, no_replica_wait_s=25.0)


def changed(line: Admission, now: float, **bounds: float) -> dict[str, str]:
    """What a change of these bounds does to whom."""
    return where(line.on_policy(dataclasses.replace(PEOPLE_WAIT, **bounds), now))  # type: ignore[arg-type]


def test_a_shorter_line_refuses_newcomers_and_nobody_who_is_in_it() -> None:
    line = admission(a=1)
    arrive(line, "running", "q1", "q2", "q3")
    assert changed(line, 1.0, max_queued=1) == {}
    assert line.waiting == 3
    assert where(arrive(line, "late", now=1.0)) == {"late": "queue_full"}
    assert where(line.on_done("running", 2.0)) == {"q1": "a"}
    assert where(line.on_done("q1", 3.0)) == {"q2": "a"}
    assert where(arrive(line, "later", now=3.0)) == {"later": "queue_full"}  # one waits: as many as may
    assert where(line.on_done("q2", 4.0)) == {"q3": "a"}
    assert arrive(line, "now", now=4.0) == []


def test_in_a_line_that_is_too_long_a_higher_class_takes_the_place_of_a_lower_one() -> None:
    line = admission(a=1)
    arrive(line, "running")
    arrive(line, "l1", "l2", "l3", cls=LOW)
    changed(line, 1.0, max_queued=1)
    assert where(line.on_arrive(arrival("urgent", HIGH), 1.0)) == {"l3": "shed"}
    assert line.waiting == 3


def test_a_longer_line_takes_more() -> None:
    line = admission(max_queued=0, a=1)
    assert where(arrive(line, "running", "refused")) == {"running": "a", "refused": "queue_full"}
    assert changed(line, 1.0, max_queued=1) == {}
    assert arrive(line, "waits", now=1.0) == []


def test_a_shorter_wait_ends_the_wait_of_those_beyond_it_at_once() -> None:
    line = admission(a=1)
    arrive(line, "running", "old")
    arrive(line, "young", now=8.0)
    assert changed(line, 10.0, max_wait_s=5.0) == {"old": "timeout"}
    assert line.next_due() == 13.0
    assert where(line.on_tick(13.0)) == {"young": "timeout"}


def test_a_longer_wait_gives_those_who_wait_more_time() -> None:
    line = admission(max_wait_s=5.0, a=1)
    arrive(line, "running", "waits")
    assert changed(line, 4.0, max_wait_s=9.0) == {}
    assert line.next_due() == 9.0
    assert line.on_tick(8.0) == []
    assert where(line.on_tick(9.0)) == {"waits": "timeout"}


def test_without_a_replica_the_wait_for_one_follows_its_own_bound() -> None:
    line = admission()
    arrive(line, "waits", cls=CRITICAL)
    assert line.next_due() == 25.0
    assert changed(line, 1.0, no_replica_wait_s=3.0) == {}
    assert line.next_due() == 3.0
    assert where(line.on_tick(3.0)) == {"waits": "no_replica"}


def test_a_share_given_while_others_wait_lets_its_tenant_run_at_once_where_it_fits() -> None:
    line = Admission(PEOPLE_WAIT)
    set_replica(line, "a", 4, 0.0, kv_tokens=100)
    assert where(line.on_arrive(of("x", "running", output=50), 0.0)) == {"running": "a"}
    assert line.on_arrive(of("u", "large", output=80), 0.0) == []  # first, and too large for now: it keeps the replica
    assert line.on_arrive(of("v", "small", output=10), 0.0) == []
    policy = dataclasses.replace(PEOPLE_WAIT, tenants={"v": TenantPolicy(share=0.5)})
    assert where(line.on_policy(policy, 0.0)) == {"small": "a"}
