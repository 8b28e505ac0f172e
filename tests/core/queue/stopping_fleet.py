"""Requests that run, wait and stop for others by an `Admission`, with the checks of each of its actions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, Refuse
from serve_app.core.queue.drain_rate import GUARDED_FROM
from serve_app.core.queue.stoppable_runs import QUANTUM_S, RESUMED_S
from serve_app.types import RequestClass

REPLICAS = ("a", "b", "c")
MAX_WAIT_S = 500.0


@dataclass
class Run:
    """A running request, as its engine and its router know it."""

    arrival: Arrival
    replica: str
    granted_s: float
    was_due: bool
    tokens: int  # prompt and produced
    stopping_s: float | None = None

    def may_stop(self, now: float, level: RequestClass) -> bool:
        """Whether it may stop for this class, which is higher."""
        preempted = self.arrival.preempted
        is_protected = preempted or level < GUARDED_FROM
        protected_s = RESUMED_S * 2 ** max(0, preempted - 1) if is_protected else 0.0
        return self.arrival.preemptible and not self.was_due and now >= self.granted_s + protected_s


@dataclass
class Fleet:
    """An `Admission`, what runs and waits, and the checks of each action."""

    queue: Admission
    now: float = 0.0
    running: dict[str, Run] = field(default_factory=dict)
    waiting: dict[str, Arrival] = field(default_factory=dict)
    debts: dict[str, RequestClass] = field(default_factory=dict)
    arrived_s: dict[str, float] = field(default_factory=dict)  # first
    ended: Counter[str] = field(default_factory=Counter)
    to_stop: list[str] = field(default_factory=list)
    stops: int = 0

    def arrive(self, arrival: Arrival) -> None:
        self.waiting[arrival.request_id] = arrival
        self.arrived_s.setdefault(arrival.request_id, self.now)
        self.take(self.queue.on_arrive(arrival, self.now))

    def take(self, actions: list[Action]) -> None:
        refused = {action.request_id for action in actions if isinstance(action, Refuse)}
        for action in actions:
            name = action.request_id
            if isinstance(action, Grant):
                arrival = self.waiting.pop(name)
                was_due = self.queue.scheduler.running[name].was_due
                tokens = max(1, arrival.prompt_tokens)
                self.running[name] = Run(arrival, action.replica_id, self.now, was_due, tokens)
            elif isinstance(action, Refuse):
                del self.waiting[name]
                self.ended[name] += 1
            else:
                self.stop(action, refused)
        due = self.queue.next_due()
        assert due is None or due > self.now, "a busy loop"

    def stop(self, action: Preempt, refused: set[str]) -> None:
        run = self.running[action.request_id]
        assert run.replica == action.replica_id
        assert run.arrival.preemptible
        assert run.stopping_s is None, "it was stopped already"
        assert not run.was_due, "the minimum share is undone"
        level = run.arrival.request_class
        preempted = run.arrival.preempted
        waiting = [one for one in self.waiting.values() if one.request_id not in refused and self.could_run(one, run)]
        if action.keeps_place:
            higher = [one.request_class for one in waiting if one.request_class > level]
            assert higher, "there is no one of a higher class for its room"
            assert run.may_stop(self.now, max(higher)), "it is protected"
        else:
            assert self.now >= run.granted_s + QUANTUM_S * 2**preempted, "its quantum has not ended"
            same = [one for one in waiting if one.request_class == level and one.preempted <= preempted]
            assert any(one.cost < run.tokens for one in same), "none that waits is shorter"
        run.stopping_s = self.now
        self.to_stop.append(action.request_id)
        self.stops += 1

    def could_run(self, arrival: Arrival, run: Run) -> bool:
        """Whether a waiting request may run on the replica of a running one."""
        return self.queue.capacity.may_take(
            run.replica, arrival.request_class, arrival.slots, arrival.cost, arrival.placement
        )

    def obey(self, name: str) -> None:
        """A request has stopped, and arrives again."""
        run = self.running.pop(name)
        self.to_stop.remove(name)
        self.take(self.queue.on_done(name, self.now, max(1, run.arrival.prompt_tokens), run.tokens))
        age_s = self.now - self.arrived_s[name]
        self.arrive(replace(run.arrival, preempted=run.arrival.preempted + 1, accepted=True, age_s=age_s))

    def obey_all(self) -> None:
        while self.to_stop:
            self.obey(self.to_stop[0])

    def end(self, name: str) -> None:
        del self.running[name]
        if name in self.to_stop:
            self.to_stop.remove(name)
        self.ended[name] += 1
        self.take(self.queue.on_done(name, self.now))

    def lose(self, replica: str) -> None:
        """A replica is gone; its requests arrive again, as those that lost it."""
        lost = [name for name, run in self.running.items() if run.replica == replica]
        runs = [self.running.pop(name) for name in lost]
        self.to_stop = [name for name in self.to_stop if name not in lost]
        self.debts.pop(replica, None)
        self.take(self.queue.on_replica_gone(replica, self.now))
        for run in runs:
            self.arrive(replace(run.arrival, accepted=True, only_replica=None))

    def tick_until(self, until: float, *, obey: bool = False) -> None:
        """Ticks at all moments that the line asks for, as its host does."""
        for _ in range(10_000):
            due = self.queue.next_due()
            self.now = until if due is None else min(due, until)
            self.take(self.queue.on_tick(self.now))
            if obey:
                self.obey_all()
            if self.now >= until:
                return
        raise AssertionError("a busy loop")

    def bring_to_rest(self) -> None:
        for replica in REPLICAS:
            self.take(self.queue.on_kv_debt(replica, None, self.now))
            self.take(set_replica(self.queue, replica, 4, self.now, 200))
        for _ in range(1000):
            if not self.running and not self.waiting:
                break
            if self.running:
                self.end(next(iter(self.running)))
            else:
                self.tick_until(self.now + MAX_WAIT_S)
        assert not self.running
        assert not self.waiting
        assert self.ended == dict.fromkeys(self.arrived_s, 1)
        assert self.queue.scheduler.preemption.slots_below(RequestClass.CRITICAL) == 0
