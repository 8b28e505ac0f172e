"""Properties of preemption over random histories: whom it stops, how many, and that no one is left waiting by it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Admission, Arrival, QueuePolicy
from serve_app.core.queue.preemption import REST_S
from serve_app.core.queue.stoppable_runs import RESUMED_S
from serve_app.types import RequestClass
from tests.core.queue.events import HIGH, LOW
from tests.core.queue.stopping_fleet import MAX_WAIT_S, REPLICAS, Fleet
from tests.effort import examples

TENANTS = ("t", "u", "v")
classes = st.sampled_from(RequestClass)
tenants = st.sampled_from(TENANTS)
spans = st.sampled_from([0.0, 0.0, 0.0, 0.03, 0.2, 1.0, 2.5, 35.0])
constraints = st.just({}) | st.fixed_dictionaries(
    {},
    optional={
        "only_replica": st.sampled_from(REPLICAS),
        "avoid_replicas": st.frozensets(st.sampled_from(REPLICAS), max_size=2),
    },
)


class PreemptionMachine(RuleBasedStateMachine):
    """Any requests, engines, KV debts and stops that come late, never or at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()

    @initialize(
        max_queued=st.sampled_from([0, 2, 8, 100]),
        min_share=st.sampled_from([0.0, 0.05, 0.3]),
        sizes=st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(20, 120)), min_size=1, max_size=3),
    )
    def start(self, max_queued: int, min_share: float, sizes: list[tuple[int, int | None]]) -> None:
        self.fleet = Fleet(Admission(QueuePolicy(max_queued, MAX_WAIT_S, min_share=min_share)))
        for replica, (slots, kv_tokens) in zip(REPLICAS, sizes, strict=False):
            self.fleet.take(set_replica(self.fleet.queue, replica, slots, 0.0, kv_tokens))

    @rule(
        of=st.tuples(classes, tenants),
        slots=st.sampled_from([1, 1, 1, 2, 3]),
        tokens=st.tuples(st.integers(0, 30), st.integers(0, 40)),
        preemptible=st.sampled_from([True, True, True, False]),
        deadline_s=st.sampled_from([None, None, None, 1.0]),
        where=constraints,
    )
    def arrive(
        self, of: tuple[RequestClass, str], slots: int, tokens: tuple[int, int], preemptible: bool,
        deadline_s: float | None, where: dict[str, Any],
    ) -> None:  # fmt: skip
        deadline = None if deadline_s is None else self.fleet.now + deadline_s
        prompt, output = tokens
        self.fleet.arrive(
            Arrival(
                f"q{next(self.ids)}", *of, slots, prompt + output, deadline, prompt_tokens=prompt,
                preemptible=preemptible, **where,
            )
        )  # fmt: skip

    @rule(count=st.integers(2, 5), low=st.booleans())
    def fill(self, count: int, low: bool) -> None:
        """Several of one kind."""
        for _ in range(count):
            name = f"q{next(self.ids)}"
            self.fleet.arrive(Arrival(name, LOW if low else HIGH, "t", 1, 9, prompt_tokens=3, preemptible=True))

    @precondition(lambda self: self.fleet.running)
    @rule(choice=st.integers(0, 1000), tokens=st.integers(1, 60))
    def progress(self, choice: int, tokens: int) -> None:
        name = list(self.fleet.running)[choice % len(self.fleet.running)]
        self.fleet.running[name].tokens += tokens
        self.fleet.take(self.fleet.queue.on_progress(name, tokens, self.fleet.now))

    @precondition(lambda self: self.fleet.to_stop)
    @rule(choice=st.integers(0, 1000))
    def obey(self, choice: int) -> None:
        self.fleet.obey(self.fleet.to_stop[choice % len(self.fleet.to_stop)])

    @rule()
    def obey_all(self) -> None:
        self.fleet.obey_all()

    @precondition(lambda self: self.fleet.running)
    @rule(choice=st.integers(0, 1000))
    def end(self, choice: int) -> None:
        self.fleet.end(list(self.fleet.running)[choice % len(self.fleet.running)])

    @precondition(lambda self: self.fleet.waiting)
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice: int) -> None:
        name = list(self.fleet.waiting)[choice % len(self.fleet.waiting)]
        del self.fleet.waiting[name]
        self.fleet.ended[name] += 1
        self.fleet.take(self.fleet.queue.on_cancel(name, self.fleet.now))

    @rule(span=spans)
    def wait(self, span: float) -> None:
        self.fleet.tick_until(self.fleet.now + span)

    @rule(replica=st.sampled_from(REPLICAS), slots=st.integers(0, 4), kv_tokens=st.none() | st.integers(20, 120))
    def set_size(self, replica: str, slots: int, kv_tokens: int | None) -> None:
        self.fleet.take(set_replica(self.fleet.queue, replica, slots, self.fleet.now, kv_tokens))

    @rule(replica=st.sampled_from(REPLICAS))
    def lose(self, replica: str) -> None:
        self.fleet.lose(replica)

    @rule(replica=st.sampled_from(REPLICAS), level=st.none() | classes)
    def kv_debt(self, replica: str, level: RequestClass | None) -> None:
        self.fleet.take(self.fleet.queue.on_kv_debt(replica, level, self.fleet.now))

    @invariant()
    def check_slots(self) -> None:
        """What the forecast takes for slots that stops can free."""
        seen = self.fleet.queue.scheduler.preemption.slots_below
        for level in RequestClass:
            runs = [run for run in self.fleet.running.values() if run.arrival.preemptible and not run.was_due]
            assert seen(level) == sum(run.arrival.slots for run in runs if run.arrival.request_class < level)

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.bring_to_rest()


