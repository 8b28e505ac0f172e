"""What one look for running requests to stop costs and finds where very many run or wait."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Preempt, QueuePolicy
from serve_app.core.queue.preemption import MAX_PRICED, MAX_TRIED
from tests.core.interpreter_steps import steps
from tests.core.queue.events import CRITICAL, HIGH, LOW, NORMAL

SLOTS = 16
RUN_TOKENS = 100
LARGE = SLOTS * RUN_TOKENS * 3 // 4  # tokens of a request that needs three quarters of an engine


def stops(actions: list[Action]) -> list[Preempt]:
    return [one for one in actions if isinstance(one, Preempt)]


def half_protected(engines: int, unprotected: int | None = None) -> Admission:
    """Full engines of which half may stop, and on one of them, if any, all."""
    admission = Admission(QueuePolicy(100_000, 600.0))
    for engine in range(engines):
        set_replica(admission, f"e{engine}", SLOTS, 0.0, SLOTS * RUN_TOKENS)
    for engine in range(engines):
        for number in range(SLOTS):
            preempted = 6 if number % 2 and engine != unprotected else 0
            admission.on_arrive(
                Arrival(
                    f"r{engine}.{number}", LOW, "t", cost_tokens=RUN_TOKENS, prompt_tokens=50, preemptible=True,
                    preempted=preempted, only_replica=f"e{engine}",
                ),
                0.0,
            )  # fmt: skip
    assert not admission.queue.by_id
    return admission


def large(name: str, **more: Any) -> Arrival:
    return Arrival(name, NORMAL, "big", cost_tokens=LARGE, prompt_tokens=50, **more)


def steps_without_room(engines: int) -> int:
    """Of a look that finds no room for the requests that wait."""
    admission = half_protected(engines)
    assert admission.on_arrive(large("w0"), 2.0) == []
    return steps(lambda: admission.on_arrive(large("w1", accepted=True), 2.1))


def test_a_look_that_finds_no_room_takes_hardly_more_steps_in_a_larger_fleet() -> None:
    assert steps_without_room(600) < 1.5 * steps_without_room(100)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("engine", [3, 150, 299])
def test_the_one_engine_on_which_room_can_be_made_is_found_within_one_turn_of_all(engine: int, *, beside: bool) -> None:
    admission = half_protected(300, engine)
    if beside:  # a request of a higher class, for which there is never room
        avoid = frozenset({f"e{engine}"})
        admission.on_arrive(
            Arrival("high", HIGH, "big", cost_tokens=LARGE, prompt_tokens=50, avoid_replicas=avoid), 2.0
        )
    found = stops(admission.on_arrive(large("w"), 2.0))
    for _ in range(math.ceil(300 / MAX_TRIED) * (1 + beside)):  # the two classes look in turns
        if found:
            break
        due = admission.next_due()
        assert due is not None
        found = stops(admission.on_tick(due))
    assert {one.replica_id for one in found} == {f"e{engine}"}
    assert len(found) == SLOTS * 3 // 4


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_room_costs_least_among_the_replicas_with_the_requests_that_lose_least(count: int, seed: int) -> None:
    """Against a walk over all. For one slot no other replica is cheaper, either."""
    draw = random.Random(seed)
    admission = Admission(QueuePolicy(1_000, 600.0))
    runs = dict[str, list[tuple[int, str]]]()
    for engine in range(3 * MAX_PRICED):
        set_replica(admission, f"e{engine}", 4, 0.0)
    for engine in range(3 * MAX_PRICED):
        for number in range(4):
            tokens = draw.randrange(1, 100_000)
            name = f"r{engine}.{number}"
            admission.on_arrive(
                Arrival(name, LOW, "t", cost_tokens=tokens, prompt_tokens=tokens, preemptible=True,
                        only_replica=f"e{engine}"), 0.0,
            )  # fmt: skip
            runs.setdefault(f"e{engine}", []).append((tokens, name))
    compared = sorted((sorted(mine) for mine in runs.values()), key=lambda of_replica: of_replica[0])[:MAX_PRICED]
    cheapest = min(compared, key=lambda of_replica: sum(tokens for tokens, _ in of_replica[:count]))
    found = stops(admission.on_arrive(Arrival("w", HIGH, "u", count), 1.0))
    assert {one.request_id for one in found} == {name for _, name in cheapest[:count]}
    if count == 1:
        assert cheapest[0] == min(one for mine in runs.values() for one in mine)


# Those that wait.

TENANTS_OF_OTHERS = {"one tenant": lambda number: "a", "its own tenant": lambda number: "b", "many": lambda n: f"a{n}"}


@pytest.mark.parametrize("tenant", TENANTS_OF_OTHERS.values(), ids=TENANTS_OF_OTHERS)
@pytest.mark.parametrize("others", [0, 31, 32, 200])
def test_requests_for_which_no_room_can_be_made_hide_none_that_may_run_elsewhere(tenant: Any, others: int) -> None:
    admission = Admission(QueuePolicy(1_000, 60.0))
    set_replica(admission, "e0", 4, 0.0, 1_000)
    set_replica(admission, "e1", 4, 0.0, 1_000)
    for number in range(4):
        admission.on_arrive(Arrival(f"c{number}", CRITICAL, "x", cost_tokens=250, only_replica="e0"), 0.0)
        low = Arrival(f"low{number}", LOW, "y", cost_tokens=250, preemptible=True, only_replica="e1")
        admission.on_arrive(low, 0.0)
    avoid = frozenset({"e1"})  # a router that does not reach it
    for number in range(others):
        arrival = Arrival(f"a{number}", CRITICAL, tenant(number), cost_tokens=250, avoid_replicas=avoid)
        assert admission.on_arrive(arrival, 5.0) == []
    found = stops(admission.on_arrive(Arrival("b", CRITICAL, "b", cost_tokens=250), 5.0))
    due = admission.next_due()
    found += [] if found or due is None else stops(admission.on_tick(min(due, 6.0)))
    assert [one.replica_id for one in found] == ["e1"]
