"""What a look at the queue has found holds until something happens: a fresh look at any moment grants nothing more."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.common.own_pools import set_replica
from serve_app.core.pools import Holder
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy, Refuse, TenantPolicy
from serve_app.types import RequestClass
from tests.core.queue.events import CRITICAL, HIGH, LOW

ENGINES = ("e0", "e1", "e2")


def fresh_look(admission: Admission, now: float) -> list[Action]:
    """What is granted once the line has to look anew; nothing has happened."""
    return [one for one in admission.on_kv_debt("none of this name", None, now) if isinstance(one, Grant)]


class History:
    """Random events of every kind."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.count = 0
        draw = self.draw
        weights = {
            f"t{tenant}": TenantPolicy(draw.choice([1e-3, 0.5, 1, 1e3]), draw.choice([0, 0, 0.2]))
            for tenant in range(3)
        }
        policy = QueuePolicy(
            draw.choice([5, 200]), draw.choice([20.0, 60.0]), min_share=draw.choice([0.05, 0.2, 0.3]), tenants=weights,
            guard_slots_share=draw.choice([0, 0, 0.25]),
        )  # fmt: skip
        self.admission = Admission(policy)
        self.waiting: dict[str, Arrival] = {}
        self.running: dict[str, Arrival] = {}
        self.stopping: set[str] = set()
        self.elsewhere = Holder("elsewhere")
        for engine in ENGINES:
            self.take(set_replica(self.admission, engine, draw.choice([1, 2, 4]), 0.0, draw.choice([None, 60, 200])))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Grant):
                self.running[action.request_id] = self.waiting.pop(action.request_id)
            elif isinstance(action, Refuse):
                del self.waiting[action.request_id]
            elif isinstance(action, Preempt):
                self.stopping.add(action.request_id)

    def arrive(self, arrival: Arrival) -> None:
        self.waiting[arrival.request_id] = arrival
        self.take(self.admission.on_arrive(arrival, self.now))

    def new(self) -> None:
        draw = self.draw
        where = dict[str, Any]()
        if draw.random() < 0.3:
            avoid = frozenset(draw.sample(ENGINES, draw.choice([1, 2])))
            where = draw.choice([{"only_replica": draw.choice(ENGINES)}, {"avoid_replicas": avoid}])
        has_begun = draw.random() < 0.3
        cost = draw.choice([5, 20, 50, 100])
        self.count += 1
        arrival = Arrival(
            f"q{self.count}", draw.choice(list(RequestClass)), f"t{draw.randrange(4)}", draw.choice([1, 1, 1, 2]), cost,
            None if draw.random() < 0.8 else self.now + draw.choice([0.5, 5.0]), accepted=has_begun,
            prompt_tokens=cost // 4, produced_tokens=draw.randrange(1, cost // 2 + 1) if has_begun else 0,
            preempted=draw.choice([0, 1, 3]) if has_begun else 0, preemptible=draw.random() < 0.6,
            age_s=draw.choice([0.0, 0.0, 30.0]), **where,
        )  # fmt: skip
        self.arrive(arrival)

    def end(self, name: str) -> Arrival:
        self.stopping.discard(name)
        arrival = self.running.pop(name)
        self.take(self.admission.on_done(name, self.now, self.draw.choice([None, 3]), self.draw.choice([None, 9])))
        return arrival

    def step(self) -> None:
        draw = self.draw
        admission = self.admission
        self.now += draw.choice([0.0, 0.0, 0.01, 0.2, 1.5, 6.0])
        self.take(admission.on_tick(self.now))
        kind = draw.random()
        if kind < 0.45:
            self.new()
        elif kind < 0.65 and self.running:
            self.end(draw.choice(list(self.running)))
        elif kind < 0.73 and self.stopping:
            stopped = self.end(min(self.stopping))
            self.count += 1
            self.arrive(
                replace(stopped, request_id=f"q{self.count}", preempted=stopped.preempted + 1, accepted=True,
                        produced_tokens=stopped.produced_tokens + 2, deadline=None)
            )  # fmt: skip
        elif kind < 0.82 and (self.waiting or self.running):
            name = draw.choice([*self.waiting, *self.running])
            self.stopping.discard(name)
            self.waiting.pop(name, None)
            self.running.pop(name, None)
            self.take(admission.on_cancel(name, self.now))
        elif kind < 0.9 and self.running:
            self.take(admission.on_progress(draw.choice(list(self.running)), draw.randrange(20), self.now))
        elif kind < 0.95:
            size = draw.choice([0, 1, 3]), self.now, draw.choice([None, 60, 200])
            engine = draw.choice(ENGINES)
            elsewhere = draw.choice([(0, 0), (1, 10)])
            self.take(set_replica(admission, engine, *size))
            pool = admission.capacity.replicas[engine].pool
            pool.give_back(self.elsewhere, 1, 10)
            if pool.free_slots >= elsewhere[0] and pool.space.free() >= elsewhere[1]:
                pool.charge(self.elsewhere, *elsewhere)
            self.take(admission.on_returned(self.now))
        else:
            self.take(admission.on_kv_debt(draw.choice(ENGINES), draw.choice([None, *RequestClass]), self.now))


@pytest.mark.parametrize("seed", [349, 374, *range(10)])
def test_a_fresh_look_grants_nothing_that_waits_already(seed: int) -> None:
    history = History(seed)
    for _ in range(250):
        history.step()
        assert fresh_look(history.admission, history.now) == []


def test_the_replica_of_a_request_that_has_begun_is_open_again_once_it_leaves() -> None:
    admission = Admission(QueuePolicy(100, 600.0, min_share=0.3))
    set_replica(admission, "a", 10, 0.0, 200)
    set_replica(admission, "b", 2, 0.0, 90)
    admission.on_arrive(Arrival("runs", HIGH, "h", cost_tokens=130, prompt_tokens=1, only_replica="a"), 0.0)
    admission.on_arrive(Arrival("older", LOW, "t", cost_tokens=100, prompt_tokens=1), 0.0)
    begun = Arrival("begun", LOW, "t", cost_tokens=100, prompt_tokens=1, produced_tokens=60, accepted=True)
    admission.on_arrive(begun, 1.0)
    for number in range(20):
        name = f"high{number}"
        now = 2.0 + number
        admission.on_arrive(Arrival(name, HIGH, "h", 3, cost_tokens=60, prompt_tokens=1), now)
        if name in admission.queue.by_id:
            break
        admission.on_done(name, now, 1, 1)
    assert list(admission.queue.by_id) == ["older", "begun", name]  # it is due, and replica a is held for it
    assert [one.request_id for one in admission.on_cancel("begun", now + 1.0)] == [name]
    assert fresh_look(admission, now + 1.0) == []
    assert admission.on_arrive(Arrival("critical", CRITICAL, "c", cost_tokens=1, prompt_tokens=1), now + 2.0)
