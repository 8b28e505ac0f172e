"""What a queue does with a pool that others use, too, and with requests whose holder has ended."""

from __future__ import annotations

from benchmarks.common.own_pools import set_replica
from serve_app.core.pools import Holder, RequestPool, TokenSpace
from serve_app.core.queue import Admission, EventGrants, Grant, Preempt, QueuePolicy, RefusalReason, Refuse
from tests.core.queue.events import LOW, NORMAL, arrival, of, where

POLICY = QueuePolicy(100, 60.0, no_replica_wait_s=25.0)


def pool_of(slots: int, capacity: int, limit: int) -> RequestPool:
    return RequestPool("e", TokenSpace(capacity, limit), slots)


def test_a_request_whose_holder_has_ended_is_granted_nothing_and_charged_to_no_tenant() -> None:
    queue = Admission(POLICY)
    set_replica(queue, "e", 1, 0.0)
    queue.on_arrive(arrival("runs"), 0.0)
    ended = Holder("r")
    for number in range(5):
        queue.on_arrive(of("tenant of these", f"w{number}"), 1.0, 0.0, ended)
    queue.on_arrive(of("other", "waits"), 2.0, 0.0, Holder("lives"))
    ended.is_final = True
    figures = queue.snapshot(3.0).tenants["tenant of these"]
    actions = queue.on_done("runs", 3.0)
    assert [one.request_id for one in actions if isinstance(one, Grant)] == ["waits"]
    refused = [one.reason for one in actions if isinstance(one, Refuse)]
    assert set(refused) <= {RefusalReason.LOST}
    assert "w0" not in queue.scheduler.running
    left = queue.snapshot(3.0).tenants.get("tenant of these")
    assert left is None or left.counter == figures.counter


def test_growth_beyond_the_limit_is_no_missing_room_where_a_request_may_stop() -> None:
    queue = Admission(POLICY)
    pool = pool_of(4, 1000, 900)
    router = Holder("r")
    queue.on_pool("e", pool, 0.0)
    large = of("t", "low", LOW, prompt=10, output=790, preemptible=True)
    assert where(queue.on_arrive(large, 0.0, 0.0, router)) == {"low": "e"}
    pool.charge(router, 0, 200, growth=True)
    assert queue.capacity.replicas["e"].kv_left == 0
    actions = queue.on_arrive(of("t", "normal", NORMAL, prompt=10, output=740), 5.0, 0.0, router)
    actions += queue.on_tick(30.0)
    assert [one.request_id for one in actions if isinstance(one, Preempt)] == ["low"]


def test_what_comes_free_at_once_is_granted_a_part_in_each_event_until_nothing_is_left() -> None:
    left = EventGrants(100)
    queue = Admission(POLICY, event_grants=left)
    set_replica(queue, "e", 0, 0.0)
    for number in range(50):
        queue.on_arrive(arrival(f"w{number}"), 0.0)
    granted = []
    left.count = 20
    actions = set_replica(queue, "e", 50, 1.0)
    for _ in range(3):
        granted.append(sum(isinstance(one, Grant) for one in actions))
        due = queue.next_due()
        if due is None or due > 1.0:
            break
        left.count = 20
        actions = queue.on_tick(1.0)
    assert granted == [20, 20, 10]
    assert queue.waiting == 0