TestPreemption = PreemptionMachine.TestCase
TestPreemption.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# Requests of one slot each: how many stop, and that those which wait get the room.

steps = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "progress", "end", "wait", "drop", "size"]),
        classes, tenants, st.integers(0, 1000), st.sampled_from([0.03, 0.2, 1.0, 2.5]), constraints,
    ),
    min_size=5,
    max_size=50,
)  # fmt: skip


def played(history: list[Any], min_share: float) -> Fleet:
    """A history in which each stop is obeyed at once; checked after each step."""
    fleet = Fleet(Admission(QueuePolicy(10_000, MAX_WAIT_S, min_share=min_share)))
    for replica in REPLICAS[:2]:
        fleet.take(set_replica(fleet.queue, replica, 2, 0.0))
    for number, (step, level, tenant, choice, span, where) in enumerate(history):
        names = list(fleet.running)
        if step == "arrive":
            preemptible = choice % 5 > 0
            fleet.arrive(Arrival(f"q{number}", level, tenant, prompt_tokens=choice, preemptible=preemptible, **where))
        elif step == "progress" and names:
            fleet.take(fleet.queue.on_progress(names[choice % len(names)], 5, fleet.now))
        elif step == "end" and names:
            fleet.end(names[choice % len(names)])
        elif step == "drop" and choice % 3 == 0:
            fleet.lose("c")
        elif step == "size":
            fleet.take(set_replica(fleet.queue, REPLICAS[choice % 3], choice % 4, fleet.now))
        elif step == "wait":
            fleet.tick_until(fleet.now + span, obey=True)
        fleet.obey_all()
        fleet.tick_until(fleet.now + 2 * REST_S, obey=True)
        check_none_waits_for_a_lower_one(fleet)
    return fleet


def check_none_waits_for_a_lower_one(fleet: Fleet) -> None:
    for arrival in fleet.waiting.values():
        lower = [
            name
            for name, run in fleet.running.items()
            if run.arrival.request_class < arrival.request_class
            and run.may_stop(fleet.now - 2 * REST_S, arrival.request_class)
            and fleet.could_run(arrival, run)
        ]
        # A replica above its size: the last ones that stop there bring it down to its size, not below.
        within = [name for name in lower if fleet.queue.capacity.replicas[fleet.running[name].replica].slots_left >= 0]
        assert not within, f"{arrival} waits while {within} run"


@settings(max_examples=examples(150), deadline=None)
@given(history=steps, min_share=st.sampled_from([0.0, 0.05, 0.3]))
def test_if_stops_are_obeyed_no_request_waits_while_one_of_a_lower_class_runs(
    history: list[Any], min_share: float
) -> None:
    fleet = played(history, min_share)
    fleet.bring_to_rest()


