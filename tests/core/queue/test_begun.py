"""Requests that have begun: first in their class when it is due, paying what is left, and not timed out meanwhile."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy
from serve_app.core.queue.policy import BEGUN_WAIT_S
from tests.core.queue.events import HIGH, LOW, NORMAL, arrival, arrive, of, where

STEP_S = 1.0
STREAM_TOKENS = 6000
STREAM_TOKENS_S = 20
ANSWER_TOKENS = 780
ANSWER_S = 10.0
OVERLOAD = 1.5
OVERLOAD_S = 1800.0
MAX_WAIT_S = 60.0
BEGUN = {"stopped": {"preempted": 1}, "moved": {"produced_tokens": 7}}


@dataclass
class Streams:
    """Long `low` streams on 64 slots, and short answers of a higher class, in virtual time; what stops arrives again
    with what it has produced."""

    slots: int = 64
    policy: QueuePolicy = field(default_factory=lambda: QueuePolicy(1000, MAX_WAIT_S))
    now: float = 0.0
    waiting: dict[str, Arrival] = field(default_factory=dict)
    running: dict[str, Arrival] = field(default_factory=dict)
    ends: list[tuple[float, str]] = field(default_factory=list)  # of the short answers that run
    ended: Counter[str] = field(default_factory=Counter)  # by how the streams have ended
    short_refused: int = 0
    runs: Counter[str] = field(default_factory=Counter)  # grants by request

    def __post_init__(self) -> None:
        self.queue = Admission(self.policy)
        self.take(set_replica(self.queue, "a", self.slots, 0.0))

    def arrive(self, arrival: Arrival) -> None:
        self.waiting[arrival.request_id] = arrival
        self.take(self.queue.on_arrive(arrival, self.now))

    def take(self, actions: Sequence[Action]) -> None:
        for action in actions:
            name = action.request_id
            if isinstance(action, Preempt):
                self.stop(name)
                continue
            arrival = self.waiting.pop(name)
            if isinstance(action, Grant):
                self.running[name] = arrival
                self.runs[name] += 1
                if arrival.request_class is not LOW:
                    heapq.heappush(self.ends, (self.now + ANSWER_S, name))
            elif arrival.request_class is LOW:
                self.ended[action.reason.value] += 1
            else:
                self.short_refused += 1

    def stop(self, name: str) -> None:
        """A stream stops at once, and arrives again."""
        arrival = self.running.pop(name)
        self.take(self.queue.on_done(name, self.now, arrival.prompt_tokens))
        self.arrive(replace(arrival, preempted=arrival.preempted + 1, accepted=True, age_s=self.now))

    def step(self) -> None:
        self.now += STEP_S
        while self.ends and self.ends[0][0] <= self.now:
            name = heapq.heappop(self.ends)[1]
            del self.running[name]
            self.take(self.queue.on_done(name, self.now))
        for name, stream in [item for item in self.running.items() if item[1].request_class is LOW]:
            if name not in self.running:
                continue  # it stopped for what another's step has let come first
            produced = stream.produced_tokens + int(STREAM_TOKENS_S * STEP_S)
            self.running[name] = replace(stream, produced_tokens=produced)
            self.take(self.queue.on_progress(name, int(STREAM_TOKENS_S * STEP_S), self.now))
            if produced >= STREAM_TOKENS and self.running.pop(name, None) is not None:
                self.ended["whole"] += 1
                self.take(self.queue.on_done(name, self.now))
        self.take(self.queue.on_tick(self.now))


def test_no_stream_that_has_begun_is_refused_in_half_an_hour_of_overload() -> None:
    """40 of 64 ended as `timeout`."""
    found = Streams()
    for number in range(64):
        found.arrive(of(f"t{number % 4}", f"low{number}", LOW, 100, STREAM_TOKENS, preemptible=True))
    assert len(found.running) == 64
    arrived = 0
    rate = OVERLOAD * found.slots / ANSWER_S
    while found.now < OVERLOAD_S or found.waiting or found.running:
        while found.now < OVERLOAD_S and arrived < rate * found.now:
            arrived += 1
            found.arrive(of("people", f"n{arrived}", NORMAL, 100, ANSWER_TOKENS - 100))
        found.step()
        assert found.now < 2 * OVERLOAD_S
    assert found.short_refused > 0
    assert max(found.runs[f"low{number}"] for number in range(64)) > 1
    assert found.ended == {"whole": 64}


# The order and the price.


def busy(min_share: float = 0.05, **more: Any) -> Admission:
    """One slot, which answers of `high` have one after the other (`turns`)."""
    queue = Admission(QueuePolicy(1000, MAX_WAIT_S, min_share=min_share, **more))
    set_replica(queue, "a", 1, 0.0, 10_000)
    queue.on_arrive(of("h", "high0", HIGH, 0, 100), 0.0)
    return queue


def turns(queue: Admission, count: int, now: float = 0.0, first: int = 1) -> list[str]:
    """So many answers of `high` end, each while the next one waits; returns what was granted."""
    granted: list[str] = []
    for number in range(first, first + count):
        queue.on_arrive(of("h", f"high{number}", HIGH, 0, 100), now)
        running = next(iter(queue.scheduler.running))
        granted += where(queue.on_done(running, now))
    return granted


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_the_minimum_share_goes_to_what_has_begun_before_an_older_request_of_another_tenant(begun: Any) -> None:
    queue = busy()
    queue.on_arrive(of("a", "new", LOW, 0, 100), 0.0)
    turns(queue, 5)  # the tenant of the new one has earned before the other one begins to wait
    queue.on_arrive(of("b", "begun", LOW, 0, 100, accepted=True, **begun), 0.0)
    granted = turns(queue, 60, first=6)
    assert granted.index("begun") < granted.index("new")


def test_of_those_that_have_begun_the_one_that_is_earned_first_is_next() -> None:
    queue = busy()
    for name, tenant, produced in (("a1", "a", 10), ("a2", "a", 10), ("b1", "b", 60)):
        queue.on_arrive(of(tenant, name, LOW, 0, 100, accepted=True, produced_tokens=produced), 0.0)
    granted = [name for name in turns(queue, 100) if not name.startswith("high")]
    assert granted == ["b1", "a1", "a2"]


def test_a_class_pays_for_what_has_begun_only_what_is_left() -> None:
    """5% of 100 tokens a turn: prompt and rest, 100 tokens, are earned in 20 turns, 6,020 in 1,204."""
    queue = busy()
    queue.on_arrive(of("a", "begun", LOW, 20, 6000, accepted=True, produced_tokens=5920), 0.0)
    granted = turns(queue, 30)
    assert 18 <= granted.index("begun") <= 22


def test_a_tenant_is_not_charged_again_for_the_prompt_of_what_goes_on() -> None:
    queue = Admission(QueuePolicy(1000, MAX_WAIT_S))
    set_replica(queue, "a", 1, 0.0)
    queue.on_arrive(of("a", "a0", prompt=1000, output=10, preemptible=True), 0.0)
    assert where(queue.on_done("a0", 0.0, 1000, 5)) == {}
    queue.on_arrive(of("b", "b0", prompt=1002, output=10), 0.0)
    arrive(queue, "other")
    queue.on_arrive(of("a", "a0", prompt=1000, output=10, accepted=True, preempted=1, produced_tokens=5), 0.0)
    queue.on_arrive(of("b", "b1"), 0.0)
    queue.on_arrive(of("a", "a1"), 0.0)
    order = []
    running = "b0"
    while granted := where(queue.on_done(running, 0.0, *([1000, 5] if running == "a0" else []))):
        running = next(iter(granted))
        order.append(running)
    assert order.index("a0") < order.index("b1")
    assert order.index("a1") < order.index("b1")


# The longest wait.


@pytest.mark.parametrize("begun", BEGUN.values(), ids=BEGUN)
def test_what_has_begun_does_not_time_out_while_its_class_earns_or_is_granted(begun: Any) -> None:
    queue = busy()
    queue.on_arrive(of("a", "begun", LOW, 100, 9000, accepted=True, **begun), 0.0)
    for number in range(20):  # a grant of `high` every 600 s, of which `low` earns
        assert "begun" not in where(queue.on_tick(600.0 * number))
        turns(queue, 1, 600.0 * number, first=number + 1)
    last_s = 600.0 * 19
    assert queue.on_tick(last_s + MAX_WAIT_S + BEGUN_WAIT_S - 0.1) == []
    assert where(queue.on_tick(last_s + MAX_WAIT_S + BEGUN_WAIT_S)) == {"begun": "timeout"}


def test_without_a_minimum_share_what_has_begun_times_out_when_its_class_gets_nothing() -> None:
    queue = busy(min_share=0.0)
    queue.on_arrive(of("a", "begun", LOW, 100, 900, accepted=True, preempted=1), 0.0)
    for number in range(7):
        turns(queue, 1, 100.0 * number, first=number + 1)
    assert where(queue.on_tick(MAX_WAIT_S + BEGUN_WAIT_S)) == {"begun": "timeout"}


def test_what_has_begun_is_refused_after_the_longest_wait_when_no_replica_can_run_it_any_more() -> None:
    queue = busy()
    queue.on_arrive(of("a", "begun", LOW, 100, 900, accepted=True, preempted=1), 0.0)
    set_replica(queue, "a", 1, 1.0, 500)
    for number in range(7):
        turns(queue, 1, 100.0 * number + 1.0, first=number + 1)
    assert where(queue.on_tick(MAX_WAIT_S + BEGUN_WAIT_S)) == {"begun": "too_large"}


def test_a_wait_elsewhere_does_not_count_for_what_has_begun() -> None:
    """The quota actor has started anew, and does not know when the class was served."""
    queue = busy()
    waited_s = 10 * BEGUN_WAIT_S
    assert queue.on_arrive(arrival("begun", LOW, accepted=True, preempted=1), 1.0, waited_s) == []
    assert queue.on_tick(MAX_WAIT_S) == []
