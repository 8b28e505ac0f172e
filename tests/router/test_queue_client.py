"""Routers over one line in the quota actor: one order, no question without need, and nothing lost or leaked.

The actor is `fake_quota.FakeQuota`. Time is real, with short silences; waits are bounded by `SOON_S`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable

import pytest

from serve_app.core.queue.admission import Action, RefusalReason
from serve_app.router import QueueClient, queue_client
from serve_app.types import RequestClass
from tests.fakes.engines import turns, until
from tests.fakes.quota import SOON_S, FakeQuota, at_rest, fleet, refused, run, waits

LOW, NORMAL, HIGH, CRITICAL = RequestClass


@pytest.mark.parametrize("routers", [2, 3])
def test_there_is_one_order_by_class_whoever_asks_first_at_which_router(routers: int) -> None:
    async def scenario() -> None:
        order: list[str] = []
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, routers, order) as callers:
            (holder,) = await callers[0].hold_all(1)
            asked = []
            turn = itertools.cycle(callers[::-1])
            for level, number in itertools.product((LOW, CRITICAL, NORMAL, HIGH), range(routers)):
                caller = next(turn)
                name = f"{level.label} {number}"
                asked.append(asyncio.create_task(caller.run(name, level)))
                await turns()
                await waits(caller, actor, name)
            callers[0].done(holder)
            await asyncio.wait_for(asyncio.gather(*asked), SOON_S)
            wanted = [f"{level.label} {n}" for level in (CRITICAL, HIGH, NORMAL, LOW) for n in range(routers)]
            assert order == wanted
            await at_rest(actor, *callers)

    run(scenario)


def test_the_actor_knows_a_router_as_soon_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_client, "CALM_REPORT_S", 2 * SOON_S)  # no heartbeat comes

    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        client = QueueClient("r", actor.exchange, actor.watch)
        await client.start()
        await until(lambda: not client.core.alone, SOON_S, "the actor knows the router")
        await client.stop()
        await actor.close()

    run(scenario)


def test_while_nobody_waits_a_request_is_granted_in_the_call_and_nobody_is_asked() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 8})
        async with fleet(actor, 2) as callers:
            await until(lambda: all(one.credit()[0] for one in callers), SOON_S, "credit at both")
            asked = actor.calls["exchange"]
            place = callers[0].granted("a")
            with pytest.raises(StopIteration) as ended:  # over without a turn of the event loop
                place.send(None)
            assert (ended.value.value.replica_id, ended.value.value.waited_s) == ("r1", 0.0)
            assert actor.calls["exchange"] == asked
            assert [run.is_known for run in callers[0].runs] == [False], "on credit"
            callers[0].done("a")
            await at_rest(actor, *callers)

    run(scenario)


def test_a_slot_given_back_in_one_router_goes_to_who_waits_in_another() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 2) as (first, second):
            holders = await first.hold_all(2)
            asked = second.asking("b")
            await turns()
            await waits(second, actor, "b")
            assert not asked.done()
            first.done(holders[0])
            assert (await asyncio.wait_for(asked, SOON_S)).replica_id == "r1"
            second.done("b")
            first.done(holders[1])
            await at_rest(actor, first, second)

    run(scenario)


@pytest.mark.parametrize("moment", ["before it is handed in", "in the line", "running"])
def test_a_cancel_leaks_nothing(moment: str) -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2) as (first, second):
            (holder,) = await first.hold_all(1)
            asked = second.asking("gone")
            await turns(1)
            if moment != "before it is handed in":
                await waits(second, actor, "gone")
            if moment == "running":
                first.done(holder)
                await asyncio.wait_for(asked, SOON_S)
                second.done("gone")
            asked.cancel()
            await asyncio.wait({asked})
            first.done(holder)
            await asyncio.wait_for(second.run("next"), SOON_S)
            second.done("gone")  # again: nothing
            await at_rest(actor, first, second)

    run(scenario)


def test_a_request_cancelled_in_the_turn_of_its_grant_never_ran_and_gives_its_place_back() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 1) as (caller,):
            (holder,) = await caller.hold_all(1)
            gone = caller.asking("gone")
            after = caller.asking("after")
            await turns(1)
            await waits(caller, actor, "gone", "after")
            apply = caller.shared.apply_actions

            def cancelling(actions: Iterable[Action]) -> None:
                decisions = list(actions)
                apply(decisions)
                if any(action.request_id == "gone" for action in decisions):
                    gone.cancel()

            caller.shared.apply_actions = cancelling  # type: ignore[method-assign]
            caller.done(holder)
            await asyncio.wait_for(after, SOON_S)
            assert gone.cancelled()
            assert caller.order == ["after"]
            caller.done("after")
            await at_rest(actor, caller)

    run(scenario)


# The actor is away


@pytest.mark.parametrize("reason", ["queue_full", "shed", "deadline", "timeout", "no_replica", "too_large"])
def test_a_refusal_says_why_and_when_to_come_back(reason: str) -> None:
    async def scenario() -> None:
        bounds: dict[str, object] = {
            "queue_full": {"max_queued": 1},
            "shed": {"max_queued": 1},
            "timeout": {"max_wait_s": 0.2},
            "no_replica": {"no_replica_wait_s": 0.2},
        }.get(reason, {})
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 2, **bounds) as (first, second):
            await first.hold_all(2)
            if reason == "no_replica":
                second.end.replica_start.reported(77.0)
                first.end.set_replica("r1", False)
                second.end.set_replica("r1", False)
            before = first.asking("before", HIGH) if reason == "queue_full" else None
            if before is not None:
                await turns(1)
                await waits(first, actor, "before")
            more = {"deadline": time.monotonic() + 0.2} if reason == "deadline" else {}
            asked = second.asking("b", LOW, slots=3 if reason == "too_large" else 1, **more)
            if reason == "shed":
                await turns(1)
                await waits(second, actor, "b")
                before = first.asking("before", HIGH)
            error = await refused(asked)
            assert error.code == reason
            assert second.end.refused[RefusalReason(reason)] == 1
            if reason == "no_replica":
                assert error.retry_after_s == pytest.approx(77.0, abs=SOON_S), "the start that this router knows of"
                for caller in (first, second):
                    caller.end.set_replica("r1", True)
            elif reason == "too_large":
                assert error.retry_after_s is None
            else:
                assert error.retry_after_s is not None
                assert error.retry_after_s > 0
            for number in range(2):
                first.done(f"holder {number}")
            if before is not None:
                await asyncio.wait_for(before, SOON_S)
                first.done("before")
            await at_rest(actor, first, second)

    run(scenario)


def test_a_running_request_grows_from_credit_and_else_by_a_question() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 8})
        async with fleet(actor, 2) as (first, second):
            await until(lambda: first.credit()[1] > 10_000, SOON_S, "credit")
            await first.granted("credit")
            first.end.request_kv_tokens("credit", 500)
            assert first.used("r1")[1] == 510
            whole = first.credit()[1] + 20_000
            first.end.request_kv_tokens("credit", whole)
            assert first.used("r1")[1] == 510, "that is more than its credit"
            await until(lambda: first.used("r1")[1] == 510 + whole, SOON_S, "it has it")
            await second.hold_all(7)
            waiting = first.asking("line")
            await turns(1)
            await waits(first, actor, "line")
            second.done("holder 0")
            await asyncio.wait_for(waiting, SOON_S)
            before = actor.free()[1]
            held = first.used("r1")
            first.end.request_kv_tokens("line", 300)
            assert first.used("r1") == held, "what the line has granted grows by a question"
            await until(lambda: actor.free()[1] == before - 300, SOON_S, "it has it")
            first.done("line")
            first.done("credit")
            for number in range(1, 7):
                second.done(f"holder {number}")
            await at_rest(actor, first, second)

    run(scenario)


@pytest.mark.parametrize("how", ["credit", "line"])
def test_what_a_tenant_s_requests_produce_counts_while_they_run_at_whichever_router(how: str) -> None:
    async def scenario() -> None:
        order: list[str] = []
        actor = FakeQuota({"r1": 2})
        async with fleet(actor, 2, order) as (first, second):
            if how == "credit":
                await until(lambda: first.credit()[0] > 0, SOON_S, "credit")
            else:
                await second.hold_all(2)
            runs = first.asking("runs", tenant="heavy")
            await turns(2)
            if how == "line":
                await waits(first, actor, "runs")
                second.done("holder 0")
            await asyncio.wait_for(runs, SOON_S)
            [run] = first.runs
            assert run.is_known == (how == "line")
            if how == "credit":
                await asyncio.wait_for(second.granted("holder 1"), SOON_S)
            order.clear()
            asked = []
            for caller, name, tenant in ((second, "heavy", "heavy"), (second, "light", "light")):
                asked.append(caller.asking(name, tenant=tenant))
                await turns(1)
                await waits(caller, actor, name)
            first.end.progress("runs", 5000)
            await until(lambda: not first.core.has_reports, SOON_S, "it is told")
            await until(lambda: not first.shared.calls, SOON_S, "and heard")
            second.done("holder 1")
            await asyncio.wait_for(asked[1], SOON_S)
            assert order == ["light"], "the heavy tenant came first, and has had more"
            first.done("runs")
            await asyncio.wait_for(asked[0], SOON_S)
            second.done("heavy")
            second.done("light")
            await at_rest(actor, first, second)

    run(scenario)


def test_a_request_can_see_itself_come_nearer() -> None:
    async def scenario() -> None:
        actor = FakeQuota({"r1": 1})
        async with fleet(actor, 2) as (first, second):
            (holder,) = await first.hold_all(1)
            asked = []
            for number in range(4):
                caller = (first, second)[number % 2]
                asked.append(caller.asking(f"{number}"))
                await turns(1)
                await waits(caller, actor, f"{number}")

            def position() -> int | None:
                status = second.end.status("3")
                return None if status is None else status.position

            await until(lambda: position() == 4, SOON_S, "the last of four")
            seen = [4]
            first.done(holder)
            for number in range(3):
                await asyncio.wait_for(asked[number], SOON_S)
                await until(lambda number=number: position() == 3 - number, SOON_S, "one nearer")
                seen.append(position() or 0)
                (first, second)[number % 2].done(f"{number}")
            assert seen == [4, 3, 2, 1]
            await asyncio.wait_for(asked[3], SOON_S)
            assert second.end.status("3") is None
            assert second.end.status("unknown") is None
            second.done("3")
            await at_rest(actor, first, second)

    run(scenario)
