"""Where admission lets a request run, and in which order, on a clock that is a number."""

from __future__ import annotations

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, Arrival, Grant, QueuePolicy, Refuse
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, admission, arrival, arrive, where


def test_request_runs_at_once_where_most_slots_are_free() -> None:
    queue = admission(a=2, b=4)
    assert where(arrive(queue, "p", "q", "r")) == {"p": "b", "q": "b", "r": "a"}


def test_among_equals_the_least_recently_used_replica_is_taken() -> None:
    queue = admission(a=1, b=1, c=1)
    assert where(arrive(queue, "p", "q", "r")) == {"p": "a", "q": "b", "r": "c"}
    queue.on_done("r", 1.0)
    queue.on_done("p", 1.0)
    assert where(arrive(queue, "s", "t", now=2.0)) == {"s": "a", "t": "c"}


def test_affinity_is_kept_where_its_slots_are_free_and_never_waited_for() -> None:
    queue = admission(a=8, b=2)
    first = queue.on_arrive(arrival("p", slots=2, affinity="b"), 0.0)
    second = queue.on_arrive(arrival("q", affinity="b"), 0.0)
    third = queue.on_arrive(arrival("r", affinity="gone"), 0.0)
    assert where(first + second + third) == {"p": "b", "q": "a", "r": "a"}


def test_a_draining_replica_finishes_and_gets_nothing() -> None:
    queue = admission(a=2)
    arrive(queue, "p", "q", "r")
    assert set_replica(queue, "a", 0, 1.0) == []
    assert queue.on_done("p", 2.0) == []
    assert queue.capacity.replicas["a"].pool.used_slots == 1
    assert where(set_replica(queue, "b", 1, 3.0)) == {"r": "b"}


def test_a_shrunken_replica_gets_nothing_until_it_is_below_its_slots() -> None:
    queue = admission(a=3)
    arrive(queue, "p", "q", "r", "s")
    set_replica(queue, "a", 2, 1.0)
    assert queue.on_done("p", 2.0) == []
    assert where(queue.on_done("q", 3.0)) == {"s": "a"}


def test_one_that_comes_back_is_ahead_by_its_first_arrival_and_waits_as_long_as_any_other() -> None:
    queue = admission(a=1, max_wait_s=60.0)
    arrive(queue, "runs", now=100.0)
    arrive(queue, "p", now=101.0)
    back = arrival("back", age_s=90.0, accepted=True)  # it first came at 12
    assert queue.on_arrive(back, 102.0) == []
    assert queue.next_due() == 161.0  # the wait of p ends first
    assert where(queue.on_done("runs", 103.0)) == {"back": "a"}
    assert where(queue.on_done("back", 104.0)) == {"p": "a"}
    again = arrival("again", age_s=3600.0, accepted=True)
    assert queue.on_arrive(again, 105.0) == []
    assert queue.on_tick(164.0) == []
    assert [type(one) for one in queue.on_tick(165.0)] == [Refuse]


def test_a_lost_replica_takes_its_requests_along_and_they_may_come_again() -> None:
    queue = admission(a=1, b=1)
    assert where(arrive(queue, "p", "q")) == {"p": "a", "q": "b"}
    assert queue.on_replica_gone("a", 1.0) == []
    assert queue.on_done("p", 1.0) == []
    assert arrive(queue, "p", now=2.0) == []
    assert queue.on_done("q", 3.0) == [Grant("p", "b", 1.0)]
    assert queue.capacity.replicas["b"].pool.used_slots == 1


# In which order.


def test_higher_classes_run_first_and_a_class_in_order_of_arrival() -> None:
    queue = admission(a=1)
    arrive(queue, "running")
    for name, cls in (("l", LOW), ("n1", NORMAL), ("h1", HIGH), ("n2", NORMAL), ("h2", HIGH), ("c", CRITICAL)):
        queue.on_arrive(arrival(name, cls), 1.0)
    order = []
    running = "running"
    while actions := queue.on_done(running, 2.0):
        running = actions[0].request_id
        order.append(running)
    assert order == ["c", "h1", "h2", "n1", "n2", "l"]


def test_who_is_ahead_is_reported_by_class_from_the_highest_down() -> None:
    queue = admission(a=1)
    arrive(queue, "runs", "n1", "n2")
    queue.on_arrive(arrival("h", HIGH), 0.0)
    queue.on_arrive(arrival("l", LOW), 0.0)
    assert queue.ahead(NORMAL) == ((HIGH, 1), (NORMAL, 2))
    assert queue.ahead(LOW) == ((HIGH, 1), (NORMAL, 2), (LOW, 1))
    assert queue.ahead(CRITICAL) == ()


