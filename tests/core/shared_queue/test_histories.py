"""Random histories of routers and the quota actor's line, weighted so that much happens: see `test_protocol`,
which looks for the odd step; this looks for the odd mixture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from serve_app.core.shared_queue import requests
from serve_app.types import RequestClass
from tests.core.shared_queue.world import MODEL, World
from tests.effort import effort

STEPS = 80
WEIGHTS = {
    "arrive": 30,
    "cancel": 3,
    "finish": 12,
    "grow": 3,
    "speak": 12,
    "watch": 5,
    "deliver": 25,
    "deliver_all": 5,
    "lose": 4,
    "give_up": 3,
    "wait": 6,
    "crash": 1,
    "restart": 1,
    "eject": 2,
    "replace": 1,
    "notice": 3,
    "silence": 0.5,
    "open_session": 3,
    "close_session": 1,
    "draw_on": 8,
}
# more ends of routers, and a queue that is longer
ENDS = {"arrive": 60, "restart": 5, "begin_again": 5, "end_session": 5, "silence": 1, "draw_on": 12}
# many sessions, whose engines and routers come and go
SESSIONS = {"open_session": 8, "draw_on": 28, "close_session": 4, "replace": 3, "eject": 5, "arrive": 12, "restart": 2}
LEVELS = list(RequestClass)
HISTORIES = effort(20, 21_000)  # of few, a fault in any step is in most; what was found in one of thousands follows
FOUND_BEFORE = (5855, 50926, 285, 4002, 4692, 5291, 5973, 8373, 10452, 12409)
# a wait that was over in the very moment of its cancel, twice; one granted where its router had just not been able to
# go, and was again in the same message: it had two places; what was drawn of a session that had ended was gone by all
# the same; a copy of a first message began an incarnation again that was over; a closed session ended by silence in the
# moment in which its last request ended; of two openings granted at once the first gave back the second's tokens, too,
# twice; the copy of a first message again, of a router that had been gone; a router that had been silent claimed credit
# from the next actor that the one before had given to another


class History:
    """One world and what happens to it. `stops`: some requests can be stopped; a part of these stop when told to."""

    def __init__(
        self, seed: int, routers: int = 3, *, stops: bool = True, weights: Mapping[str, float] = WEIGHTS
    ) -> None:
        self.draw = random.Random(seed)
        self.weights = weights
        self.stops = random.Random(seed) if stops else None  # the steps are the same with and without
        self.world = World({"e1": (4, 120), "e2": (3, 120)}, routers)
        self.world.settle(4)
        self.engines = 2
        self.drawn = 0

    def run(self) -> World:
        for _ in range(STEPS):
            step = self.draw.choices(list(self.weights), list(self.weights.values()))[0]
            getattr(self, step)(self.draw.choice(list(self.world.routers)))
            self.obey()
            self.world.check_accounts()
            self.world.check_books()
        self.world.bring_to_rest()
        return self.world

    def arrive(self, name: str) -> None:
        draw = self.draw
        slots = draw.choice([1, 1, 2])
        tokens = draw.randint(1, 50)
        left_s = draw.choice([None, None, 3.0])
        self.world.preemptible = self.stops is not None and self.stops.random() < 0.7
        self.world.arrive_in_order(name, draw.choice(LEVELS), slots, tokens, left_s)

    def obey(self) -> None:
        for name, router in self.world.routers.items():
            for request_id, req in list(router.running.items()):
                is_stopped = req.arrival is not None and req.stops > req.arrival.preempted
                if is_stopped and self.stops is not None and self.stops.random() < 0.3:
                    self.world.obey(name, request_id)

    def cancel(self, name: str) -> None:
        requests = self.world.routers[name].requests
        live = [one for one, req in requests.items() if req.state in ("waits", "runs")]
        if live:
            self.world.cancel(name, self.draw.choice(live))

    def finish(self, name: str) -> None:
        running = list(self.world.routers[name].running)
        if running:
            self.world.finish(name, self.draw.choice(running))

    def grow(self, name: str) -> None:
        running = list(self.world.routers[name].running)
        if running:
            self.world.routers[name].queue.in_flight.grow(
                self.draw.choice(running), self.draw.randint(1, 20), self.world.now
            )

    def speak(self, name: str) -> None:
        self.world.speak(name, beat=self.draw.random() < 0.5)

    def watch(self, name: str) -> None:
        self.world.watch(name)

    def deliver(self, name: str) -> None:
        connection = self.world.in_transit
        if connection:
            index = self.draw.randrange(len(connection)) if self.draw.random() < 0.5 else 0
            answer = self.world.deliver(connection[index] if self.draw.random() < 0.15 else connection.pop(index))
            if answer is not None:
                connection.append(answer)

    def deliver_all(self, name: str) -> None:
        self.world.settle(1)

    def lose(self, name: str) -> None:
        if self.world.in_transit:
            lost = self.world.in_transit.pop(self.draw.randrange(len(self.world.in_transit)))
            if self.draw.random() < 0.5:
                self.give_up(lost.router)

    def give_up(self, name: str) -> None:
        self.world.give_up(name)

    def wait(self, name: str) -> None:
        self.world.wait(self.draw.choice([0.0, 0.05, 0.3, 0.3, 1.0, 2.0, 4.5, 10.0]))

    def crash(self, name: str) -> None:
        self.world.crash()

    def restart(self, name: str) -> None:
        self.world.restart_router(name)

    def begin_again(self, name: str) -> None:
        """A router's incarnation ends, and what it runs goes on."""
        router_queue = self.world.routers[name].queue
        router_queue.begin_incarnation(router_queue.router_session.epoch, self.world.now)

    def end_session(self, name: str) -> None:
        """The actor ends a router's session, as after an event that has failed."""
        self.world.quota.queue.applied.unsure.add(name)

    def eject(self, name: str) -> None:
        router = self.world.routers[name]
        self.world.perform(router, router.queue.set_reachability(MODEL, "e1", self.draw.random() < 0.5, self.world.now))

    def replace(self, name: str) -> None:
        self.world.end_engine(f"e{self.engines}")
        self.engines += 1
        self.world.start_engine(f"e{self.engines}", 3, 120)

    def notice(self, name: str) -> None:
        self.world.notice(name)

    def open_session(self, name: str) -> None:
        draw = self.draw
        wait_s = draw.choice([None, None, 0.5, 6.0])
        ttl_s = draw.choice([3.0, 60.0])
        self.world.open_session(draw.choice("abc"), draw.randint(1, 100), wait_s, ttl_s)

    def close_session(self, name: str) -> None:
        self.world.close_session(self.draw.choice("abc"))

    def draw_on(self, name: str) -> None:
        """A request of a session of which its router has heard."""
        known = list(self.world.routers[name].queue.sessions.values())
        if known:
            lease = self.draw.choice(known).lease
            req = self.world.arrive(
                name, self.draw.choice(LEVELS), tokens=self.draw.randint(1, 60), session=lease, tenant="t0"
            )
            self.drawn += req.state != "refused"

    def silence(self, name: str) -> None:
        self.world.wait(10.0, engines_speak=False)


