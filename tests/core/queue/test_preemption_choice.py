"""What stops is what a walk over all running requests and replicas finds, and costs no such walk."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, Arrival, Preempt, QueuePolicy
from serve_app.types import RequestClass
from tests.core.interpreter_steps import steps
from tests.core.queue.events import HIGH, LOW, NORMAL
from tests.core.queue.reference_preemption import ReferencePreemption
from tests.core.queue.stopping_fleet import MAX_WAIT_S, REPLICAS, Fleet
from tests.effort import examples

placements = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "only_replica": st.sampled_from(REPLICAS),
        "avoid_replicas": st.frozensets(st.sampled_from(REPLICAS), max_size=2),
    },
)
histories = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 5 + ["fill", "progress", "end", "obey", "wait", "size", "debt", "lose"]),
        st.sampled_from(RequestClass),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.integers(0, 60),
        st.integers(0, 1000),
        placements,
    ),
    min_size=10,
    max_size=80,
)
SPANS_S = (0.03, 0.2, 1.0, 2.5, 31.0)


def fleet(reference: bool, min_share: float, sizes: list[tuple[int, int | None]]) -> Fleet:
    admission = Admission(QueuePolicy(100, MAX_WAIT_S, min_share=min_share))
    if reference:
        scheduler = admission.scheduler
        scheduler.preemption = ReferencePreemption(  # type: ignore[assignment]
            scheduler.queue.class_queues, scheduler.capacity, scheduler.guard_slots
        )
    found = Fleet(admission)
    for replica, (slots, kv_tokens) in zip(REPLICAS, sizes, strict=False):
        found.take(set_replica(admission, replica, slots, 0.0, kv_tokens))
    return found


def play(fleet: Fleet, number: int, step: tuple[Any, ...]) -> None:
    kind, level, slots, tokens, choice, where = step
    names = list(fleet.running)
    replica = REPLICAS[choice % 3]
    if kind == "arrive":
        arrival = Arrival(
            f"q{number}", level, f"t{choice % 3}", slots, tokens + choice % 40, prompt_tokens=tokens,
            preemptible=choice % 5 > 0, **where,
        )  # fmt: skip
        fleet.arrive(arrival)
    elif kind == "fill":
        for more in range(2 + choice % 4):
            fleet.arrive(Arrival(f"q{number}.{more}", LOW, "t0", 1, tokens, prompt_tokens=tokens, preemptible=True))
    elif kind == "progress" and names:
        fleet.running[names[choice % len(names)]].tokens += tokens
        fleet.take(fleet.queue.on_progress(names[choice % len(names)], tokens, fleet.now))
    elif kind == "end" and names:
        fleet.end(names[choice % len(names)])
    elif kind == "obey" and fleet.to_stop:
        fleet.obey(fleet.to_stop[choice % len(fleet.to_stop)])
    elif kind == "wait":
        fleet.tick_until(fleet.now + SPANS_S[choice % len(SPANS_S)])
    elif kind == "size":
        fleet.take(set_replica(fleet.queue, replica, choice % 5, fleet.now, 20 + tokens * 2))
    elif kind == "debt":
        fleet.take(fleet.queue.on_kv_debt(replica, level if choice % 2 else None, fleet.now))
    elif kind == "lose" and not choice % 4:
        fleet.lose(replica)


@settings(max_examples=examples(300), deadline=None)
@given(
    history=histories,
    min_share=st.sampled_from([0.0, 0.05, 0.3]),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(20, 200)), min_size=1, max_size=3),
)
def test_what_stops_is_what_a_walk_over_all_of_them_finds(
    history: list[tuple[Any, ...]], min_share: float, sizes: list[tuple[int, int | None]]
) -> None:
    fleets = [fleet(reference, min_share, sizes) for reference in (False, True)]
    for number, step in enumerate(history):
        for each_fleet in fleets:
            play(each_fleet, number, step)
        ours, reference = fleets
        assert ours.to_stop == reference.to_stop
        assert ours.running.keys() == reference.running.keys()
        assert ours.waiting.keys() == reference.waiting.keys()


def decision_steps(running: int, age_s: float, least_tokens: int = 10) -> int:
    """Of a request that arrives and stops one of so many `low` ones, whose grants were within this time."""
    draw = random.Random(1)
    admission = Admission(QueuePolicy(1_000, MAX_WAIT_S))
    for number in range(running // 50):
        set_replica(admission, f"replica-{number}", 50, 0.0, 100_000)
    for number in range(running):
        tokens = draw.randrange(least_tokens, 1_500)
        arrival = Arrival(f"r{number}", LOW, "t", 1, tokens + 100, prompt_tokens=tokens, preemptible=True)
        admission.on_arrive(arrival, age_s * number / running)
    found: list[Any] = []
    admission.on_arrive(
        Arrival("first", NORMAL, "t", cost_tokens=100), age_s + 5.0
    )  # what changed since is followed once
    count = steps(lambda: found.extend(admission.on_arrive(Arrival("second", HIGH, "t", cost_tokens=100), age_s + 5.0)))
    assert [type(action) for action in found] == [Preempt]
    return count


def test_a_decision_among_ten_times_as_many_running_requests_takes_hardly_more_steps() -> None:
    assert decision_steps(10_000, 10.0) < 1.5 * decision_steps(1_000, 10.0)


def test_among_many_requests_of_one_age_a_bounded_number_is_looked_at() -> None:
    assert decision_steps(8_000, 0.0, 1_100) < 1.5 * decision_steps(2_000, 0.0, 1_100)
