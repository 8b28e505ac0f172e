"""One line over a bad network: words lost, repeated and overtaken, an actor that stands still or dies in the middle.

Whatever happens, nobody begins where there is no place, everybody is served once, and in the end both ends count alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest

from serve_app.core import quota
from serve_app.core.shared_queue import ActorReply, RouterMessage, router_queue
from serve_app.core.times import FENCE_S, OWNER_TTL_S, ROUTER_HEARTBEAT_S
from serve_app.router import queue_client
from serve_app.router.queue_client import MAX_CALLS
from serve_app.types import RequestClass
from tests.fakes.engines import turns, until
from tests.fakes.quota import SOON_S, Away, Caller, FakeQuota, at_rest, fleet, refused, run, spoken

SLOTS = 4
CLIENTS = 24
TURNS = 8
LEVELS = list(RequestClass)
HOLD_S = 0.004
# No forecast refuses: while messages get lost, slots look busy for long, and the drain rate is that of a few releases
NO_FORECAST: dict[str, object] = {"max_wait_s": 1e6}
PRODUCTION = {  # silences as they are
    (quota, "OWNER_TTL_S"): OWNER_TTL_S,
    (router_queue, "FENCE_S"): FENCE_S,
    (queue_client, "FENCE_S"): FENCE_S,
    (queue_client, "ROUTER_HEARTBEAT_S"): ROUTER_HEARTBEAT_S,
}


class Room:
    """What really runs on the engine."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.served: Counter[str] = Counter()

    async def use(self, caller: Caller, name: str, level: RequestClass, draw: random.Random) -> None:
        """One request from its arrival to its end; now and then its client leaves first."""
        asked = caller.asking(name, level, tenant=draw.choice("abc"))
        if draw.random() < 0.2:
            await asyncio.wait({asked}, timeout=draw.random() * 2 * HOLD_S)
            asked.cancel()
            await asyncio.wait({asked})
            if asked.cancelled():
                return
        await asked
        self.served[name] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        caller.end.progress(name, draw.randrange(5))
        if draw.random() < 0.2:
            caller.end.request_kv_tokens(name, 16)
        await asyncio.sleep(draw.random() * HOLD_S)  # the request runs, at most HOLD_S
        self.running -= 1
        caller.done(name, draw.randrange(9))

    async def clients(self, callers: list[Caller], seed: int) -> None:
        async def client(number: int) -> None:
            draw = random.Random(f"{seed}.{number}")
            for turn in range(TURNS):
                caller = draw.choice(callers)
                await self.use(caller, f"{number}.{turn}", draw.choice(LEVELS), draw)

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))


def bad_network(actor: FakeQuota, kind: str, seed: int) -> None:
    draw = actor.network.draw = random.Random(seed)
    if kind in ("lost", "all"):
        actor.network.lost = 0.1
    if kind in ("repeated", "all"):
        actor.network.repeated = 0.3
    if kind in ("overtaken", "all"):
        actor.network.delay_s = lambda: draw.random() ** 4 * 0.05


@pytest.mark.parametrize("kind", ["lost", "repeated", "overtaken", "all"])
def test_a_bad_network_costs_time_and_nothing_else(kind: str) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        room = Room()
        async with fleet(actor, 3, **NO_FORECAST) as callers:
            bad_network(actor, kind, seed=7)
            await asyncio.wait_for(room.clients(callers, seed=7), 40.0)
            actor.network.lost = actor.network.repeated = 0.0
            assert room.most <= SLOTS
            assert set(room.served.values()) == {1}
            assert all(len(one.order) > CLIENTS * TURNS / 10 for one in callers)
            await at_rest(actor, *callers)

    run(scenario)


