"""Requests with an Idempotency-Key on three routers: one run, whichever router the repeats reach."""

from __future__ import annotations

import asyncio
import random

import pytest

from serve_app.http.keyed import answers
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, Reply, cancel, running
from tests.fakes.router import SOON_S, expected_text
from tests.fakes.three_routers import KEYED, LATER_S, REPLAY, TOKENS, Three, check
from tests.fakes.until import turns, until


async def came(reply: Reply, messages: int) -> None:
    """So many messages of an answer, or its end."""
    await until(lambda: len(reply.chunks) >= messages or reply.ended, SOON_S, f"{messages} messages")


@pytest.mark.parametrize("stream", [True, False])
def test_repeats_at_all_routers_join_one_run_and_later_ones_get_its_answer(stream: bool) -> None:
    async def scenario(three: Three) -> None:
        first = three.posting("a", tokens=200, stream=stream)
        await until(lambda: three.runs == 1, SOON_S, "it runs")
        others = [three.posting(router, tokens=200, stream=stream) for router in "abc"]
        replies = await asyncio.gather(first, *others)
        replies += [await three.post(router, tokens=200, stream=stream) for router in "abc"]
        assert {reply.body for reply in replies} == {replies[0].body}
        assert replies[0].text == expected_text("p", 200)
        assert {reply.status for reply in replies} == {200}
        assert [reply.headers.get(REPLAY) for reply in replies] == [None] + 6 * ["true"]
        assert {reply.headers["content-type"] for reply in replies} == {replies[0].headers["content-type"]}
        assert len({reply.headers["x-serve-app-request-id"] for reply in replies}) == 7
        assert three.runs == 1
        assert three.results() == {"run": 1, "joined": 3, "replayed": 3}

    check(scenario)


@pytest.mark.parametrize("routers", ["a", "ab", "abc"])
def test_eight_requests_at_once_under_one_key_are_one_run_however_late_the_replies_to_their_claims(
    routers: str,
) -> None:
    """Of each group the first claim's reply is on its way for longer than those of the others."""
    draw = random.Random(37)

    async def group(three: Three, number: int) -> None:
        delays = iter([draw.randrange(20, 200)])
        three.claims.delay = lambda method: next(delays, draw.randrange(1, 20)) if method == "claim" else 1
        headers = {"Idempotency-Key": f"group-{number}"}
        before = three.runs
        replies = await asyncio.gather(*(three.post(draw.choice(routers), headers=headers) for _ in range(8)))
        assert [reply.status for reply in replies] == 8 * [200]
        assert len({reply.body for reply in replies}) == 1
        assert [reply.headers.get(REPLAY) for reply in replies].count(None) == 1
        assert three.runs == before + 1

    async def scenario(three: Three) -> None:
        for number in range(30):
            await group(three, number)

    check(scenario)


def test_who_joins_a_claim_whose_client_leaves_before_its_reply_runs_the_request() -> None:
    async def scenario(three: Three) -> None:
        delays = iter([10**6])  # turns; the client leaves long before
        three.claims.delay = lambda method: next(delays, 1) if method == "claim" else 1
        first = three.posting("a")
        await until(lambda: "claim" in three.claims.calls, SOON_S, "the actor has granted it")
        others = [three.posting(router) for router in "aab"]
        await turns(50)
        assert three.runs == 0
        await cancel(first)
        assert {reply.text for reply in await asyncio.gather(*others)} == {expected_text("p", TOKENS)}
        assert three.runs == 1

    check(scenario)


def test_another_body_is_the_same_refusal_at_every_router_whether_the_first_one_runs_or_has_run() -> None:
    async def scenario(three: Three) -> None:
        first, _ = await three.begun("a")
        running = [await three.post(router, tokens=3) for router in "abc"]
        await cancel(first)
        await three.post("b", headers={"Idempotency-Key": "two"})
        ended = [await three.post(router, tokens=3, headers={"Idempotency-Key": "two"}) for router in "abc"]
        assert {(reply.status, reply.error["code"]) for reply in running + ended} == {(400, "idempotency_key_reused")}
        assert {reply.body for reply in running + ended} == {running[0].body}

    check(scenario)


