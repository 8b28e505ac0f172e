"""What a decision costs in mixed overload, where most requests can stop for others; part of `benchmarks.admission`.

Engines of 64 slots, all full, and arrivals at one and a half times what they can take: half of them `low`, which stop
for the others. What stops has stopped `STOP_S` later and arrives again. A decision is an event with all its actions,
the second arrival of what has stopped among them. Only the queue's own CPU time counts.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common.own_pools import set_replica
from serve_app.core.queue import Action, Admission, Arrival, Grant, Preempt, QueuePolicy
from serve_app.types import RequestClass

FLEETS = (100, 1_000)  # engines
# of an engine: sometimes slots run out first, sometimes tokens
SLOTS = 64
KV_TOKENS = 50_000
RUN_S = 8.0  # the mean answer
OVERLOAD = 1.5
STOP_S = 0.05  # a step of the engine and two messages
WAITING = 10_000
TENANTS = 100
CLASS_WEIGHTS = (50, 40, 9, 1)  # low, normal, high, critical
EVENTS = 60_000
QUICK_EVENTS = 15_000
LONGEST_S = 20.0  # of CPU: a slow queue ends the part before all events were sent


class Overload:
    """A queue in overload, and the events that keep it there."""

    def __init__(self, engines: int, draw: random.Random) -> None:
        self._draw = draw
        self._now = 0.0
        self._ids = itertools.count()
        self._running: list[str] = []
        self._at: dict[str, int] = {}  # where in the list
        self._waiting: list[str] = []  # some of them have left meanwhile
        self._arrivals: dict[str, Arrival] = {}
        self._stopping: deque[tuple[float, str]] = deque()
        self.stops = 0
        self.queue = Admission(QueuePolicy(WAITING, 1e6))
        for number in range(engines):
            set_replica(self.queue, f"replica-{number}", SLOTS, 0.0, KV_TOKENS)
        capacity = engines * SLOTS / RUN_S
        rates = capacity, OVERLOAD * capacity, capacity / 2, capacity / 10
        self._rates = dict(zip(("done", "arrive", "progress", "cancel"), rates, strict=True))  # events a second
        self._step_s = 1.0 / sum(self._rates.values())
        while not self.queue.waiting:  # full, and as old as requests are that run
            self._now += RUN_S / (engines * SLOTS)
            arrival = replace(self._arrival(), request_class=RequestClass(draw.randrange(2)))
            self._arrivals[arrival.request_id] = arrival
            self.took(self.queue.on_arrive(arrival, self._now))
        while self.queue.waiting < WAITING // 2:
            arrival = replace(self._arrival(), request_class=RequestClass.LOW)
            self._arrivals[arrival.request_id] = arrival
            self.took(self.queue.on_arrive(arrival, self._now))

    def event(self) -> Callable[[], list[Action]]:
        """The next event, ready to be sent."""
        while self._stopping and self._stopping[0][0] <= self._now:
            _, name = self._stopping.popleft()
            if name in self._at:
                return partial(self._stopped, name)
        self._now += self._draw.expovariate(1.0) * self._step_s
        kind = self._draw.choices(list(self._rates), list(self._rates.values()))[0]
        if kind == "arrive" or not self._running or not self._waiting:
            arrival = self._arrival()
            self._arrivals[arrival.request_id] = arrival
            return partial(self.queue.on_arrive, arrival, self._now)
        if kind == "cancel":
            at = self._draw.randrange(len(self._waiting))
            self._waiting[at], self._waiting[-1] = self._waiting[-1], self._waiting[at]
            name = self._waiting.pop()
            if name in self._at:
                self._end(name)
            return partial(self.queue.on_cancel, name, self._now)
        name = self._draw.choice(self._running)
        if kind == "progress":
            return partial(self.queue.on_progress, name, 32, self._now)
        self._end(name)
        return partial(self.queue.on_done, name, self._now, None, None)

    def took(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Grant):
                self._at[action.request_id] = len(self._running)
                self._running.append(action.request_id)
            elif isinstance(action, Preempt):
                self.stops += 1
                self._stopping.append((self._now + STOP_S, action.request_id))
            else:
                self._arrivals.pop(action.request_id, None)

    def _stopped(self, name: str) -> list[Action]:
        arrival = self._arrivals[name]
        self._end(name)
        actions = self.queue.on_done(name, self._now, arrival.prompt_tokens, arrival.produced_tokens)
        again = replace(arrival, preempted=arrival.preempted + 1, accepted=True, age_s=1.0)
        self._arrivals[name] = again
        return actions + self.queue.on_arrive(again, self._now)

    def _end(self, name: str) -> None:
        at = self._at.pop(name)
        last = self._running.pop()
        if last != name:
            self._running[at] = last
            self._at[last] = at
        self._arrivals.pop(name, None)

    def _arrival(self) -> Arrival:
        draw = self._draw
        number = next(self._ids)
        name = f"request-{number}"
        if number % 10 == 0:
            self._waiting.append(name)
        prompt = min(4_000, int(draw.lognormvariate(5.5, 1.2)) + 1)
        level = draw.choices(list(RequestClass), CLASS_WEIGHTS)[0]
        tenant = f"tenant-{draw.randrange(TENANTS)}"
        return Arrival(name, level, tenant, cost_tokens=prompt + 256, prompt_tokens=prompt, preemptible=True)


def measure(engines: int, events: int, seed: int) -> dict[str, Any]:
    """Decisions a second of CPU time, and the longest one."""
    load = Overload(engines, random.Random(seed))
    total = 0
    longest = 0
    done = 0
    clock = time.thread_time_ns
    while done < events and total < LONGEST_S * 1e9:
        done += 1
        send = load.event()
        began = clock()
        actions = send()
        span = clock() - began
        load.took(actions)
        total += span
        longest = max(longest, span)
    return {
        "decisions_per_s": round(done / (total / 1e9)),
        "longest_ms": round(longest / 1e6, 2),
        "decisions": done,
        "stops": load.stops,
        "waiting": load.queue.waiting,
    }


def preemption(events: int, seed: int) -> dict[str, Any]:
    """The figures of all fleets."""
    found = {str(engines): measure(engines, events, seed) for engines in FLEETS}
    per_s = {name: one["decisions_per_s"] for name, one in found.items()}
    return {"preemption_decisions_per_s": per_s, "preemption": found}
