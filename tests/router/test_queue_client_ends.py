"""Routers over one line in the quota actor when one of them or the actor goes: none waits in vain, nothing is kept.

The actor is `fake_quota.FakeQuota`. Time is real, with short silences; waits are bounded by `SOON_S`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter

import pytest

from serve_app.core.queue.admission import Arrival, Refuse
from serve_app.core.shared_queue import ActorReply, RouterMessage
from serve_app.errors import ServeAppError, Unavailable
from serve_app.router import model_queue
from serve_app.types import RequestClass
from tests.fakes.engines import turns, until
from tests.fakes.quota import SOON_S, FakeQuota, at_rest, fleet, refused, run, spoken, waits

LOW, NORMAL, HIGH, CRITICAL = RequestClass


def test_while_the_actor_is_away_credit_is_used_and_who_waits_is_served_in_order_after_its_return() -> None:
    async def scenario() -> None:
        order: list[str] = []
        actor = FakeQuota({"r1": 8})
        async with fleet(actor, 2, order) as (first, second):
            await until(lambda: first.credit()[0] >= 2, SOON_S, "credit")
            epoch = actor.core.epoch
            credit = first.credit()[0]
            actor.die()
            await until(lambda: first.is_alone and second.is_alone, SOON_S, "they know")
            here = [f"here {number}" for number in range(credit)]
            for name in here:
                await asyncio.wait_for(first.granted(name), SOON_S)
            levels = (LOW, NORMAL, CRITICAL, HIGH) * 2
            asked = [first.asking(f"{level.label} {number}", level) for number, level in enumerate(levels)]
            await turns(5)
            assert first.end.waiting == len(asked)
            first.done(here[0])  # which is its credit again, and goes to whose turn it is
            assert await asyncio.wait_for(asked[2], SOON_S)
            assert order[credit:] == ["critical 2"]
            actor.start()
            for task in asked:  # each of them ends at once
                task.add_done_callback(lambda task: first.done(task.get_name()))
            first.done("critical 2")
            for name in here[1:]:
                first.done(name)
            await asyncio.wait_for(asyncio.gather(*asked), SOON_S)
            assert actor.core.epoch == epoch + 1
            assert sorted(order) == sorted([*here, *(task.get_name() for task in asked)])
            await at_rest(actor, first, second)

    run(scenario)


def test_who_waits_in_the_queue_of_an_actor_that_dies_is_served_in_order_by_the_next_one() -> None:
    async def scenario() -> None:
        order: list[str] = []
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2, order) as (first, second):
            (holder,) = await first.hold_all(1)
            asked = []
            for number, level in enumerate((LOW, HIGH, NORMAL, CRITICAL)):
                caller = (second, first)[number % 2]
                name = f"{level.label}"
                asked.append(asyncio.create_task(caller.run(name, level)))
                await turns(1)
                await waits(caller, actor, name)
            actor.die()
            await until(lambda: first.is_alone and second.is_alone, SOON_S, "they know")
            assert not order, "nobody has credit, so nobody begins"
            actor.start()
            await spoken(first, second)
            await waits(first, actor, "high", "critical")
            await waits(second, actor, "low", "normal")
            first.done(holder)
            await asyncio.wait_for(asyncio.gather(*asked), SOON_S)
            assert order == ["critical", "high", "normal", "low"]
            await at_rest(actor, first, second)

    run(scenario)


def test_an_actor_that_stands_still_for_longer_than_a_question_may_last_loses_nobody() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 3) as callers:
            held = await callers[0].hold_all(2)
            asked = [asyncio.create_task(one.run(f"before {one.name}")) for one in callers]
            for caller in callers:
                await turns(1)
                await waits(caller, actor, f"before {caller.name}")
            with actor.standing_still():
                callers[0].done(held[0])
                asked += [asyncio.create_task(one.run(f"during {one.name}")) for one in callers]
                await until(lambda: all(one.is_alone for one in callers), SOON_S, "no answer came")
            await asyncio.wait_for(asyncio.gather(*asked), SOON_S)
            callers[0].done(held[1])
            await at_rest(actor, *callers)

    run(scenario)


def test_what_was_reported_in_an_answer_that_nobody_waits_for_any_more_is_repeated() -> None:
    """A question that its router has given up stays with the actor, and takes the next news along."""

    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2) as (first, second):
            (holder,) = await first.hold_all(1)
            asked = second.asking("b")
            await turns(1)
            await waits(second, actor, "b")
            actor.given_up.add("c1")
            first.done(holder)
            await until(lambda: not actor.given_up, SOON_S, "it is answered")
            assert (await asyncio.wait_for(asked, SOON_S)).replica_id == "r1"
            second.done("b")
            await at_rest(actor, first, second)

    run(scenario)


def test_a_router_that_dies_gives_its_account_back_after_its_time_and_the_others_go_on_meanwhile() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 3) as (first, second, dead):
            held = [await asyncio.wait_for(one.granted("holder"), SOON_S) for one in (first, dead)]
            assert len(held) == 2
            await turns()
            actor.cut.add(dead.name)
            others = [asyncio.create_task(one.run(f"{n}")) for n in range(20) for one in (first, second)]
            await turns(5)
            first.done("holder")
            await asyncio.wait_for(asyncio.gather(*others), SOON_S)  # one after the other, on the slot that is left
            await until(lambda: actor.held(dead.name) == (0, 0), SOON_S, "its account is free")
            await dead.shared.stop()
            both = [asyncio.create_task(one.granted("last")) for one in (first, second)]
            await asyncio.wait_for(asyncio.gather(*both), SOON_S)  # both slots at once
            for caller in (first, second):
                caller.done("last")
            await at_rest(actor, first, second)

    run(scenario)


# What a model's line is told


def test_a_model_that_is_retired_and_served_again_by_the_same_name_has_a_line_of_its_own() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 2) as (first, second):
            held = await first.hold_all(2)
            waits_at_old = first.asking("old")
            await turns(1)
            await waits(first, actor, "old")
            old = first.end
            new = first.join()
            old.refuse_all(lambda: Unavailable("gone"))
            assert isinstance(await refused(waits_at_old), Unavailable)
            new.set_replica("r1", True)
            new.open()
            after = first.asking("new")
            other = second.asking("other")
            await turns(1)
            await waits(first, actor, "new")
            await waits(second, actor, "other")
            for name in held:
                old.release(name)
            old.close()
            await asyncio.wait_for(asyncio.gather(after, other), SOON_S)
            first.done("new")
            second.done("other")
            await at_rest(actor, first, second)

    run(scenario)


def test_a_model_that_is_retired_leaves_nothing_at_its_router_though_its_engines_go_on() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 4})
        async with fleet(actor, 2) as (first, second):
            await until(lambda: first.credit()[0] > 0, SOON_S, "credit")
            await asyncio.wait_for(first.run("a"), SOON_S)
            first.end.close()
            first.end.set_replica("r1", True)  # a timer that was still running
            assert first.core.accounts.by_engine == {}
            await until(lambda: actor.held(first.name) == (0, 0), SOON_S, "its credit is the actor's")
            both = [asyncio.create_task(second.granted(f"{n}")) for n in range(4)]
            await asyncio.wait_for(asyncio.gather(*both), SOON_S)
            for n in range(4):
                second.done(f"{n}")
            await at_rest(actor, second)
            assert "r1" not in first.core.in_flight.dropped_engines

    run(scenario)


def test_a_new_engine_is_used_by_each_router_as_soon_as_it_reaches_it_and_no_more_once_it_does_not() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2) as (first, second):
            await first.hold_all(1)
            actor.slots["r2"] = 1
            asked = first.asking("a")
            other = second.asking("c")
            await turns(1)
            await waits(first, actor, "a")
            await waits(second, actor, "c")
            second.end.set_replica("r2", True)
            assert (await asyncio.wait_for(other, SOON_S)).replica_id == "r2", "the other router does not reach it"
            assert not asked.done()
            first.end.set_replica("r2", True)
            second.done("c")
            assert (await asyncio.wait_for(asked, SOON_S)).replica_id == "r2"
            first.end.set_replica("r2", False)  # it drains there: what runs goes on
            after = first.asking("b")
            await turns(1)
            await waits(first, actor, "b")
            first.done("a")
            assert (await asyncio.wait_for(second.granted("d"), SOON_S)).replica_id == "r2", "nobody waits for it there"
            assert not after.done()
            first.done("holder 0")
            assert (await asyncio.wait_for(after, SOON_S)).replica_id == "r1"
            second.done("d")
            actor.engine_ends("r2")
            for caller in (first, second):
                caller.end.remove_replica("r2")
            first.done("b")
            await at_rest(actor, first, second)

    run(scenario)


# Nothing is left


def test_after_its_stop_a_router_has_no_task_and_no_timer_whatever_ends_then() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        actor.network.delay_s = lambda: 0.02
        async with fleet(actor, 1) as (caller,):
            held = await caller.hold_all(2)
            asked = [caller.asking(f"{number}") for number in range(600)]  # more than a message has
            await turns(3)
            assert caller.shared.calls
            await caller.shared.stop()
            caller.done(held[0])
            asked[0].cancel()
            await turns(5)
            assert not caller.shared.calls
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
            await turns(5)
            tasks = {task.get_name() for task in asyncio.all_tasks()}
            assert not tasks & {"queue-message", "queue-watch", "queue-reports"}
            assert caller.shared.timer is None or caller.shared.timer.cancelled()

    run(scenario)


@pytest.mark.parametrize("requests", [2000, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_router_keeps_nothing_of_what_has_ended(requests: int) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 64})
        async with fleet(actor, 2) as callers:
            began = 0
            by_actor = Counter[str]()

            async def client(number: int) -> None:
                nonlocal began
                caller = callers[number % 2]
                for turn in range(requests // 200):
                    name = f"{number}.{turn}"
                    began += 1
                    if (number + turn) % 9 == 0:  # some leave, waiting or in the turn of their grant
                        gone = caller.asking(name)
                        await turns(1 + turn % 4)
                        gone.cancel()
                        await asyncio.wait({gone})
                        caller.done(name)
                        continue
                    await caller.granted(name)
                    by_actor[caller.name] += caller.end.core.in_flight.running[name].is_known
                    caller.end.progress(name, 3)
                    await turns(1)
                    caller.done(name, 3)

            await asyncio.gather(*(client(number) for number in range(200)))
            assert began == requests
            assert all(by_actor[one.name] > requests // 100 for one in callers), "the line was used"
            await at_rest(actor, *callers)
            await until(lambda: not any(one.core.has_reports for one in callers), SOON_S, "all is told")
            for each_caller in callers:
                assert each_caller.shared.calls == set() or len(each_caller.shared.calls) <= 1
                assert len(each_caller.core.router_session.sending) <= 2
                assert each_caller.core.in_flight.dropped_engines == {}
            assert actor.core.queue.requests.incarnations.requests("c0") == {}

    run(scenario)


def test_an_end_that_fails_is_nobody_else_s_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(refusal: Refuse) -> ServeAppError:
        raise RuntimeError("no luck")

    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 1) as (caller,):
            good = caller.end
            held = await caller.hold_all(2)
            asked = caller.asking("a")
            await turns(1)
            await waits(caller, actor, "a")
            bad = caller.join("other")
            monkeypatch.setattr(model_queue, "refusal_error", fails)
            with pytest.raises(RuntimeError, match="no luck"):
                await bad.acquire(Arrival("b", NORMAL, "t", deadline=-1.0))
            good.release(held[0])
            await asyncio.wait_for(asked, SOON_S)
            good.release(held[1])
            good.release("a")
            bad.close()
            await at_rest(actor, caller)

    run(scenario)


def test_a_requests_context_is_not_that_of_the_words_it_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray cancels with a request what was called in its context, and these words are everybody's."""
    whose: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="nobody's")
    seen: list[str] = []

    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2) as callers:
            await callers[0].hold_all(1)
            speak = callers[1].shared.exchange

            async def received(message: RouterMessage) -> ActorReply:
                seen.append(whose.get())
                return await speak(message)

            monkeypatch.setattr(callers[1].shared, "exchange", received)
            whose.set("a request's")
            asked = callers[1].asking("b")
            await turns()
            await waits(callers[1], actor, "b")
            asked.cancel()
            await turns(20)

    run(scenario)
    assert seen
    assert set(seen) == {"nobody's"}