def test_a_tenant_learns_nothing_of_another_tenant_s_keys() -> None:
    async def scenario(three: Three) -> None:
        await three.post("a")
        for router in "abc":
            headers = {"Idempotency-Key": f"one{router}"}
            fresh = await three.post(router, key=BATCH_KEY, headers=headers, tokens=3)
            same = await three.post(router, key=BATCH_KEY, tokens=3)  # the other tenant's key, with another body
            assert (fresh.status, same.status) == (200, 200)
            if router == "a":
                assert fresh.headers.keys() == same.headers.keys(), "its own first request"

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("elsewhere", ["a", "b"])
def test_a_client_cut_at_any_point_gets_the_whole_answer_of_its_run_with_a_repeat(stream: bool, elsewhere: str) -> None:
    """It is cut once its answer has begun with so many messages, or once its run is as far."""

    async def scenario(three: Three) -> None:
        for messages in range(TOKENS + 2):
            reply = Reply()
            headers = {"Idempotency-Key": f"cut {messages}".replace(" ", "-")}
            task = three.posting("a", reply, stream=stream, headers=headers)
            await turns(10 * messages + 1)
            if stream:
                await came(reply, messages)
            before = reply.body
            task.cancel()
            await asyncio.wait({task})
            again = await three.post(elsewhere, stream=stream, headers=headers)
            assert again.text == expected_text("p", TOKENS)
            if stream and before:
                assert again.body.startswith(before)
            assert three.runs == messages + 1

    check(scenario, RUN_GRACE_S=30.0)


def test_a_run_that_nobody_reads_is_aborted_after_its_grace_and_not_before() -> None:
    async def scenario(three: Three) -> None:
        task, _ = await three.begun("a")
        await cancel(task)
        await turns(50)
        assert three.cluster["r1"].work == 1
        joined, reply = await three.begun("b")
        await asyncio.sleep(LATER_S)  # above the grace: a repeat at another router keeps it running
        assert not joined.done()
        assert three.cluster["r1"].work == 1
        await cancel(joined)
        await until(lambda: three.cluster["r1"].work == 0, SOON_S, "aborted")
        assert three["a"].outcomes == {Outcome.CANCELLED_RUNNING: 1}
        assert three["b"].outcomes == {Outcome.CANCELLED_QUEUED: 1}
        assert three.runs == 1
        assert (await three.post("c")).text == expected_text("p", TOKENS) or reply.chunks  # the key can be used again

    check(scenario)


def test_a_repeat_that_asks_for_the_replay_only_runs_nothing() -> None:
    async def scenario(three: Three) -> None:
        only = {"X-Replay-Only": "1"}
        refused = await three.post("a", headers=KEYED | only)
        assert (refused.status, refused.error["code"]) == (502, "run_lost")
        assert three.runs == 0
        first = await three.post("b")
        assert (await three.post("c", headers=KEYED | only)).body == first.body
        assert three.runs == 1

    check(scenario)


def test_a_client_may_ask_for_an_earlier_abort() -> None:
    async def scenario(three: Three) -> None:
        task, _ = await three.begun("a", headers=KEYED | {"X-Disconnect-Grace-Ms": "0"})
        await cancel(task)
        await until(lambda: three.cluster["r1"].work == 0, SOON_S, "aborted")

    check(scenario, RUN_GRACE_S=30.0)


def test_the_answer_is_on_a_second_router_and_at_the_actor_before_its_last_byte_goes_out() -> None:
    async def scenario(three: Three) -> None:
        seen = []

        async def look(reply: Reply) -> None:
            if reply.ended:
                seen.append({name for name, one in three.claims.routers.items() if one.store.runs()})
                kept = [claim for tenant in three.claims.book.tenants.values() for claim, _ in tenant.expiring.values()]
                seen.extend(set(claim.routers) for claim in kept)

        for stream in (True, False):
            seen.clear()
            await three.post("a", stream=stream, reading=look, headers={"Idempotency-Key": f"{stream}"})
            assert len(seen[0]) == 2
            assert seen[0] >= {"a"}
            assert seen[-1] == seen[0]
            for router in three.claims.routers.values():
                for log in list(router.store.logs.values()):
                    router.store.forget(log)

    check(scenario)


def test_an_answer_too_long_to_keep_goes_to_its_client_and_its_repeats_are_refused_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 100)

    async def scenario(three: Three) -> None:
        assert (await three.post("a", tokens=30)).text == expected_text("p", 30)
        for router in "abc":
            reply = await three.post(router, tokens=30)
            assert (reply.status, reply.error["code"]) == (409, "idempotency_answer_not_kept")
        assert three.runs == 1

    check(scenario)


def test_an_answer_that_its_routers_have_evicted_runs_again() -> None:
    async def scenario(three: Three) -> None:
        await three.post("a")
        for router in three.claims.routers.values():
            for log in list(router.store.logs.values()):
                router.store.forget(log)
        again = await three.post("b")
        assert again.text == expected_text("p", TOKENS)
        assert REPLAY not in again.headers
        assert three.results() == {"run": 2}

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_no_answer_and_the_repeat_runs(stream: bool) -> None:
    async def scenario(three: Three) -> None:
        blocker, _ = await running(three["c"], n=4)  # all the slots there are
        refused = await three.post("a", headers=KEYED | {"X-Deadline-Ms": "50"}, stream=stream)
        assert (refused.status, refused.error["code"]) == (429, "deadline")
        await cancel(blocker)
        again = await three.post("b", stream=stream)
        assert again.text == expected_text("p", TOKENS)
        assert REPLAY not in again.headers

    check(scenario)