def test_answers_that_come_in_the_opposite_order_are_taken_in_their_own() -> None:
    """As many as may be on their way at once; the last question has its answer first."""

    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        order = []
        async with fleet(actor, 2, order) as (first, second):
            held = [await asyncio.wait_for(first.granted(f"holder {n}"), SOON_S) for n in range(SLOTS)]
            assert len(held) == SLOTS
            order.clear()
            kept: list[asyncio.Future[None]] = []
            exchange = second.shared.exchange

            async def kept_back(reported):  # type: ignore[no-untyped-def]
                reply = await exchange(reported)
                own_answer = asyncio.get_running_loop().create_future()
                kept.append(own_answer)
                if len(kept) == 4:
                    for call in reversed(kept):
                        call.set_result(None)
                        await asyncio.sleep(0)
                await own_answer
                return reply

            second.shared.exchange = kept_back
            first.done("holder 0")
            asked = []
            for number in range(8):
                asked.append(second.asking(f"{number}"))
                await asyncio.sleep(0.002)  # each in an exchange of its own
            second.shared.exchange = exchange
            for number in range(1, SLOTS):
                first.done(f"holder {number}")
            for number, task in enumerate(asked):
                await asyncio.wait_for(task, SOON_S)
                second.done(f"{number}")
            assert len(kept) >= 4
            assert order == [f"{number}" for number in range(8)]
            await at_rest(actor, first, second)

    run(scenario)


def test_with_as_many_calls_as_may_be_what_waits_is_sent_when_one_ends() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        async with fleet(actor, 1) as (caller,):
            for task in caller.shared.tasks:
                task.cancel()  # neither a heartbeat nor an answer to the long poll sends it instead
            sent: list[asyncio.Future[None]] = []
            exchange = caller.shared.exchange

            async def kept_back(message: RouterMessage) -> ActorReply:
                sent.append(asyncio.get_running_loop().create_future())
                await sent[-1]
                return await exchange(message)

            caller.shared.exchange = kept_back
            for _ in range(MAX_CALLS + 1):
                caller.end.configure(caller.policy)
                await turns()  # each in a message of its own
            assert len(sent) == MAX_CALLS
            sent[0].set_result(None)
            await until(lambda: len(sent) > MAX_CALLS, 1.0, "the next message")
            caller.shared.exchange = exchange
            for message in sent[1:]:
                message.set_result(None)
            await at_rest(actor, caller)

    run(scenario)


@pytest.mark.parametrize("how", ["stands still", "dies"])
def test_an_actor_that_comes_and_goes_under_load_loses_and_doubles_nobody(how: str) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        room = Room()
        async with fleet(actor, 3, **NO_FORECAST) as callers:
            load = asyncio.create_task(room.clients(callers, seed=11))
            for pause_s in (0.1, 1.4) if how == "stands still" else (0.0, 0.2):
                await asyncio.sleep(0.05)  # the load runs
                if how == "stands still":
                    with actor.standing_still():
                        await asyncio.sleep(pause_s)  # the span under test; the second is longer than a question lasts
                else:
                    actor.die()
                    await asyncio.sleep(pause_s)  # the span under test
                    actor.start()
                    await spoken(*callers)
            await asyncio.wait_for(load, 40.0)
            assert room.most <= SLOTS
            assert set(room.served.values()) == {1}
            await at_rest(actor, *callers)

    run(scenario)


@pytest.mark.long
def test_an_actor_that_stands_still_for_three_seconds_costs_three_seconds() -> None:
    """With production's silences: three seconds are less than a question lasts, so that nobody is told anything."""

    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        room = Room()
        async with fleet(actor, 3, **NO_FORECAST) as callers:
            load = asyncio.create_task(room.clients(callers, seed=13))
            await asyncio.sleep(0.05)  # the load runs
            with actor.standing_still():
                await asyncio.sleep(3.0)  # the span under test
                assert not load.done()
                assert not any(one.is_alone for one in callers)
            await asyncio.wait_for(load, 40.0)
            assert room.most <= SLOTS
            assert set(room.served.values()) == {1}
            await at_rest(actor, *callers)

    run(scenario, PRODUCTION)


def test_no_question_is_repeated_faster_than_its_pause_while_nobody_answers() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            await asyncio.wait_for(caller.granted("holder"), SOON_S)
            actor.die()
            await until(lambda: caller.is_alone, SOON_S, "it knows")
            asked = [caller.asking(f"{n}") for n in range(50)]
            before = sum(actor.calls.values())
            for n in range(10):
                asked[n].cancel()
                await asyncio.sleep(0.05)  # bound: half a second in which events would like to be told
            calls = sum(actor.calls.values()) - before
            assert calls <= 2 * 0.5 / 0.05 + 4, "two questions a pause, at most"
            actor.start()
            caller.done("holder")
            for n in range(10, 50):
                await asyncio.wait_for(asked[n], SOON_S)
                caller.done(f"{n}")
            await at_rest(actor, caller)

    run(scenario)


