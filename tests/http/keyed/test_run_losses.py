"""Requests with an Idempotency-Key while routers die, the actor is away or new, and replies get lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_app.http.keyed import claim_client
from serve_app.http.keyed.claim_client import EMPTY_BEATS
from tests.fakes.asgi_client import Client, Reply, cancel
from tests.fakes.router import SOON_S, expected_text
from tests.fakes.three_routers import ANY, LATER_S, REPLAY, TOKENS, Three, check
from tests.fakes.until import turns, until


def receipt_of(client: Client, reply: Reply) -> Any:
    found = client.edge.parts.receipts.find(reply.headers["x-serve-app-request-id"], None)
    assert found is not None
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_outlives_the_router_that_ran_it(stream: bool) -> None:
    async def scenario(three: Three) -> None:
        first = await three.post("a", stream=stream)
        three.claims.kill("a")
        early = [await three.post(router, stream=stream) for router in "bc"]  # the actor does not know yet
        three.claims.bury("a")
        later = [await three.post(router, stream=stream) for router in "bc"]
        assert {reply.body for reply in early + later} == {first.body}
        assert three.runs == 1

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_whose_router_died_starts_anew_once_is_counted_and_its_receipt_says_so(stream: bool) -> None:
    async def scenario(three: Three) -> None:
        task = three.posting("a", tokens=ANY, stream=stream)
        await until(lambda: three.runs == 1, SOON_S, "it runs")
        three.claims.kill("a")
        await asyncio.wait({task})
        repeats = [three.posting(router, tokens=ANY, stream=stream) for router in "bcc"]
        await asyncio.sleep(LATER_S)  # for the actor to notice; the router is asked in vain meanwhile
        assert three.runs == 1
        three.claims.bury("a")
        await until(lambda: three.runs == 2, SOON_S, "it runs again")
        replies = await asyncio.wait_for(asyncio.gather(*repeats), 2 * SOON_S)
        assert {reply.text for reply in replies} == {expected_text("p", ANY)}
        assert three.runs == 2
        assert three.results() == {"restarted": 1, "joined": 2}
        (own,) = (reply for reply in replies if REPLAY not in reply.headers)
        client = next(
            one
            for one in three.routers.values()
            if one.edge.parts.receipts.find(own.headers["x-serve-app-request-id"], None)
        )
        found = receipt_of(client, own)
        assert found.trace.router_losses == 1
        document = json.loads((await client.get(f"/admin/requests/{found.request_id}")).body)
        assert any("had died" in line for line in document["story"])

    check(scenario, JOIN_S=30.0)


def test_who_has_a_part_of_a_run_that_died_with_its_router_is_notified_and_starts_no_other() -> None:
    async def scenario(three: Three) -> None:
        task, _ = await three.begun("a")
        joined, reply = await three.begun("b")
        three.claims.kill("a")
        three.claims.bury("a")
        await asyncio.wait({task})
        await asyncio.wait_for(joined, SOON_S)
        assert reply.events[-1]["error"]["code"] == "run_lost"
        assert three.runs == 1
        again, _ = await three.begun("b")
        assert three.runs == 2
        await cancel(again)

    check(scenario)


def test_a_second_router_that_does_not_answer_holds_the_last_byte_up_for_its_bound_only() -> None:
    async def scenario(three: Three) -> None:
        three.claims.dead |= {"b"}  # its death is not known
        hung = asyncio.Event()
        call = three.claims.call

        async def hanging(replica_id: str, method: str, *arguments: Any) -> Any:
            if replica_id == "c" and method == "keep_answer":
                await hung.wait()
            return await call(replica_id, method, *arguments)

        three.claims.call = hanging  # type: ignore[method-assign]
        assert (await three.post("a")).text == expected_text("p", TOKENS)
        hung.set()
        await three.beat("a")
        assert (await three.post("c")).text == expected_text("p", TOKENS)
        assert three.runs == 1

    check(scenario, COPY_S=0.2)


def test_an_actor_that_is_away_is_waited_for_and_nothing_runs_without_it() -> None:
    async def scenario(three: Three) -> None:
        three.claims.up = False
        waits = three.posting("a")
        await asyncio.sleep(LATER_S)  # the actor is away so long
        assert not waits.done()
        assert three.runs == 0
        three.claims.up = True
        assert (await waits).text == expected_text("p", TOKENS)
        three.claims.up = False
        refused = await three.post("b", headers={"Idempotency-Key": "two"})
        assert (refused.status, refused.error["code"]) == (503, "no_quota")
        assert int(refused.headers["retry-after"]) >= 1
        assert three.runs == 1

    check(scenario, CLAIM_WAIT_S=1.0)


def test_an_answer_that_ends_while_the_actor_is_away_is_reported_to_it_later() -> None:
    async def scenario(three: Three) -> None:
        task = three.posting("a", tokens=100)
        await until(lambda: three.runs == 1, SOON_S, "it runs")
        three.claims.up = False
        first = await task
        three.claims.up = True
        await three.beat()
        three.claims.kill("a")
        three.claims.bury("a")
        assert (await three.post("b", tokens=100)).body == first.body
        assert three.runs == 1

    check(scenario, COPY_S=0.2)


def test_a_new_actor_learns_runs_and_answers_from_the_routers_and_decides_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claim_client, "PIECE", 2)

    async def scenario(three: Three) -> None:
        keys = [{"Idempotency-Key": f"{number}"} for number in range(5)]
        answers = [await three.post("a", headers=headers) for headers in keys]
        task, _ = await three.begun("b")
        three.claims.restart()
        early = three.posting("c", headers=keys[0])
        await turns(50)
        assert not early.done()
        await three.beat()
        repeats = [await early, *[await three.post("c", headers=headers) for headers in keys[1:]]]
        assert [reply.body for reply in repeats] == [reply.body for reply in answers]
        joined, _ = await three.begun("c")
        assert three.runs == 6
        await asyncio.gather(cancel(task), cancel(joined))

    check(scenario)


def test_a_claim_whose_reply_got_lost_is_the_same_claim_when_it_is_asked_for_again() -> None:
    async def scenario(three: Three) -> None:
        lost = iter([True, True, False])
        three.claims.losing = lambda method: method == "claim" and next(lost, False)
        assert (await three.post("a")).text == expected_text("p", TOKENS)
        assert three.claims.calls.count("claim") == 3
        assert three.runs == 1

    check(scenario)


def test_a_client_that_leaves_before_its_claim_is_answered_leaves_no_claim() -> None:
    async def scenario(three: Three) -> None:
        three.claims.losing = lambda method: method == "claim"
        task = three.posting("a")
        await until(lambda: "claim" in three.claims.calls, SOON_S, "the actor has granted it")
        task.cancel()
        await asyncio.wait({task})
        three.claims.losing = lambda method: False
        assert (await three.post("b", tokens=3)).error["code"] == "idempotency_key_reused"  # nobody has noticed yet
        await three.beat("a")
        await three.beat("a")
        assert (await three.post("b", tokens=3)).text == expected_text("p", 3)

    check(scenario)


def beats_of(three: Three) -> int:
    """Reports of "a", which alone beats, until now."""
    return three.claims.calls.count("report")


@contextlib.asynccontextmanager
async def beating(three: Three) -> AsyncIterator[None]:
    """The router "a" reports by itself, some hundred times a second."""
    await three.claims.routers["a"].claims.start()
    try:
        await until(lambda: beats_of(three) > EMPTY_BEATS, SOON_S, "the actor knows that nothing runs")
        yield
    finally:
        (beats,) = [task for task in asyncio.all_tasks() if task.get_name() == "claims"]
        beats.cancel()
        await asyncio.wait({beats})


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_client, "CLAIM_HEARTBEAT_S", 0.005)
    monkeypatch.setattr(claim_client, "IDLE_BEATS", 10**9)


@pytest.mark.usefixtures("fast_beats")
def test_a_router_without_keyed_requests_is_silent_until_one_comes_and_until_the_actor_is_another() -> None:
    async def scenario(three: Three) -> None:
        async with beating(three):
            await until(lambda: three.claims.routers["a"].claims.is_idle, SOON_S, "all is reported")
            silent = beats_of(three)
            await asyncio.sleep(LATER_S)  # of many beats
            assert beats_of(three) == silent
            task, _ = await three.begun("a")
            await until(lambda: beats_of(three) > silent + EMPTY_BEATS, SOON_S, "a run is reported at every beat")
            await cancel(task)
            await until(lambda: three.claims.routers["a"].claims.is_idle, SOON_S, "its end is reported")
            silent = beats_of(three)
            three.claims.restart()
            await until(lambda: beats_of(three) > silent, SOON_S, "the new actor hears of this router")

    check(scenario)


@pytest.mark.usefixtures("fast_beats")
def test_a_claim_that_came_and_went_between_two_beats_is_ended_by_the_next_ones() -> None:
    async def scenario(three: Three) -> None:
        async with beating(three):
            await until(lambda: three.claims.routers["a"].claims.is_idle, SOON_S, "all is reported")
            three.claims.losing = lambda method: method == "claim"
            task = three.posting("a")
            await until(lambda: "claim" in three.claims.calls, SOON_S, "the actor has granted it")
            task.cancel()
            await asyncio.wait({task})
            three.claims.losing = lambda method: False
            await until(lambda: not three.claims.book.running, SOON_S, "it is no longer claimed")

    check(scenario)
