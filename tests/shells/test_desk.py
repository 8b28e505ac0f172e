"""A router's budgets: what waits, what is said to the quota actor and how often, and that nothing stops for good.

The actor is a function of the test. Time is real and short: each wait is bounded by SOON_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from serve_app import desk as desks
from serve_app.core.memory.quota import RouterReply, RouterReport
from serve_app.core.memory.shares import PoolTarget
from serve_app.desk import Desk
from serve_app.errors import Overloaded

POOL = "engine"
SOON_S = 10.0  # for what takes milliseconds on an idle machine


class Away(Exception):
    """What Ray raises while the actor is away."""


class Actor:
    """Gives each pool `tokens`; `hold_s` is how long it holds a word back."""

    def __init__(self, tokens: int = 100) -> None:
        self.tokens, self.epoch, self.hold_s = tokens, 1, 0.0
        self.away = self.broken = False
        self.words: list[RouterReport] = []
        self.at_once = 0
        self.most_at_once = 0
        self.version = 0
        self.blocked: tuple[tuple[str, int], ...] = ()

    async def __call__(self, told: RouterReport) -> RouterReply:
        self.words.append(told)
        if self.away:
            raise Away("gone")
        if self.broken:
            raise RuntimeError("a mistake")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.hold_s)
        finally:
            self.at_once -= 1
        if told.epoch != self.epoch:
            return RouterReply(self.epoch, (), stale=True)
        self.version += 1
        targets = tuple(PoolTarget(pool.pool, self.version, self.tokens) for pool in told.pools)
        return RouterReply(self.epoch, targets, blocked=self.blocked)


def with_desk(scenario: Callable[[Desk, Actor], Awaitable[None]], actor: Actor | None = None) -> None:
    async def run() -> None:
        there = actor or Actor()
        desk = Desk("router", there, (Away,))
        desk.open(POOL)
        await desk.start()
        try:
            async with asyncio.timeout(SOON_S):
                await scenario(desk, there)
        finally:
            await desk.stop()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - bounded by `with_desk`; there is no event of it
        await asyncio.sleep(0.005)


def test_a_request_gets_its_tokens_from_the_share_without_another_word() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 10, SOON_S)
        words = len(actor.words)
        for number in range(9):
            await desk.acquire(f"r{number}", POOL, 10, SOON_S)
        assert len(actor.words) == words
        assert desk.held("r3") == 10

    with_desk(scenario)


def test_requests_that_wait_are_served_in_their_order_when_others_end() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 100, SOON_S)
        order: list[str] = []

        async def ask(name: str, tokens: int) -> None:
            await desk.acquire(name, POOL, tokens, SOON_S)
            order.append(name)

        tasks = [asyncio.create_task(ask(name, tokens)) for name, tokens in (("big", 90), ("small", 10))]
        await asyncio.sleep(0.02)
        assert order == []
        assert actor.words[-1].pools[0].want in (0, 100)
        desk.release("first")
        await asyncio.gather(*tasks)
        assert order == ["big", "small"]
        assert desk.waited >= 2

    with_desk(scenario)


def test_a_request_whose_tokens_do_not_come_is_refused_and_leaves_the_line() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 100, SOON_S)
        with pytest.raises(Overloaded) as refused:
            await desk.acquire("second", POOL, 1, 0.05)
        assert refused.value.code == "kv_budget"
        desk.release("first")
        await desk.acquire("third", POOL, 100, SOON_S)
        assert desk.held("second") == 0

    with_desk(scenario)


def test_a_caller_that_leaves_in_the_very_turn_it_was_served_leaves_nothing_behind() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 100, SOON_S)
        task = asyncio.create_task(desk.acquire("second", POOL, 100, SOON_S))
        await asyncio.sleep(0.02)
        desk.release("first")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert desk.held("second") == 0
        await desk.acquire("third", POOL, 100, SOON_S)

    with_desk(scenario)


def test_an_engine_that_leaves_lets_go_of_who_waits_for_it() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 100, SOON_S)
        waits = asyncio.create_task(desk.acquire("second", POOL, 100, SOON_S))
        await asyncio.sleep(0.02)
        desk.drop(POOL)
        await waits
        assert desk.held("second") == 0
        await desk.acquire("third", POOL, 100, SOON_S)  # the call that follows says that the engine has left
        assert desk.release("first") == 0

    with_desk(scenario)


def test_a_request_that_outgrows_the_share_goes_on_and_is_counted() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("r", POOL, 60, SOON_S)
        assert desk.grow("r", 40)
        assert not desk.grow("r", 1, owe=False)
        assert (desk.held("r"), desk.outgrown) == (100, 1)

    with_desk(scenario)


def test_who_runs_and_has_outgrown_its_tokens_comes_before_all_who_wait() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("long", POOL, 60, SOON_S)
        await desk.acquire("short", POOL, 40, SOON_S)
        waits = asyncio.create_task(desk.acquire("next", POOL, 30, SOON_S))
        await asyncio.sleep(0)
        assert not desk.grow("long", 20)
        assert not desk.grow("long", 5)
        desk.release("short")
        assert desk.held("long") == 85
        assert not waits.done()
        assert desk.held("next") == 0
        desk.release("long")
        await waits

    with_desk(scenario)


def test_nobody_begins_while_a_running_request_is_owed_tokens() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("long", POOL, 60, SOON_S)
        await desk.acquire("short", POOL, 20, SOON_S)
        assert not desk.grow("long", 30)
        waits = asyncio.create_task(desk.acquire("next", POOL, 10, SOON_S))  # which would fit
        await asyncio.sleep(0)
        assert not waits.done()
        desk.release("short")
        await waits
        assert (desk.held("long"), desk.held("next")) == (90, 10)

    with_desk(scenario)


def test_what_an_ended_request_was_owed_is_forgotten_and_so_is_an_engine_s() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("long", POOL, 60, SOON_S)
        await desk.acquire("other", POOL, 40, SOON_S)
        assert not desk.grow("long", 30)
        assert not desk.grow("other", 30)
        desk.release("long")
        assert (desk.held("long"), desk.held("other")) == (0, 70)
        await desk.acquire("next", POOL, 30, SOON_S)
        assert not desk.grow("next", 1)
        desk.drop(POOL)
        assert desk._owed == {}

    with_desk(scenario)


def test_what_running_requests_are_owed_is_asked_of_the_actor() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("long", POOL, 100, SOON_S)
        words = len(actor.words)
        assert not desk.grow("long", 30)
        actor.tokens = 130
        await until(lambda: desk.held("long") == 130)
        assert max(pool.want for word in actor.words[words:] for pool in word.pools) == 30

    with_desk(scenario)


def test_requests_wait_while_the_actor_is_away_and_none_fails() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        waits = asyncio.create_task(desk.acquire("r", POOL, 10, SOON_S))
        await until(lambda: len(actor.words) >= 2)
        assert not waits.done()
        actor.away = False
        await waits

    actor = Actor()
    actor.away = True
    with_desk(scenario, actor)


def test_after_the_actors_death_everything_is_said_again_under_the_new_epoch() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("r", POOL, 10, SOON_S)
        actor.epoch = 2
        await until(lambda: actor.words[-1].epoch == 2)
        assert actor.words[-1].pools[0].used == 10
        assert actor.words[-1].pools[0].limit == 100

    with_desk(scenario)


def test_a_mistake_in_one_word_does_not_end_the_words() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        waits = asyncio.create_task(desk.acquire("r", POOL, 10, SOON_S))
        await until(lambda: len(actor.words) >= 1)
        actor.broken = False
        await waits

    actor = Actor()
    actor.broken = True
    with_desk(scenario, actor)


def test_many_that_wait_speak_as_one() -> None:
    """Each word that comes back empty is asked again, and only the newest of them: the words do not multiply."""

    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("first", POOL, 100, SOON_S)
        actor.hold_s = 0.1
        tasks = [asyncio.create_task(desk.acquire(f"r{number}", POOL, 10, SOON_S)) for number in range(3)]
        for number in range(30):
            tasks.append(asyncio.create_task(desk.acquire(f"s{number}", POOL, 10, SOON_S)))
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)  # the words of the arrivals have come back by now
        actor.most_at_once, words = actor.at_once, len(actor.words)
        await asyncio.sleep(1.0)  # the span that is looked at
        assert actor.most_at_once <= 2
        assert len(actor.words) - words <= 15
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_desk(scenario)


def test_an_idle_desk_says_one_word_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desks, "BEAT_S", 0.1)

    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("r", POOL, 10, SOON_S)
        desk.release("r")
        await asyncio.sleep(0.1)
        words = len(actor.words)
        await asyncio.sleep(1.0)  # the span that is looked at
        assert 4 <= len(actor.words) - words <= 11

    with_desk(scenario)


def test_slow_answers_of_a_busy_machine_keep_the_share() -> None:
    """Each takes two beats and more; words do not wait for one another, and a late answer still counts."""

    async def scenario(desk: Desk, actor: Actor) -> None:
        await desk.acquire("r", POOL, 10, SOON_S)
        actor.hold_s = 2.2
        for number in range(22):
            await asyncio.sleep(0.2)  # bound: 4.4 s in all, longer than any one answer is good for
            await desk.acquire(f"r{number}", POOL, 1, 0.01)

    with_desk(scenario)


def test_what_waits_for_memory_is_known_to_the_router() -> None:
    async def scenario(desk: Desk, actor: Actor) -> None:
        actor.blocked = (("m", 2),)
        await until(lambda: desk.blocked == {"m": 2})
        actor.blocked = ()
        await until(lambda: desk.blocked == {})

    with_desk(scenario)