def look_at(seeds: Sequence[int]) -> None:
    here = elsewhere = stopped = 0
    for seed in seeds:
        try:
            world = History(seed, routers=(1, 3, 3, 20)[seed % 4], stops=seed not in FOUND_BEFORE).run()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
        granted = [req for router in world.routers.values() for req in router.requests.values() if req.granted_s >= 0]
        here += sum(req.here for req in granted)
        elsewhere += sum(not req.here for req in granted)
        stopped += sum(req.stops for req in granted)
    assert here > len(seeds) / 4, "routers hardly grant by themselves: this looks at nothing"
    assert elsewhere > len(seeds) / 4
    assert stopped > len(seeds) / 4


def test_histories_end_well() -> None:
    look_at([*FOUND_BEFORE, *range(HISTORIES), 14_915])  # 14,915: a session ends in the last round


def check_places(world: World) -> int:
    """No place of a session is free while a request waits that fits; returns how many requests run in places."""
    models = world.quota.queue.models
    taken = 0
    for admission in [model_state.admission for model_state in models.by_name.values()]:
        taken += len(admission.scheduler.in_places)
        for lease, waiting in admission.queue.by_session.items():
            session = world.quota.sessions.open_by_lease(lease)
            assert session is not None, "a request waits for the place of a session that has ended"
            if session.engine not in models.closed_engines:
                assert not any(one.may_take_place and not one.holder.is_final for one in waiting.values()), lease
    return taken


def test_sessions_end_well() -> None:
    taken = 0
    # the last ones: two requests of one place, one of an ended router
    for seed in [*range(effort(20, 60)), 100_791, 100_966, 101_074, 101_290]:
        history = History(seed, (1, 2, 3, 3)[seed % 4], weights=WEIGHTS | SESSIONS)
        known = history.world.check_books

        def check(known: Callable[[], None] = known, history: History = history) -> None:
            nonlocal taken
            known()
            taken += check_places(history.world)

        history.world.check_books = check  # type: ignore[method-assign]
        try:
            history.run()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
    assert taken > 100, "hardly a request ran in a place: this looks at nothing"


def look_at_ends(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers end often and come back under their names, and each event forgets one request of theirs."""
    monkeypatch.setattr(requests, "AT_ONCE", 1)
    left = 0
    for seed in seeds:
        history = History(seed, 3, weights=WEIGHTS | ENDS)
        known = history.world.check_books

        def check(known: Callable[[], None] = known, history: History = history) -> None:
            nonlocal left
            known()
            left += len(history.world.quota.queue.requests.incarnations.ended)

        history.world.check_books = check  # type: ignore[method-assign]
        try:
            history.run()
        except Exception as error:
            raise AssertionError(f"history {seed}") from error
        assert not history.world.quota.queue.requests.incarnations.ended
    assert left > 100, "nothing was ever left for a later event: this looks at nothing"


def test_what_routers_held_that_have_ended_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # 6444: an engine leaves before a grant of it was tried again
    look_at_ends([*range(effort(20, 11_000)), 6444], monkeypatch)
