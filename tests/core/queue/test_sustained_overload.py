"""Ten minutes of overload before clients who stay, in virtual time: order holds, and nobody starves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from benchmarks.common.own_pools import set_replica
from benchmarks.line_attack.staying import Crowd, Staying
from serve_app.core.queue import Admission, QueuePolicy, RefusalReason, Refuse
from tests.core.queue.events import HIGH, LOW, NORMAL, admission, arrival, arrive, of, where
from tests.core.queue.simulated_engines import patient

SPAN_S = 600.0
POLICY = QueuePolicy(max_queued=1000, max_wait_s=60.0)
PEOPLE_HIGH, PEOPLE_NORMAL = ([Crowd(level, "people", 0, arrive_share=0.3)] for level in (HIGH, NORMAL))
CROWD, BATCH = ([Crowd(level, f"crowd-{n}", 12) for n in range(20)] for level in (NORMAL, LOW))
LARGE = [Crowd(LOW, "large", 1, tokens=32_000), Crowd(LOW, "small", 20), Crowd(LOW, "smaller", 20, tokens=100)]


def run(crowds: Sequence[Crowd], policy: QueuePolicy = POLICY) -> Staying:
    found = Staying(crowds, policy, seed=1)
    found.run(SPAN_S)
    return found


@pytest.mark.parametrize(("above", "below", "most_s"), [(PEOPLE_HIGH, CROWD, 0.5), (PEOPLE_NORMAL, BATCH, 1.0)])
def test_a_crowd_that_stays_in_a_lower_class_does_not_delay_a_higher_one(
    above: list[Crowd], below: list[Crowd], most_s: float
) -> None:
    """With lifts by age the medians were 10.2 s and 20.2 s."""
    found = run([*above, *below])
    waits = found.waits(above[0].level)
    assert len(waits) > 800
    assert waits[len(waits) // 2] <= most_s
    assert found.starved() == 0


@pytest.mark.parametrize(
    "crowds",
    [
        [Crowd(HIGH, f"h{n}", 50) for n in range(4)] + LARGE,
        [Crowd(HIGH, f"h{n}", 50) for n in range(4)] + [Crowd(LOW, f"l{n}", 3) for n in range(100)],
        [Crowd(HIGH, f"h{n}", 20) for n in range(4)] + CROWD + BATCH,
    ],
    ids=["large head", "many tenants", "three classes"],
)
def test_under_full_overload_from_above_every_class_and_tenant_gets_its_part(crowds: list[Crowd]) -> None:
    found = run(crowds)
    assert found.starved() == 0
    assert {one.key[0] for one in found.granted} == {crowd.level for crowd in crowds}


def test_a_large_head_saves_up_while_small_requests_of_other_tenants_pass() -> None:
    """A head of 32,000 tokens at 5% of 5,000 tokens/s: the small ones behind it waited 128 s, and timed out."""
    found = run(
        [*(Crowd(HIGH, f"h{n}", 50) for n in range(4)), *LARGE], QueuePolicy(max_queued=1000, max_wait_s=SPAN_S)
    )
    tenants = [one.key[1] for one in found.granted if one.key[0] is LOW]
    large_at = tenants.index("large")
    assert tenants[:large_at].count("small") > 30
    assert tenants[:large_at].count("smaller") > 30
    small = [one.at_s for one in found.granted if one.key == (LOW, "small")]
    assert max(after - before for before, after in itertools.pairwise(small)) < 30.0


# Who waits by which age.


def test_who_waited_longest_is_judged_by_age_and_not_by_the_order_of_arrival() -> None:
    queue = admission(a=1)
    arrive(queue, "runs", now=100.0)
    arrive(queue, "young", now=100.0)
    queue.on_arrive(arrival("old", HIGH), 101.0, waited_s=50.0)
    assert queue.next_due() == 111.0
    assert where(queue.on_tick(111.0)) == {"old": "timeout"}
    assert queue.snapshot(111.0).oldest_wait_s == 11.0


def test_a_request_that_was_accepted_goes_before_younger_ones_of_its_tenant() -> None:
    queue = admission(a=1)
    arrive(queue, "runs", now=100.0)
    arrive(queue, "young", "younger", now=100.0)
    queue.on_arrive(arrival("again", accepted=True), 101.0, waited_s=20.0)
    queue.on_arrive(arrival("between", accepted=True), 101.0, waited_s=10.0)
    assert [queue.status(name, 101.0).position for name in ("again", "between", "young", "younger")] == [1, 2, 3, 4]  # type: ignore[union-attr]
    order = []
    running = "runs"
    while actions := queue.on_done(running, 102.0):
        running = actions[0].request_id
        order.append(running)
    assert order == ["again", "between", "young", "younger"]


def test_a_restated_request_is_refused_by_neither_a_full_queue_nor_a_forecast() -> None:
    queue = admission(max_queued=3, max_wait_s=20.0, a=1)
    arrive(queue, "runs")
    queue.on_done("runs", 10.0)  # a slot comes free every ten seconds
    arrive(queue, "runs again", "one", "two", now=10.0)
    (late,) = queue.on_arrive(arrival("new"), 10.0)
    assert isinstance(late, Refuse)
    assert late.reason is RefusalReason.TIMEOUT
    for number in range(5):
        assert queue.on_arrive(arrival(f"restated {number}", accepted=True), 10.0, waited_s=5.0) == []


# Who is refused for the longest wait.


def test_who_cannot_start_within_the_longest_wait_is_refused_on_arrival() -> None:
    queue = admission(max_wait_s=20.0, a=1)
    arrive(queue, "runs")
    queue.on_done("runs", 10.0)
    assert where(arrive(queue, "runs again", "next", now=10.0)) == {"runs again": "a"}
    refusals = arrive(queue, "third", "fourth", now=10.0)
    assert where(refusals) == {"fourth": "timeout"} or where(refusals) == {"third": "timeout", "fourth": "timeout"}


def test_a_class_under_full_overload_from_above_is_refused_only_beyond_what_its_minimum_share_serves() -> None:
    queue = Admission(QueuePolicy(10_000, 60.0, min_share=0.1))
    set_replica(queue, "a", 10, 0.0)
    running = [f"h{number}" for number in range(10)]
    arrive(queue, *running, cls=HIGH)
    made = 10
    now = 0.0
    for _ in range(100):  # ten slots of a second each, all taken by `high`, of whom hundreds wait
        now += 1.0
        arrive(queue, *(f"h{made + number}" for number in range(12)), cls=HIGH, now=now)
        made += 12
        ended, running = running, []
        for name in ended:
            running += where(queue.on_done(name, now))
    names = [f"low{number}" for number in range(200)]
    refused = where([action for name in names for action in queue.on_arrive(of("t", name, LOW), now)])
    assert 50 <= len(names) - len(refused) <= 70  # one a second for 60 s


def test_a_class_s_share_is_not_lost_with_the_tenants_who_give_up() -> None:
    """A hundred tenants wait one after the other, none for as long as it takes to earn a request by itself."""
    queue = Admission(patient(min_share=0.1))
    set_replica(queue, "a", 1, 0.0)
    arrive(queue, "h0", cls=HIGH)
    running = "h0"
    served = 0
    for turn in range(1, 200):
        arrive(queue, f"h{turn}", cls=HIGH)
        for number in range(2):
            queue.on_arrive(of(f"t{turn}.{number}", f"l{turn}.{number}", LOW, prompt=0, output=1), 0.0)
        if turn > 5:
            for number in range(2):
                if (name := f"l{turn - 5}.{number}") != running:
                    queue.on_cancel(name, 0.0)
        running = next(iter(where(queue.on_done(running, 0.0))))
        served += running.startswith("l")
    assert 15 <= served <= 20
