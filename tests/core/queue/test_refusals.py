"""Whom admission refuses, when, and which wait it predicts, on a clock that is a number."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    Admission,
    ClassBound,
    Grant,
    QueuedAmount,
    QueuePolicy,
    QueueStatus,
    RefusalReason,
    Refuse,
    TenantPolicy,
    refusal_error,
)
from serve_app.core.queue.cold_start import DEFAULT_REMAINING_S, LONGEST_START_S, ReplicaStart
from serve_app.core.queue.drain_rate import MAX_SHARE_ABOVE
from serve_app.core.queue.events import Preempt
from serve_app.types import RequestClass
from tests.core.queue.events import HIGH, LOW, NORMAL, admission, arrival, arrive, where


def test_a_full_queue_refuses_its_own_class_and_below() -> None:
    queue = admission(max_queued=2, a=1)
    arrive(queue, "p", "q", "r")
    assert where(arrive(queue, "s") + arrive(queue, "t", cls=LOW)) == {"s": "queue_full", "t": "queue_full"}
    assert queue.snapshot(0.0).classes["normal"].waiting == 2


def test_without_a_queue_only_what_runs_at_once_is_taken() -> None:
    queue = admission(max_queued=0, a=1)
    assert where(arrive(queue, "p", "q")) == {"p": "a", "q": "queue_full"}


def test_a_higher_class_sheds_the_youngest_of_the_lowest_class() -> None:
    queue = admission(max_queued=3, a=1)
    arrive(queue, "p", "n")
    arrive(queue, "l1", cls=LOW)
    arrive(queue, "l2", cls=LOW)
    shed = [where(arrive(queue, f"h{number}", cls=HIGH)) for number in range(4)]
    assert shed == [{"l2": "shed"}, {"l1": "shed"}, {"n": "shed"}, {"h3": "queue_full"}]


def test_what_a_shed_request_kept_back_goes_on() -> None:
    queue = admission(max_queued=2, big=4, tiny=2)
    arrive(queue, "fills big", slots=4)
    arrive(queue, "in tiny")
    arrive(queue, "p")
    arrive(queue, "large", cls=LOW, slots=2)
    queue.on_arrive(arrival("behind", LOW, accepted=True), 0.0)
    assert queue.on_done("p", 1.0) == []  # "large" keeps tiny's free slot
    assert where(arrive(queue, "high", cls=HIGH, slots=4, now=1.0)) == {"large": "shed", "behind": "tiny"}


def test_a_wait_ends_after_the_longest_wait() -> None:
    queue = admission(max_wait_s=5.0, a=1)
    arrive(queue, "p", now=1.0)
    arrive(queue, "q", now=1.0)
    assert queue.next_due() == 6.0
    assert queue.on_tick(5.9) == []
    assert where(queue.on_tick(6.0)) == {"q": "timeout"}
    assert queue.next_due() is None


def test_a_deadline_ends_the_wait() -> None:
    queue = admission(a=1)
    arrive(queue, "p")
    queue.on_arrive(arrival("q", deadline=3.0), 1.0)
    assert queue.next_due() == 3.0
    assert where(queue.on_done("p", 3.0)) == {"q": "deadline"}
    assert where(queue.on_arrive(arrival("late", deadline=3.0), 3.0)) == {"late": "deadline"}


def test_a_deadline_that_the_measured_wait_exceeds_is_refused_at_once() -> None:
    queue = admission(a=1)
    arrive(queue, "p", "q")
    assert queue.on_arrive(arrival("guess", deadline=0.1), 0.0) == []  # nothing measured: no refusal on a guess
    queue.on_done("p", 4.0)  # a slot is held for four seconds, so q has four ahead and r eight
    assert queue.on_arrive(arrival("r", deadline=8.5), 4.0) == []
    (refusal,) = queue.on_arrive(arrival("s", deadline=11.5), 4.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.request_id, refusal.reason) == ("s", RefusalReason.DEADLINE)
    assert refusal.retry_after_s == pytest.approx(8.0, rel=0.05)


def test_who_is_next_is_not_refused_for_a_forecast_and_a_lower_class_waits_behind_it() -> None:
    queue = admission(a=1)
    arrive(queue, "p", "q")
    queue.on_done("p", 4.0)  # a slot is held for four seconds
    arrive(queue, "batch", cls=LOW, now=4.0)
    assert queue.on_arrive(arrival("soon", deadline=6.0), 4.0) == []
    assert where(queue.on_arrive(arrival("behind", deadline=6.0), 4.0)) == {"behind": "deadline"}
    assert where(queue.on_done("q", 5.0)) == {"soon": "a"}


def test_the_first_answer_of_many_makes_the_queue_look_no_slower_than_it_is() -> None:
    """Of four that run for four seconds each, one has ended: whoever comes now waits ten rounds, not forty."""
    queue = admission(a=4)
    arrive(queue, *(f"p{number}" for number in range(44)))
    for number in range(4):
        queue.on_done(f"p{number}", 4.0)
        assert queue.on_arrive(arrival(f"after {number}"), 4.0) == []
    assert queue.forecast.arrival_wait_s(NORMAL, 1, "tenant") == pytest.approx(41.0, rel=0.05)


def test_more_slots_than_any_replica_has_is_refused_at_once() -> None:
    queue = admission(a=2, b=3)
    assert arrive(queue, "p", slots=4) == [Refuse("p", RefusalReason.TOO_LARGE, None)]


def test_what_was_accepted_waits_for_a_replica_of_its_size() -> None:
    queue = admission(max_wait_s=10.0, a=4, b=2)
    arrive(queue, "p", slots=4)
    arrive(queue, "q", "r", slots=4)
    set_replica(queue, "a", 0, 1.0)
    assert where(arrive(queue, "s", now=2.0)) == {"s": "b"}
    assert where(set_replica(queue, "c", 4, 3.0)) == {"q": "c"}
    set_replica(queue, "c", 0, 4.0)
    assert where(queue.on_tick(10.0)) == {"r": "too_large"}


def test_without_a_replica_requests_are_held_and_then_refused() -> None:
    queue = admission()
    arrive(queue, "p", slots=50, now=3600.0)  # an hour idle at zero replicas does not count against it
    arrive(queue, "q", now=3610.0)
    assert queue.on_tick(3624.9) == []
    assert queue.on_tick(3625.0) == [Refuse("p", RefusalReason.NO_REPLICA, DEFAULT_REMAINING_S)]
    assert where(set_replica(queue, "a", 1, 3626.0)) == {"q": "a"}
    arrive(queue, "r", now=3626.0)
    queue.on_replica_gone("a", 3640.0)
    assert queue.on_tick(3664.0) == []
    assert where(queue.on_tick(3665.0)) == {"r": "no_replica"}


# Starts from zero: `admission()` refuses after 25 s without a replica.


def retry_after(actions: list[Any]) -> list[float | None]:
    return [action.retry_after_s for action in actions if isinstance(action, Refuse)]


def expected_start_s(queue: Admission, name: str, now: float) -> float | None:
    """What a request that arrives now is told of its start."""
    assert arrive(queue, name, now=now) == []
    status = queue.status(name, now)
    assert status is not None
    return status.expected_start_s


def test_without_a_replica_retry_after_is_what_the_last_start_leaves() -> None:
    queue = admission()
    arrive(queue, "p", now=100.0)
    set_replica(queue, "a", 1, 140.0)  # nobody is left: p was refused at 125; the start took 40 s all the same
    queue.on_replica_gone("a", 200.0)
    arrive(queue, "q", now=1000.0)
    assert retry_after(queue.on_tick(1025.0)) == [15.0]
    arrive(queue, "r", now=1026.0)
    assert retry_after(queue.on_tick(1051.0)) == [DEFAULT_REMAINING_S]  # late: nobody knows


def test_a_queue_that_is_full_while_a_replica_starts_says_when_it_is_there() -> None:
    queue = admission(max_queued=1)
    arrive(queue, "first", now=0.0)
    set_replica(queue, "a", 1, 30.0)
    queue.on_replica_gone("a", 40.0)
    arrive(queue, "p", now=100.0)
    assert retry_after(arrive(queue, "q", now=110.0)) == [20.0]
    assert retry_after(arrive(queue, "r", cls=HIGH, now=112.0)) == [18.0]  # p gave its place


def test_what_was_measured_counts_for_more_than_what_an_engine_reported() -> None:
    start = ReplicaStart()
    start.reported(5.0)
    start.begin(0.0)
    assert start.remaining_s(2.0) == 3.0
    start.replica_ready(12.0, is_new=True)
    assert start.measured_s == 12.0
    start.begin(20.0)
    assert start.remaining_s(20.0) == 12.0


def test_a_queue_without_places_says_after_a_start_how_long_the_next_takes() -> None:
    queue = admission(max_queued=0)
    arrive(queue, "p", now=0.0)
    set_replica(queue, "a", 1, 12.0)
    set_replica(queue, "a", 0, 13.0)
    assert retry_after(arrive(queue, "q", now=20.0)) == [12.0]


def test_a_replica_that_was_only_away_is_no_start() -> None:
    queue = admission(a=1)
    set_replica(queue, "a", 0, 1.0)
    arrive(queue, "p", now=1.0)
    assert where(set_replica(queue, "a", 1, 2.0)) == {"p": "a"}
    set_replica(queue, "a", 0, 3.0)
    assert expected_start_s(queue, "q", 3.0) == DEFAULT_REMAINING_S


def test_a_start_given_up_long_ago_is_not_measured() -> None:
    queue = admission()
    arrive(queue, "p", now=0.0)
    queue.on_tick(100.0)
    later = LONGEST_START_S + 1.0
    arrive(queue, "q", now=later)
    set_replica(queue, "a", 1, later + 7.0)
    queue.on_replica_gone("a", later + 8.0)
    assert expected_start_s(queue, "r", later + 8.0) == 7.0
    queue.on_tick(later + 100.0)
    set_replica(queue, "b", 1, 2 * later + 100.0)
    queue.on_replica_gone("b", 2 * later + 101.0)
    assert expected_start_s(queue, "s", 2 * later + 101.0) == 7.0


# What waits and what runs.


def test_waiting_and_granted_are_each_request_once() -> None:
    queue = admission(a=2, b=1)
    arrive(queue, "large", slots=2)
    arrive(queue, "p", "q", "r")
    assert (queue.waiting, queue.scheduler.running.keys()) == (2, {"large", "p"})
    queue.on_done("p", 1.0)
    assert (queue.waiting, queue.scheduler.running.keys()) == (1, {"large", "q"})
    set_replica(queue, "a", 0, 2.0)  # drains: what runs there goes on
    assert (queue.waiting, queue.scheduler.running.keys()) == (1, {"large", "q"})
    queue.on_cancel("r", 3.0)
    assert (queue.waiting, queue.scheduler.running.keys()) == (0, {"large", "q"})


# Predictions.


def test_nothing_measured_means_no_prediction_and_the_default_retry() -> None:
    queue = admission(max_queued=0, a=1)
    assert queue.forecast.arrival_wait_s(NORMAL, 1, "tenant") == 0.0
    arrive(queue, "p")
    assert queue.forecast.arrival_wait_s(NORMAL, 1, "tenant") is None
    assert arrive(queue, "q", now=50.0) == [Refuse("q", RefusalReason.QUEUE_FULL, DEFAULT_RETRY_AFTER_S)]


def busy(slots: int, each_s: float, until: float, cls: RequestClass = NORMAL, max_wait_s: float = 60.0) -> Admission:
    """A replica always full, `slots` new requests every `each_s` seconds, and nobody waiting."""
    queue = admission(max_queued=1000, max_wait_s=max_wait_s, a=slots)
    for turn in range(int(until / each_s)):
        for slot in range(slots):
            queue.on_done(f"{turn - 1}.{slot}", turn * each_s)
            arrive(queue, f"{turn}.{slot}", cls=cls, now=turn * each_s)
    queue.on_tick(until)
    for slot in range(slots):
        queue.on_done(f"{int(until / each_s) - 1}.{slot}", until)
        arrive(queue, f"now.{slot}", cls=cls, now=until)
    return queue


def test_the_wait_is_the_slots_ahead_over_the_drain() -> None:
    queue = busy(slots=4, each_s=2.0, until=100.0)
    assert queue.snapshot(100.0).drain_slots_per_s == pytest.approx(2.0, rel=0.05)
    arrive(queue, *(f"w{number}" for number in range(9)), now=100.0)
    assert queue.forecast.arrival_wait_s(NORMAL, 1, "tenant") == pytest.approx(5.0, rel=0.05)
    assert queue.forecast.arrival_wait_s(NORMAL, 3, "tenant") == pytest.approx(6.0, rel=0.05)


def test_an_idle_hour_does_not_slow_the_prediction_and_a_new_replica_quickens_it() -> None:
    queue = busy(slots=4, each_s=2.0, until=100.0)
    for slot in range(4):
        queue.on_done(f"now.{slot}", 102.0)
    rate = queue.snapshot(102.0).drain_slots_per_s
    queue.on_tick(3700.0)
    assert queue.snapshot(3700.0).drain_slots_per_s == rate
    set_replica(queue, "b", 4, 3700.0)
    assert rate is not None
    assert queue.snapshot(3700.0).drain_slots_per_s == pytest.approx(2 * rate)


def test_what_a_lost_replica_ran_no_longer_counts_as_busy() -> None:
    queue, other = (busy(slots=1, each_s=1.0, until=10.0) for _ in range(2))
    set_replica(queue, "b", 5, 10.0)
    arrive(queue, *"vwxyz", now=10.0)
    queue.on_replica_gone("b", 10.0)
    queue.on_tick(15.0)
    other.on_tick(15.0)
    assert queue.snapshot(15.0).drain_slots_per_s == pytest.approx(other.snapshot(15.0).drain_slots_per_s)


def test_a_class_waits_longer_by_what_the_classes_above_take() -> None:
    queue = busy(slots=2, each_s=1.0, until=300.0, cls=HIGH)
    high = queue.forecast.arrival_wait_s(HIGH, 1, "tenant")
    low = queue.forecast.arrival_wait_s(LOW, 1, "tenant")
    assert high is not None
    assert low == pytest.approx(high / (1 - MAX_SHARE_ABOVE))


def test_retry_after_is_bounded() -> None:
    queue = busy(slots=1, each_s=1.0, until=50.0, max_wait_s=2000.0)
    arrive(queue, *(f"w{number}" for number in range(1000)), now=50.0)
    assert arrive(queue, "one more", now=50.0) == [Refuse("one more", RefusalReason.QUEUE_FULL, MAX_RETRY_AFTER_S)]


# The values themselves.


def test_an_earlier_moment_counts_as_the_latest_seen() -> None:
    queue = admission(a=1)
    arrive(queue, "p", "q", now=10.0)
    assert queue.on_done("p", 4.0) == [Grant("q", "a", 0.0)]


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"cost_tokens": -1}, {"deadline": float("nan")}])
def test_an_impossible_arrival_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        arrival("p", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_queued": -1},
        {"max_wait_s": 0.0},
        {"no_replica_wait_s": float("nan")},
        {"max_queued_tokens": -1},
        {"classes": {LOW: ClassBound(-1)}},
        {"classes": {LOW: ClassBound(None, -1)}},
        {"min_share": 0.34},
        {"min_share": -0.1},
        {"tenants": {"t": TenantPolicy(0.0)}},
        {"tenants": {"t": TenantPolicy(1e-4)}},
        {"tenants": {"t": TenantPolicy(1e16)}},
        {"tenants": {"t": TenantPolicy(float("nan"))}},
        {"tenants": {"t": TenantPolicy(share=-0.1)}},
        {"tenants": {"t": TenantPolicy(share=0.6), "u": TenantPolicy(share=0.5)}},
    ],
)
def test_an_impossible_policy_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_queued|wait|min_share|tenant"):
        QueuePolicy(**({"max_queued": 1, "max_wait_s": 1.0} | wrong))


STATUSES = {
    RefusalReason.NO_REPLICA: 503,
    RefusalReason.LOST: 503,
    RefusalReason.TOO_LARGE: 400,
    RefusalReason.NOT_CONTINUABLE: 502,
}


@pytest.mark.parametrize(("reason", "status"), [(reason, STATUSES.get(reason, 429)) for reason in RefusalReason])
def test_a_refusal_is_an_error_with_its_reason_and_wait(reason: RefusalReason, status: int) -> None:
    error = pickle.loads(pickle.dumps(refusal_error(Refuse("p", reason, 1.5))))
    assert (error.status, error.body()["error"]["code"]) == (status, reason.value)
    assert error.retry_after_s == (None if reason is RefusalReason.TOO_LARGE else 1.5)


def full_texts(queue: Admission, *requests: tuple[str, RequestClass]) -> list[str]:
    found = [queue.on_arrive(arrival(name, level), 0.0) for name, level in requests]
    return [action.full for actions in found for action in actions if isinstance(action, Refuse)]


def test_a_full_queue_says_how_many_wait_of_how_many() -> None:
    queue = admission(max_queued=2, a=1)
    arrive(queue, "runs", "p", "q")
    assert full_texts(queue, ("r", NORMAL)) == ["2 of 2 requests wait"]
    (refused,) = [action for action in arrive(queue, "s") if isinstance(action, Refuse)]
    assert str(refusal_error(refused)) == "The queue of this model is full: 2 of 2 requests wait."
    assert str(refusal_error(Refuse("t", RefusalReason.QUEUE_FULL, 1.0))) == "The queue of this model is full."


def test_a_full_class_and_a_queue_full_of_tokens_are_distinguished() -> None:
    policy = QueuePolicy(max_queued=9, max_wait_s=60.0, max_queued_tokens=100, classes={LOW: ClassBound(1)})
    queue = Admission(policy)
    set_replica(queue, "a", 1, 0.0)
    arrive(queue, "runs")
    arrive(queue, "p", cls=LOW)
    assert full_texts(queue, ("q", LOW)) == ["1 of 1 low requests wait"]
    few = QueuedAmount(1, 90)
    assert policy.exceeded(NORMAL, few, few, 10) == ""
    assert policy.exceeded(NORMAL, few, few, 11) == "90 of 100 tokens wait"


def test_events_and_actions_cross_process_borders() -> None:
    queue = admission(a=1)
    values = [QueueStatus("p", LOW, 3, None), Preempt("p", "a"), QueuePolicy(1, 1.0, classes={LOW: ClassBound(1)})]
    values += [
        arrival("p", deadline=1.0),
        Grant("p", "a", 0.5),
        Refuse("p", RefusalReason.SHED, 2.0),
        queue.snapshot(0.0),
    ]
    assert pickle.loads(pickle.dumps(values)) == values