def test_small_requests_do_not_starve_a_large_one() -> None:
    queue = admission(a=4)
    arrive(queue, *"pqrs")
    assert arrive(queue, "large", slots=4) == []
    for number, running in enumerate("pqr"):
        assert arrive(queue, f"small{number}", now=1.0) == []
        assert queue.on_done(running, 1.0) == []
    assert where(queue.on_done("s", 2.0)) == {"large": "a"}
    assert where(queue.on_done("large", 3.0)) == {"small0": "a", "small1": "a", "small2": "a"}


def test_a_large_request_holds_back_one_replica_only() -> None:
    queue = admission(a=4, b=4, c=4)
    arrive(queue, *(f"r{number}" for number in range(9)))
    arrive(queue, "large", slots=4)
    assert where(arrive(queue, "s0", "s1", cls=LOW)) == {"s0": "b", "s1": "c"}
    assert queue.on_arrive(arrival("s2", affinity="a"), 0.0) == []
    assert where(queue.on_cancel("large", 1.0)) == {"s2": "a"}


def test_a_higher_class_passes_a_large_request() -> None:
    queue = admission(a=2)
    arrive(queue, "p")
    assert arrive(queue, "large", slots=2) == []
    assert where(arrive(queue, "urgent", cls=HIGH)) == {"urgent": "a"}


def test_a_large_request_keeps_a_replica_that_can_hold_it_not_the_freest_small_one() -> None:
    queue = admission(big=4, tiny=2)
    queue.on_arrive(arrival("p", slots=3, affinity="big"), 0.0)
    assert arrive(queue, "large", slots=4) == []
    assert where(arrive(queue, "s0", "s1")) == {"s0": "tiny", "s1": "tiny"}
    assert arrive(queue, "s2") == []
    assert where(queue.on_done("p", 1.0)) == {"large": "big"}


def test_each_class_keeps_a_replica_of_its_own() -> None:
    queue = admission(a=4, b=4, tiny=3)
    queue.on_arrive(arrival("p", affinity="a"), 0.0)
    queue.on_arrive(arrival("q", affinity="b"), 0.0)
    arrive(queue, "large high", cls=HIGH, slots=4)
    arrive(queue, "large", slots=4)
    assert where(queue.on_arrive(arrival("s0", affinity="b"), 0.0)) == {"s0": "tiny"}
    assert where(arrive(queue, "s1", "s2", "s3")) == {"s1": "tiny", "s2": "tiny"}
    assert where(queue.on_done("q", 1.0)) == {"large high": "b"}
    assert where(queue.on_done("p", 1.0)) == {"large": "a"}


def test_affinity_does_not_open_a_replica_that_is_kept() -> None:
    queue = admission(a=4, tiny=2)
    queue.on_arrive(arrival("p", affinity="a"), 0.0)
    arrive(queue, "large", slots=4)
    assert where(queue.on_arrive(arrival("q", affinity="a"), 0.0)) == {"q": "tiny"}


def test_a_request_that_lost_its_replica_is_not_refused_for_want_of_room() -> None:
    queue = Admission(QueuePolicy(max_queued=1, max_wait_s=60.0))
    set_replica(queue, "r", 1, 0.0)
    for number in range(2):
        queue.on_arrive(Arrival(f"{number}", RequestClass.NORMAL, "t"), 0.0)
    queue.on_replica_gone("r", 1.0)
    assert queue.on_arrive(Arrival("0", RequestClass.NORMAL, "t", accepted=True), 1.0) == []
    refused = queue.on_arrive(Arrival("2", RequestClass.NORMAL, "t"), 1.0)
    assert [type(action) for action in refused] == [Refuse]


def test_what_waits_for_a_larger_replica_does_not_keep_others_from_being_next() -> None:
    queue = admission(a=4, b=2)
    arrive(queue, "p", slots=4)
    arrive(queue, "q", slots=4)
    queue.on_replica_gone("a", 1.0)
    arrive(queue, "r", now=1.0)
    assert arrive(queue, "large", slots=2, now=1.0) == []
    assert arrive(queue, "small", now=1.0) == []  # "large" is the first that could ever run: "b" is kept for it
    assert where(queue.on_done("r", 2.0)) == {"large": "b"}
