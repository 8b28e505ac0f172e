"""Each rule of preemption by itself (`core.queue.preemption`); its properties are in `test_preemption_properties`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy, RefusalReason, Refuse
from serve_app.core.queue.considered import MAX_CONSIDERED
from serve_app.core.queue.policy import BEGUN_WAIT_S
from serve_app.core.queue.preemption import REST_S, STOP_S
from serve_app.core.queue.stoppable_runs import GROWN_S, QUANTUM_S, RESUMED_S
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL, admission


def request(name: str, cls: RequestClass = LOW, slots: int = 1, **more: Any) -> Arrival:
    """A request that can be stopped."""
    return Arrival(name, cls, more.pop("tenant", "t"), slots, **({"preemptible": True} | more))


def granted(queue: Admission, *requests: Arrival, now: float = 0.0) -> None:
    """They all run at once."""
    for request in requests:
        assert [type(action) for action in queue.on_arrive(request, now)] == [Grant]


def stopped(actions: list[Action]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Preempt)]


def come_back(queue: Admission, arrival: Arrival, now: float, output_tokens: int = 0) -> list[Action]:
    """A request has stopped and arrives again."""
    return queue.on_done(arrival.request_id, now, 0, output_tokens) + queue.on_arrive(arrival, now)


def until_due(queue: Admission, last: float) -> tuple[float, list[Action]]:
    """Ticks at the moments that the line asks for, until something happens, at the latest until `last`."""
    now = 0.0
    while (due := queue.next_due()) is not None and due <= last:
        assert due > now, "a busy loop"
        now = due
        if actions := queue.on_tick(now):
            return now, actions
    return now, []


# Whom a request stops.


def test_a_waiting_request_stops_one_of_a_lower_class_and_takes_its_slot() -> None:
    queue = admission(a=1)
    granted(queue, request("low"))
    assert queue.on_arrive(request("high", HIGH), 1.0) == [Preempt("low", "a", keeps_place=True)]
    assert queue.on_done("low", 1.1) == [Grant("high", "a", pytest.approx(0.1))]


@pytest.mark.parametrize("waiting", [LOW, NORMAL])
def test_no_request_of_its_class_or_above_is_stopped(waiting: RequestClass) -> None:
    queue = admission(a=2, max_wait_s=100.0)
    granted(queue, request("1", NORMAL, prompt_tokens=9), request("2", HIGH, prompt_tokens=9, cost_tokens=9))
    assert queue.on_arrive(request("w", waiting, cost_tokens=9), 1.0) == []
    assert stopped(until_due(queue, 99.0)[1]) == []  # after their quanta, too


def test_a_long_request_of_a_higher_class_does_not_stop_for_a_short_one_after_its_quantum() -> None:
    queue = admission(a=2, max_wait_s=100.0)
    granted(queue, request("high", HIGH, prompt_tokens=900, cost_tokens=900), request("low", cost_tokens=9))
    assert queue.on_arrive(request("w", LOW, cost_tokens=9), 1.0) == []
    assert stopped(until_due(queue, 99.0)[1]) == []


def test_one_that_cannot_go_on_is_not_stopped() -> None:
    queue = admission(a=2)
    granted(queue, request("stays", preemptible=False), request("goes"))
    assert stopped(queue.on_arrive(request("1", HIGH), 1.0)) == ["goes"]
    assert queue.on_arrive(request("2", CRITICAL), 1.0) == []


def test_free_room_stops_no_one() -> None:
    queue = admission(a=1, b=1)
    granted(queue, request("low"))
    assert [type(action) for action in queue.on_arrive(request("high", HIGH), 1.0)] == [Grant]


def test_the_lowest_class_stops_first_and_of_it_the_one_that_loses_the_fewest_token_seconds() -> None:
    queue = admission(a=3)
    granted(queue, request("young", NORMAL, prompt_tokens=1), request("long", prompt_tokens=100, cost_tokens=200))
    granted(queue, request("short", prompt_tokens=40, cost_tokens=200), now=1.0)
    queue.on_progress("short", 80, 1.5)  # 120 tokens for 1 s; "long" has 100 for 2 s
    assert stopped(queue.on_arrive(request("1", HIGH), 2.0)) == ["short"]
    assert stopped(queue.on_arrive(request("2", HIGH), 2.0)) == ["long"]
    assert stopped(queue.on_arrive(request("3", HIGH), 2.0)) == ["young"]


def test_those_that_stop_for_one_request_are_of_one_replica_where_they_lose_least() -> None:
    queue = admission(a=2, b=2)
    for name, tokens in {"1": 1, "2": 50, "3": 20, "4": 20}.items():
        granted(queue, request(name, prompt_tokens=tokens, cost_tokens=tokens, affinity="a" if name < "3" else "b"))
    assert sorted(stopped(queue.on_arrive(request("w", HIGH, 2), 1.0))) == ["3", "4"]


def test_no_one_is_stopped_beside_others_that_make_enough_room() -> None:
    queue = admission(a=3)
    granted(queue, request("small", prompt_tokens=1), request("large", slots=2, prompt_tokens=9, cost_tokens=9))
    assert stopped(queue.on_arrive(request("w", HIGH, 2), 1.0)) == ["large"]


def test_room_of_what_stops_already_is_for_those_that_it_was_made_for() -> None:
    queue = admission(a=2)
    granted(queue, request("1"), request("2"))
    first = stopped(queue.on_arrive(request("w1", HIGH), 1.0))
    assert queue.on_progress(first[0], 1, 1.1) == []
    second = stopped(queue.on_arrive(request("w2", HIGH), 1.2))
    assert sorted(first + second) == ["1", "2"]
    assert queue.on_arrive(request("w3", HIGH), 1.3) == []


def test_what_stops_for_a_request_that_leaves_is_room_for_the_next_one() -> None:
    queue = admission(a=2)
    granted(queue, request("1"), request("2"))
    assert len(stopped(queue.on_arrive(request("w1", HIGH), 1.0))) == 1
    assert queue.on_cancel("w1", 1.1) == []
    assert queue.on_arrive(request("w2", HIGH), 1.2) == []


def test_kv_tokens_are_room_as_well_as_slots() -> None:
    queue = Admission(QueuePolicy(100, 60.0))
    set_replica(queue, "a", 8, 0.0, 100)
    granted(queue, request("1", cost_tokens=30), request("2", cost_tokens=60))
    assert stopped(queue.on_arrive(request("w", HIGH, cost_tokens=80), 1.0)) == ["1", "2"]
    queue = Admission(QueuePolicy(100, 60.0))
    set_replica(queue, "a", 8, 0.0, 100)
    granted(queue, request("1", cost_tokens=30), request("2", cost_tokens=60))
    assert stopped(queue.on_arrive(request("w", HIGH, cost_tokens=40), 1.0)) == ["1"]


def test_a_replica_that_has_shrunk_has_less_room_than_stops() -> None:
    queue = admission(a=3, b=1)
    granted(queue, *(request(f"a{number}", affinity="a") for number in range(3)), now=0.0)
    granted(queue, request("b0", prompt_tokens=500, cost_tokens=500))
    set_replica(queue, "a", 1, 0.5)
    assert sorted(stopped(queue.on_arrive(request("w", HIGH, only_replica="a"), 1.0))) == ["a0", "a1", "a2"]


def test_no_one_stops_where_the_request_may_not_run() -> None:
    queue = admission(a=1, b=1)
    granted(queue, request("1", affinity="a"), request("2", affinity="b"))
    assert queue.on_arrive(request("w1", HIGH, avoid_replicas=frozenset("b")), 1.0) == [Preempt("1", "a")]
    queue.on_kv_debt("b", HIGH, 1.0)
    assert queue.on_arrive(request("w2", HIGH), 1.0) == []
    assert stopped(queue.on_kv_debt("b", NORMAL, 1.1)) == ["2"]


def test_a_request_that_finds_no_room_keeps_none_from_those_that_run_elsewhere() -> None:
    queue = admission(a=1, b=1)
    granted(queue, request("stays", affinity="a", preemptible=False), request("goes", affinity="b"))
    assert queue.on_arrive(request("w1", HIGH, only_replica="a"), 1.0) == []
    assert stopped(queue.on_arrive(request("w2", HIGH, tenant="other"), 2.0)) == ["goes"]
    assert queue.on_done("goes", 2.1) == [Grant("w2", "b", pytest.approx(0.1))]


def test_a_request_that_no_stop_helps_stops_no_one() -> None:
    queue = admission(a=2)
    granted(queue, request("stays", preemptible=False), request("goes"))
    assert queue.on_arrive(request("w", HIGH, 2), 1.0) == []


def test_room_is_made_at_once_for_so_many_and_then_for_the_others() -> None:
    count = MAX_CONSIDERED + 3
    queue = admission(a=count)
    granted(queue, *(request(f"low{number}") for number in range(count)))
    names: list[str] = []
    for number in range(count):
        names += stopped(queue.on_arrive(request(f"w{number}", HIGH), 1.0))
    assert len(names) == len(set(names)) == MAX_CONSIDERED
    for name in list(names):
        names += stopped(queue.on_done(name, 1.1))
    assert len(names) == len(set(names)) == count


def test_as_many_stop_as_several_need_that_begin_to_wait_for_it_at_once() -> None:
    queue = admission(a=6)
    granted(queue, *(request(f"low{number}") for number in range(6)))
    queue.on_kv_debt("a", HIGH, 0.5)
    assert [queue.on_arrive(request(f"w{number}", HIGH), 1.0) for number in range(3)] == [[], [], []]
    assert len(stopped(queue.on_kv_debt("a", None, 2.0))) == 3


def test_a_look_that_found_no_one_is_followed_by_another_one_soon_after_a_change() -> None:
    queue = admission(a=1, b=1)
    granted(queue, request("stays", affinity="a", preemptible=False), request("goes", affinity="b"))
    queue.on_kv_debt("b", HIGH, 0.5)
    assert queue.on_arrive(request("w", HIGH), 1.0) == []
    assert queue.on_kv_debt("b", None, 1.0 + REST_S / 2) == []
    assert until_due(queue, 59.0) == (1.0 + REST_S, [Preempt("goes", "b")])


# An arrival that does not stay in the queue.


def test_a_request_that_is_refused_stops_no_one() -> None:
    queue = Admission(QueuePolicy(0, 60.0))
    set_replica(queue, "a", 1, 0.0)
    granted(queue, request("low"))
    (refusal,) = queue.on_arrive(request("w", HIGH), 1.0)
    assert isinstance(refusal, Refuse)
    assert refusal.reason is RefusalReason.QUEUE_FULL
    assert queue.on_tick(2.0) == []


def test_an_evicted_request_makes_place_for_one_that_stops_others() -> None:
    queue = admission(max_queued=1, a=1)
    granted(queue, request("low"))
    assert queue.on_arrive(request("waits"), 0.5) == []
    first, second = queue.on_arrive(request("w", HIGH), 1.0)
    assert (first.request_id, second) == ("waits", Preempt("low", "a"))


# Protection.


def test_one_that_has_gone_on_is_not_stopped_before_it_has_run_for_a_time_that_doubles() -> None:
    for preempted, protection_s in ((1, RESUMED_S), (2, 2 * RESUMED_S), (5, 16 * RESUMED_S)):
        queue = admission(a=1)
        granted(queue, request("low", preempted=preempted))
        assert queue.on_arrive(request("high", HIGH), 0.1) == []
        assert until_due(queue, 59.0) == (protection_s, [Preempt("low", "a")])


def test_another_one_stops_for_which_there_is_no_protection() -> None:
    queue = admission(a=2)
    granted(queue, request("protected", preempted=1), request("dear", prompt_tokens=999))
    assert stopped(queue.on_arrive(request("w", HIGH), 0.5)) == ["dear"]


# Requests of one class.


def test_a_long_one_stops_after_its_quantum_for_a_shorter_one_of_its_class_and_goes_on_behind_it() -> None:
    queue = admission(a=1)
    granted(queue, request("long", cost_tokens=900, prompt_tokens=100))
    assert queue.on_arrive(request("short", cost_tokens=50), 1.0) == []
    assert until_due(queue, 59.0) == (QUANTUM_S, [Preempt("long", "a", keeps_place=False)])


def test_one_that_has_become_long_while_a_shorter_one_waits_stops_for_it() -> None:
    queue = admission(a=1)
    granted(queue, request("long", cost_tokens=900, prompt_tokens=10))
    assert queue.on_arrive(request("short", cost_tokens=200), 1.0) == []
    for second in range(2, 40):
        assert queue.on_progress("long", 4, float(second)) == []  # 162 tokens
    assert queue.on_progress("long", 60, 39.1) == []
    now, actions = until_due(queue, 59.0)
    assert actions == [Preempt("long", "a", keeps_place=False)]
    assert now <= 39.1 + GROWN_S


@pytest.mark.parametrize(("preempted", "quantum_s"), [(0, QUANTUM_S), (1, 2 * QUANTUM_S), (3, 8 * QUANTUM_S)])
def test_the_quantum_doubles_each_time_it_was_stopped(preempted: int, quantum_s: float) -> None:
    queue = admission(max_wait_s=1000.0, a=1)
    granted(queue, request("long", prompt_tokens=900, cost_tokens=900, preempted=preempted))
    assert queue.on_arrive(request("short", cost_tokens=50), 1.0) == []
    assert until_due(queue, 999.0) == (quantum_s, [Preempt("long", "a", keeps_place=False)])


@pytest.mark.parametrize("waiting", [{"cost_tokens": 900}, {"cost_tokens": 50, "preempted": 1}])
def test_none_of_its_class_stops_for_a_longer_one_or_one_that_was_stopped_more_often(waiting: dict[str, Any]) -> None:
    queue = admission(max_wait_s=100.0, a=1)
    granted(queue, request("long", prompt_tokens=900, cost_tokens=900))
    assert queue.on_arrive(request("w", **waiting), 1.0) == []
    assert stopped(until_due(queue, 99.0)[1]) == []


# The minimum share, and the wait of what was stopped.


def test_one_that_was_due_by_the_minimum_share_is_never_stopped() -> None:
    queue = Admission(QueuePolicy(100, 1000.0, min_share=0.2))
    set_replica(queue, "a", 1, 0.0)
    granted(queue, request("first", HIGH, cost_tokens=10))
    queue.on_arrive(request("low", cost_tokens=10), 0.0)
    now = 0.0
    while "low" not in queue.scheduler.running:
        now += 1.0
        queue.on_arrive(request(f"high{now}", HIGH, cost_tokens=10), now)
        queue.on_done(next(iter(queue.scheduler.running)), now, 5, 5)
        assert now < 20
    assert stopped(queue.on_arrive(request("another", HIGH, cost_tokens=10), now + 100.0)) == []
    assert stopped(queue.on_arrive(request("critical", CRITICAL), now + 200.0)) == []


def test_a_stopped_request_goes_on_before_later_ones_of_its_tenant_and_one_after_its_quantum_behind() -> None:
    for age_s, first in ((5.0, "low"), (0.0, "later")):
        queue = admission(a=1)
        granted(queue, request("low"))
        queue.on_arrive(request("high", HIGH), 4.0)
        queue.on_arrive(request("later"), 4.5)
        come_back(queue, request("low", preempted=1, age_s=age_s, accepted=True), 5.0)
        assert [action.request_id for action in queue.on_done("high", 6.0)] == [first]


BEGUN = {"stopped": {"preempted": 1}, "moved": {"produced_tokens": 7}}


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_a_request_that_has_begun_may_wait_longer_than_others(begun: dict[str, Any]) -> None:
    queue = admission(a=1, max_wait_s=60.0)
    granted(queue, request("stays", HIGH))
    queue.on_arrive(request("begun", accepted=True, **begun), 0.0)
    queue.on_arrive(request("new"), 1.0)
    assert [action.request_id for action in queue.on_tick(61.0)] == ["new"]
    assert queue.on_tick(60.0 + BEGUN_WAIT_S - 0.1) == []
    assert queue.next_due() == 60.0 + BEGUN_WAIT_S
    assert [action.request_id for action in queue.on_tick(60.0 + BEGUN_WAIT_S)] == ["begun"]


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_without_a_replica_a_request_that_has_begun_waits_no_longer_than_others(begun: dict[str, Any]) -> None:
    queue = admission(a=1, max_wait_s=60.0)
    granted(queue, request("stays", HIGH))
    queue.on_arrive(request("begun", accepted=True, **begun), 0.0)
    queue.on_arrive(request("new"), 1.0)
    queue.on_replica_gone("a", 10.0)
    ends_s = 10.0 + queue.scheduler.policy.no_replica_wait_s
    assert queue.on_tick(ends_s - 0.1) == []
    assert sorted(action.request_id for action in queue.on_tick(ends_s)) == ["begun", "new"]


# Stops that do not come about.


def test_another_one_stops_for_one_that_has_not_stopped_in_time() -> None:
    queue = admission(a=2)
    granted(queue, request("1", prompt_tokens=1), request("2", prompt_tokens=9))
    assert stopped(queue.on_arrive(request("w", HIGH), 1.0)) == ["1"]
    assert queue.on_progress("1", 1, 1.5) == []
    assert queue.on_arrive(request("low"), 1.6) == []  # looks again, and finds the room that is being made
    assert until_due(queue, 59.0) == (1.0 + STOP_S, [Preempt("2", "a")])


def test_one_that_has_not_stopped_is_not_stopped_again() -> None:
    queue = admission(a=1)
    granted(queue, request("1"))
    assert stopped(queue.on_arrive(request("w", HIGH), 1.0)) == ["1"]
    assert until_due(queue, 59.0)[1] == []
    assert stopped(queue.on_arrive(request("c", CRITICAL), 59.5)) == []


def test_what_is_stopping_when_its_replica_goes_is_no_room() -> None:
    queue = admission(a=1, b=1)
    granted(queue, request("1", affinity="a"), request("2", affinity="b", prompt_tokens=99))
    assert queue.on_arrive(request("w", HIGH), 1.0) == [Preempt("1", "a")]
    assert stopped(queue.on_replica_gone("a", 1.1)) == ["2"]
