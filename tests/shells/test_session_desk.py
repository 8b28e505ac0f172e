"""Two routers' desks and the quota actor's core share a session, with nothing between them but the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from serve_app.core.memory.grants import EngineReport, Rank
from serve_app.core.memory.leases import Device
from serve_app.core.memory.quota import Quota, RouterReply, RouterReport
from serve_app.core.memory.sessions import SessionAsk, name_of
from serve_app.desk import BEAT_S, Desk
from serve_app.errors import Overloaded

NAME, TOKENS = name_of("t", "a"), 100
SOON_S = 5.0  # for what takes milliseconds on an idle machine


class Actor:
    """The quota actor without Ray: its core, asked directly."""

    def __init__(self) -> None:
        self.core = Quota(1, {}, time.monotonic())
        self.core.on_devices([Device("node", 0, 1000, 0)], time.monotonic())
        engine = EngineReport("engine", "m", (Rank("node", 0),), 1000, 1000)
        holds = self.core.on_engine(engine, time.monotonic()).holds
        self.core.on_engine(replace(engine, holds=holds, kv_tokens=1000), time.monotonic())
        self.core.on_session(SessionAsk(NAME, "m", TOKENS, 60.0), time.monotonic())
        self.words = 0

    async def speak(self, word: RouterReport) -> RouterReply:
        self.words += 1
        await asyncio.sleep(0)
        return self.core.on_router(word, time.monotonic())[0]

    @property
    def free(self) -> int:
        return self.core.ledger.free(NAME)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)  # bound: SOON_S


def with_desks(scenario: Callable[[Actor, Desk, Desk], Awaitable[None]]) -> None:
    async def go() -> None:
        actor = Actor()
        desks = [Desk(name, actor.speak, ()) for name in ("a", "b")]
        for desk in desks:
            await desk.start()
        try:
            async with asyncio.timeout(4 * SOON_S):
                await scenario(actor, *desks)
        finally:
            for desk in desks:
                await desk.stop()

    asyncio.run(go())


async def take(desk: Desk, name: str, tokens: int = TOKENS, wait_s: float = SOON_S) -> None:
    desk.demand(NAME)
    await desk.acquire(name, NAME, tokens, wait_s)


def test_a_session_goes_from_router_to_router_with_its_requests() -> None:
    async def scenario(actor: Actor, one: Desk, other: Desk) -> None:
        await take(one, "warm", 1)
        one.release("warm")
        began = time.monotonic()
        for number in range(10):
            desk = (one, other)[number % 2]
            await take(desk, str(number))
            assert actor.free == 0
            assert desk.release(str(number)) == TOKENS
        assert time.monotonic() - began < 10 * BEAT_S / 2  # a word each, and no beat waited for
        await until(lambda: actor.free == TOKENS, "all of it is back")

    with_desks(scenario)


def test_what_one_router_uses_no_other_gets() -> None:
    async def scenario(actor: Actor, one: Desk, other: Desk) -> None:
        await take(one, "r", 70)
        with pytest.raises(Overloaded):
            await take(other, "s", 40, 0.3)
        await take(other, "t", 30)
        waiting = asyncio.create_task(take(other, "u", 70))
        await asyncio.sleep(0.05)  # bound: it is under way
        assert not waiting.done()
        one.release("r")
        await waiting
        assert (one.held("r"), other.held("t"), other.held("u")) == (0, 30, 70)

    with_desks(scenario)


def test_an_idle_session_is_forgotten_by_the_desk_and_costs_no_words() -> None:
    async def scenario(actor: Actor, one: Desk, other: Desk) -> None:
        await take(one, "r")
        one.release("r")
        await until(lambda: NAME not in one._waiting, "the desk has forgotten it")
        assert actor.free == TOKENS
        words = actor.words
        await asyncio.sleep(BEAT_S / 2)  # bound: half a beat
        assert actor.words <= words + 2
        await take(one, "again")
        assert one.release("again") == TOKENS

    with_desks(scenario)


def test_an_end_of_the_session_takes_nothing_from_its_request_and_the_desk_lets_go() -> None:
    async def scenario(actor: Actor, one: Desk, other: Desk) -> None:
        await take(one, "r", 60)
        actor.core.on_close(NAME)
        await asyncio.sleep(0.05)  # bound: a few words
        assert one.held("r") == 60
        one.release("r")
        await until(lambda: NAME not in one._waiting, "the desk has forgotten it")
        with pytest.raises(Overloaded):
            await take(other, "s", 1, 0.3)
        await until(lambda: NAME not in other._waiting, "the desk has forgotten it")

    with_desks(scenario)