@settings(max_examples=examples(150), deadline=None)
@given(levels=st.lists(st.tuples(classes, tenants), max_size=12), running=st.lists(st.tuples(classes, st.booleans())))
def test_no_more_stop_than_those_that_wait_need(
    levels: list[tuple[RequestClass, str]], running: list[tuple[RequestClass, bool]]
) -> None:
    """All have one slot, and none has stopped yet: each stop is the room of one waiting request above its class."""
    fleet = Fleet(Admission(QueuePolicy(10_000, MAX_WAIT_S, min_share=0.0)))
    fleet.take(set_replica(fleet.queue, "a", max(1, len(running)), 0.0))
    for number, (level, preemptible) in enumerate(running):
        fleet.arrive(Arrival(f"r{number}", level, "t", preemptible=preemptible))
    fleet.now += RESUMED_S
    for number, (level, tenant) in enumerate(levels):
        fleet.now += 0.01
        fleet.arrive(Arrival(f"w{number}", level, tenant))
        stopping = [run for run in fleet.running.values() if run.stopping_s is not None]
        waits = sorted((one.request_class for one in fleet.waiting.values()), reverse=True)
        able = sorted(run.arrival.request_class for run in fleet.running.values() if run.arrival.preemptible)
        assert len(stopping) == sum(lower < higher for lower, higher in zip(able, waits, strict=False))


sizes = st.tuples(
    st.integers(0, 1), st.integers(1, 3), st.integers(1, 30), st.integers(0, 40), st.sampled_from([0.5, 3.0])
)


@settings(max_examples=examples(300), deadline=None)
@given(runs=st.lists(sizes, min_size=1, max_size=7), slots=st.integers(1, 4), tokens=st.integers(1, 60))
def test_those_that_stop_are_the_cheapest_that_make_room(
    runs: list[tuple[int, int, int, int, float]], slots: int, tokens: int
) -> None:
    """Against all subsets of the running requests: none of the chosen ones is needless, their highest class is as low
    as can be, and where one is enough, it loses the fewest token-seconds."""
    fleet = Fleet(Admission(QueuePolicy(10_000, MAX_WAIT_S)))
    for number, (replica, size, prompt, made, age_s) in enumerate(runs):
        name = f"r{number}"
        where = REPLICAS[replica]
        have = [run for run in fleet.running.values() if run.replica == where]
        total = sum(run.arrival.slots for run in have) + size, sum(run.arrival.cost for run in have) + prompt + 40
        fleet.now = 10.0 - age_s if not number else max(fleet.now, 10.0 - age_s)
        fleet.take(set_replica(fleet.queue, where, total[0], fleet.now, total[1]))
        level = RequestClass.LOW if number % 3 else RequestClass.NORMAL
        fleet.arrive(
            Arrival(name, level, "t", size, prompt + 40, prompt_tokens=prompt, only_replica=where, preemptible=True)
        )
        fleet.running[name].tokens += made
        fleet.take(fleet.queue.on_progress(name, made, fleet.now))
    fleet.now = 10.0
    fleet.arrive(Arrival("w", HIGH, "t", slots, tokens))
    enough = subsets_that_make_room(fleet, slots, tokens)
    chosen = frozenset(fleet.to_stop)
    assert bool(chosen) is bool(enough)
    if not enough:
        return
    assert chosen in enough
    assert not any(other < chosen for other in enough), "one of them stops for nothing"
    assert top_class(fleet, chosen) == min(top_class(fleet, one) for one in enough)
    cheap = [one for one in enough if top_class(fleet, one) == top_class(fleet, chosen)]
    if slots == 1 and all(run.arrival.cost >= tokens for run in fleet.running.values()):
        assert lost(fleet, chosen) == pytest.approx(min(lost(fleet, one) for one in cheap))


def subsets_that_make_room(fleet: Fleet, slots: int, tokens: int) -> list[frozenset[str]]:
    """Of one replica each."""
    found = []
    for replica in REPLICAS:
        runs = {name: run.arrival for name, run in fleet.running.items() if run.replica == replica}
        for count in range(1, len(runs) + 1):
            for names in itertools.combinations(runs, count):
                room = sum(runs[name].slots for name in names), sum(runs[name].cost for name in names)
                if room[0] >= slots and room[1] >= tokens:
                    found.append(frozenset(names))
    return found


def top_class(fleet: Fleet, names: frozenset[str]) -> RequestClass:
    return max(fleet.running[name].arrival.request_class for name in names)


def lost(fleet: Fleet, names: frozenset[str]) -> float:
    """Token-seconds."""
    runs = [fleet.running[name] for name in names]
    return math.fsum(run.tokens * (fleet.now - run.granted_s) for run in runs)
