"""A request of a session on fake engine replicas: beside the line, on its replica; by the line where that is gone."""

from __future__ import annotations

import asyncio
import time

import pytest
from serve_app.core.memory.budgets import Budgets
from serve_app.core.memory.shares import PoolTarget
from serve_app.desk import Desk
from serve_app.session_places import LEAD, Draw, SessionPlaces, ahead

from serve_app import session_places
from serve_app.core.memory.sessions import Session
from serve_app.engine.protocol import Frame, Submit
from serve_app.errors import Overloaded
from serve_app.trail import Trail
from serve_app.types import Operation, RequestClass
from tests.shells.fake_engines import FakeCluster, model, run, until
from tests.shells.fake_router import LONG, SOON_S, Router, text

NAME = "tenant a"


def session(pool: str = "r1", tokens: int = 100) -> Session:
    return Session(NAME, "m", pool, tokens, 60.0, 60.0, "")


async def step(
    router: Router, number: str, tokens: int = 3, *, pool: str = "r1", slots: int = 1, trail: Trail | None = None
) -> str:
    """One request of the session; returns where it ran."""
    from serve_app.core.admission import Arrival

    body = {"prompt": f"prompt {number}", "max_tokens": tokens, "stream": True}
    places: list[str] = []

    async def relay(stream, frames: list[Frame], granted) -> None:  # type: ignore[no-untyped-def]
        places.append(granted.replica_id)
        while frames[-1].usage is None:
            frames += await stream.next()
        assert text(frames)

    arrival = Arrival(number, RequestClass.NORMAL, "tenant", slots=slots, affinity=pool)
    make = lambda n: Submit(n, number, Operation.COMPLETION, body)  # noqa: E731
    await router.line.serve(arrival, make, relay, session(pool), trail=trail)
    return places[0]


def test_a_session_request_runs_while_the_line_is_full_and_holds_no_slot() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        running = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "one runs")
        waiting = router.asking()
        for number in range(3):
            assert await asyncio.wait_for(step(router, f"s{number}"), SOON_S) == "r1"
        assert (router.waiting, router.used) == (1, {"r1": 1})
        assert router.line.granted == 1
        running.cancel()
        await waiting
        await router.settled()

    run(scenario, model(slots=1))


def test_a_second_request_beside_the_first_and_one_of_several_sequences_wait_like_any_other() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        first = asyncio.create_task(step(router, "first", LONG))
        await until(lambda: router.line.granted == 1, SOON_S, "it runs")
        holder = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "the slot is taken")
        second = asyncio.create_task(step(router, "second"))
        await until(lambda: router.waiting == 1, SOON_S, "the second waits in the line")
        holder.cancel()
        assert await second == "r1"
        first.cancel()
        await until(lambda: router.line.granted == 0, SOON_S, "place given back")
        await router.settled()

    run(scenario, model(slots=1))


def test_a_request_of_several_sequences_waits_for_as_many_slots() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        holder = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "one of two slots is taken")
        many = asyncio.create_task(step(router, "many", slots=2))
        await until(lambda: router.waiting == 1, SOON_S, "it waits for both")
        holder.cancel()
        assert await many == "r1"
        await router.settled()

    run(scenario, model(slots=2))


def test_a_long_request_of_one_sequence_runs_beside_the_line_whatever_it_weighs() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        router = await Router(cluster).start()
        holder = router.asking(LONG)
        await until(lambda: len(router.relayed) == 1, SOON_S, "one of two slots is taken")
        trail = Trail(sequences=1)
        assert await step(router, "heavy", slots=2, trail=trail) == "r1"
        assert trail.beside
        holder.cancel()
        await asyncio.wait({holder})
        await router.settled()

    run(scenario, model(slots=2))


def test_a_session_whose_replica_is_gone_or_dies_goes_on_by_the_line() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        await cluster.add("r1")
        await cluster.add("r2")
        router = await Router(cluster).start()
        assert await step(router, "there", pool="r2") == "r2"
        assert await step(router, "gone", pool="r3") in ("r1", "r2")
        await router.settled()

    run(scenario, model(slots=2))


def test_inside_the_engine_a_session_comes_before_every_class_in_their_order() -> None:
    classes = [RequestClass.CRITICAL - one for one in RequestClass]
    led = [ahead(Submit(1, "r", Operation.CHAT, {}, priority=one)).priority for one in classes]
    assert max(led) < min(classes)
    assert led == [one - LEAD for one in classes]


def test_a_place_is_one_requests_and_is_given_back_by_that_one_alone() -> None:
    places = SessionPlaces()
    assert places.enter(NAME, "r1")
    assert not places.enter(NAME, "r2")
    places.leave(NAME, "r2")
    assert not places.enter(NAME, "r3")
    places.leave(NAME, "r1")
    assert places.taken == 0
    assert places.enter(NAME, "r3")


class Told:
    """A desk whose actor gives what a table says, at once, to whoever wants it."""

    def __init__(self, **pools: int) -> None:
        self.desk = Desk("router", self._never, ())
        self._pools = pools
        self._budgets: Budgets = self.desk._budgets
        self._budgets.on_epoch(1)

    async def _never(self, word: object) -> None:
        raise AssertionError("nobody starts this desk")

    def give(self, pool: str, tokens: int, version: int = 1) -> None:
        self._budgets.on_targets((PoolTarget(pool, version, tokens),), 1, time.monotonic())
        self.desk._serve(pool)

    def used(self, pool: str) -> int:
        return self._budgets.used(pool)


def drawn(tokens: int, *, has: int, free: int, size: int = 100) -> tuple[int, int, int]:
    """What a request of so many tokens holds inside and beside its session, and what after its end."""

    async def go() -> tuple[int, int, int]:
        told = Told()
        told.desk.open("r1")
        told.give("r1", free)
        draw = Draw(told.desk, "request", session(tokens=size))
        taking = asyncio.create_task(draw.take(tokens))
        await asyncio.sleep(0)
        if has:
            told.give(NAME, has)
        await taking
        inside, beside = told.used(NAME), told.used("r1")
        draw.release()
        draw.release()
        return inside, beside, told.used(NAME) + told.used("r1")

    return asyncio.run(go())


def test_a_request_draws_on_its_session_and_on_an_ordinary_budget_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_places, "TOKENS_WAIT_S", 0.05)
    assert drawn(60, has=100, free=1000) == (60, 0, 0)
    assert drawn(160, has=100, free=1000) == (100, 60, 0)
    assert drawn(60, has=0, free=1000) == (0, 60, 0)  # the actor is away: all of it is ordinary
    with pytest.raises(Overloaded):
        drawn(160, has=100, free=10)


def test_what_a_running_request_needs_more_comes_from_its_session_first() -> None:
    async def go() -> None:
        told = Told()
        told.desk.open("r1")
        told.give("r1", 50)
        draw = Draw(told.desk, "request", session())
        taking = asyncio.create_task(draw.take(60))
        await asyncio.sleep(0)
        told.give(NAME, 100)
        await taking
        assert draw.grow("request", 40)
        assert (told.used(NAME), told.used("r1")) == (100, 0)
        assert draw.grow("request", 30)
        assert (told.used(NAME), told.used("r1")) == (100, 30)
        assert not draw.grow("request", 30)
        draw.release()
        assert (told.used(NAME), told.used("r1")) == (0, 0)

    asyncio.run(go())