def test_an_actor_that_fails_at_one_word_is_left_alone_for_a_pause_and_hears_it_again() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 1) as (caller,):
            exchange = caller.shared.exchange
            failures = []

            async def fails(reported):  # type: ignore[no-untyped-def]
                if len(failures) < 3:
                    failures.append(reported)
                    raise Away("an error of its own")
                return await exchange(reported)

            caller.shared.exchange = fails
            names = [f"{n}" for n in range(6)]
            served = [asyncio.create_task(caller.run(name)) for name in names]
            await asyncio.wait_for(asyncio.gather(*served), SOON_S)
            await until(lambda: len(failures) == 3, SOON_S, "it has failed three times")
            await spoken(caller)
            await at_rest(actor, caller)

    run(scenario)


def test_timers_that_come_late_lose_nothing() -> None:
    """As with uvloop, which has a plain handle for a moment that has passed or is near: it knows no moment."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        timely = loop.call_at
        plain = []

        def call_at(when: float, act: Any, *given: Any, context: Any = None) -> asyncio.Handle:
            if not getattr(act, "__qualname__", "").startswith("QueueClient."):
                return timely(when, act, *given, context=context)
            plain.append(loop.call_soon(act, *given, context=context))
            return plain[-1]

        loop.call_at = call_at  # type: ignore[assignment, method-assign]
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 1) as (caller,):
            held = await caller.hold_all(2)
            late = [caller.asking(f"{number}", deadline=time.monotonic() + 0.2) for number in range(6)]
            await turns(1)
            gone = caller.asking("gone")
            await turns(1)
            assert "gone" in caller.core.pending.by_request_id
            gone.cancel()
            for asked in late:
                assert (await refused(asked)).code == "deadline"
            for name in held:
                caller.done(name)
            assert plain
            await at_rest(actor, caller)

    run(scenario)


def test_what_nobody_lives_for_any_more_comes_back_within_some_beats(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": SLOTS})
        async with fleet(actor, 1) as (caller,):
            await caller.hold_all(SLOTS)
            waits = caller.asking("waits")
            for number in range(SLOTS):
                del caller.shared.requests[f"holder {number}"]
            assert (await asyncio.wait_for(waits, SOON_S)).replica_id == "r1"
            caller.done("waits")
            await at_rest(actor, caller)
            assert "Request holder 0 was known to one side only" in caplog.text

    run(scenario)


def test_a_request_whose_decision_got_lost_is_ended_within_some_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            await until(lambda: caller.credit()[0] > 0, SOON_S, "credit")
            apply = caller.shared.apply_actions
            monkeypatch.setattr(caller.shared, "apply_actions", lambda actions: apply([]))
            error = await refused(caller.asking("a"))
            assert error.code == "request_lost"
            await at_rest(actor, caller)

    run(scenario)


@pytest.mark.parametrize("method", ["exchange", "_watch"])
def test_an_error_that_nobody_expects_ends_neither_the_watch_nor_the_reports(method: str) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            honest = getattr(caller.shared, method)
            failures = []

            async def fails(reported):  # type: ignore[no-untyped-def]
                if len(failures) < 3:
                    failures.append(reported)
                    raise KeyError("what nobody expects")
                return await honest(reported)

            setattr(caller.shared, method, fails)
            await asyncio.wait_for(caller.granted("holder"), SOON_S)
            await until(lambda: len(failures) == 3, SOON_S, "it has failed three times")
            asked = caller.asking("a")
            caller.done("holder")
            await asyncio.wait_for(asked, SOON_S)
            caller.done("a")
            await spoken(caller)
            await at_rest(actor, caller)

    run(scenario)


@pytest.mark.parametrize("broken", ["on_reply", "next_message", "reconcile"])
def test_an_error_of_the_core_costs_a_pause_and_no_task(broken: str) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            remote_line = caller.shared.core
            failures = []
            honest = getattr(remote_line, broken)

            def fails(*given, **more):  # type: ignore[no-untyped-def]
                if len(failures) < 2:
                    failures.append(given)
                    raise KeyError("what nobody expects")
                return honest(*given, **more)

            setattr(remote_line, broken, fails)
            await until(lambda: len(failures) == 2, SOON_S, "it has failed twice")
            await asyncio.wait_for(caller.granted("a"), SOON_S)
            caller.done("a")
            await spoken(caller)
            await at_rest(actor, caller)
            assert not any(task.done() for task in caller.shared.tasks)

    run(scenario)
