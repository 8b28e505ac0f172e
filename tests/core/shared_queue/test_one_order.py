"""One order for 1, 3 and 20 routers over a network with a delay: nobody passes one of a higher class later than one
exchange after that one came, and everybody is served."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from serve_app.core.queue.admission import QueuePolicy
from serve_app.types import RequestClass
from tests.core.shared_queue.world import Message, Req, World
from tests.effort import effort

DELAY_S = 0.002  # of a message, each way
EXCHANGE_S = 2 * DELAY_S
SLOTS = 24
REQUESTS = effort(500, 1500)  # seconds of load, in which the line comes and goes many times
LEVELS = list(RequestClass)


class Timed:
    """A world in which routers speak when there is something to say, and messages take their time."""

    def __init__(self, routers: int, seed: int) -> None:
        policy = QueuePolicy(max_queued=1000, max_wait_s=60.0, min_share=0.0)  # which passes on purpose
        self.world = World({"e1": (SLOTS, 100_000)}, routers, policy)
        self.world.settle(4)
        self.draw = random.Random(seed)
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.passed: list[tuple[Req, float]] = []  # who still waited when one of a lower class began, and when that was
        self.live: dict[int, Req] = {}

    def at(self, moment: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (moment, next(self.order), act))

    def run(self) -> None:
        next_tick = self.world.now
        while self.agenda:
            self.world.now, _, act = heapq.heappop(self.agenda)
            if self.world.now >= next_tick:
                self.world.engine_speaks("e1")
                self.world.quota.on_tick(self.world.now)
                next_tick = self.world.now + 0.1
            act()
            self.flush()

    def flush(self) -> None:
        """What is to be said goes on its way; who was woken hears it over its watch."""
        for name in self.world.routers:
            self.world.speak(name, beat=not next(self.order) % 500)
        for name in self.world.quota.queue.router_sessions.take_woken():
            router = self.world.routers[name]
            reported = router.queue.router_session.watch_message()
            reply = self.world.quota.on_watch(reported, self.world.now, timed_out=False)
            if reply is not None:
                self.send(Message(name, self.world.now, None, reply))
        for message in self.world.in_transit:
            self.send(message)
        self.world.in_transit.clear()

    def send(self, message: Message) -> None:
        self.at(self.world.now + DELAY_S, lambda: self.receive(message))

    def receive(self, message: Message) -> None:
        answer = self.world.deliver(message)
        if answer is not None:
            self.send(answer)
        else:
            self.look()

    def arrive(self, name: str) -> None:
        req = self.world.arrive(name, self.draw.choice(LEVELS))
        self.live[req.number] = req
        self.look()

    def look(self) -> None:
        """Whoever has just begun: for how long has one of a higher class waited already?"""
        for number, req in list(self.live.items()):
            if req.state == "waits":
                continue
            del self.live[number]
            if req.state == "runs":
                span_s = 0.05 + self.draw.random() * 0.1
                name = next(name for name, one in self.world.routers.items() if f"q{number}" in one.running)
                self.at(self.world.now + span_s, lambda name=name, number=number: self.world.finish(name, f"q{number}"))
                for other in self.live.values():
                    if other.state == "waits" and other.request_class > req.request_class:
                        self.passed.append((other, self.world.now))


@pytest.mark.parametrize("routers", [1, 3, 20])
def test_nobody_is_passed_by_a_lower_class_later_than_one_exchange_after_it_came(routers: int) -> None:
    timed = Timed(routers, seed=routers)
    world = timed.world
    names = list(world.routers)
    moment = world.now
    for _ in range(REQUESTS):
        moment += timed.draw.expovariate(260.0)  # of about 240 a second that can be served: the line comes and goes
        timed.at(moment, lambda: timed.arrive(timed.draw.choice(names)))
    timed.run()
    late = [now - req.arrived_s for req, now in timed.passed if req.granted_s > now]  # not: both at that very moment
    assert max(late, default=0.0) <= EXCHANGE_S + 1e-9
    granted = [req for router in world.routers.values() for req in router.requests.values() if req.granted_s >= 0]
    assert len(granted) == REQUESTS
    assert {req.here for req in granted} == {True, False}
    assert not timed.live
