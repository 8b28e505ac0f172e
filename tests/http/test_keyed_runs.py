"""Requests with an Idempotency-Key on three routers: one run, whichever router the repeats reach and whoever dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.http import claim_client, idempotency, keyed_runs
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, Client, Reply, ask, cancel, running
from tests.fakes.claims import FakeClaims
from tests.fakes.engines import FakeCluster, run
from tests.fakes.router import LONG, SOON_S, said
from tests.fakes.until import turns, until

KEYED = {"Idempotency-Key": "one"}
TOKENS = 8
ANY = 500  # tokens of a run that outlives its router: half a second
LATER_S = 0.3  # well above the grace of these tests, 0.1 s
REPLAY = "x-idempotent-replay"


class Three:
    """Three routers on one engine replica, by their ids."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster, self.claims = cluster, FakeClaims()
        self.routers: dict[str, Client] = {}

    async def start(self) -> Three:
        await self.cluster.add("r1")
        for name in "abc":
            client = Client(self.cluster, name, 3, keyed_runs=self.claims.join(name))
            self.routers[name] = await client.start()
        return self

    def __getitem__(self, router: str) -> Client:
        return self.routers[router]

    def posting(self, router: str, reply: Reply | None = None, **more: Any) -> asyncio.Task[Reply]:
        """A keyed request."""
        asked = {"tokens": TOKENS, "headers": KEYED, "stream": True} | more
        headers, tokens, stream = asked.pop("headers"), asked.pop("tokens"), asked.pop("stream")
        return self[router].posting(ask("p", tokens, stream=stream), headers=headers, reply=reply, **asked)

    async def post(self, router: str, **more: Any) -> Reply:
        return await asyncio.wait_for(self.posting(router, **more), SOON_S)

    async def begun(self, router: str, **more: Any) -> tuple[asyncio.Task[Reply], Reply]:
        """A long keyed request whose client has got something."""
        reply = Reply()
        task = self.posting(router, reply, tokens=LONG, **more)
        await until(lambda: bool(reply.chunks), SOON_S, "first frames")
        return task, reply

    async def beat(self, *names: str) -> None:
        """These routers report."""
        for name in names or tuple("abc"):
            while not await self.claims.routers[name].claims._report(is_beat=True):
                pass

    def results(self) -> dict[str, float]:
        """What became of keyed requests, over all routers."""
        told: dict[str, float] = {}
        for client in self.routers.values():
            for (result,), count in client.figures("serve_app_idempotent_requests_total", "result").items():
                told[result] = told.get(result, 0.0) + count
        return told

    @property
    def runs(self) -> int:
        """How often an engine was asked."""
        return len(self.cluster.submits)


def check(scenario: Callable[[Three], Awaitable[None]], **waits: float) -> None:
    async def whole(cluster: FakeCluster) -> None:
        await scenario(await Three(cluster).start())

    places = {"GRACE_S": keyed_runs, "COPY_S": keyed_runs, "JOIN_S": keyed_runs, "CLAIM_WAIT_S": claim_client}
    run(whole, waits={(places[name], name): seconds for name, seconds in waits.items()})


async def came(reply: Reply, messages: int) -> None:
    """So many messages of an answer, or its end."""
    await until(lambda: len(reply.chunks) >= messages or reply.ended, SOON_S, f"{messages} messages")


def receipt_of(client: Client, reply: Reply) -> Any:
    found = client.edge.receipts.find(reply.headers["x-serve-app-request-id"], None)
    assert found is not None
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_repeats_at_all_routers_join_one_run_and_later_ones_get_its_answer(stream: bool) -> None:
    async def scenario(there: Three) -> None:
        first = there.posting("a", tokens=200, stream=stream)
        await until(lambda: there.runs == 1, SOON_S, "it runs")
        others = [there.posting(router, tokens=200, stream=stream) for router in "abc"]
        replies = await asyncio.gather(first, *others)
        replies += [await there.post(router, tokens=200, stream=stream) for router in "abc"]
        assert {reply.body for reply in replies} == {replies[0].body}
        assert replies[0].text == said("p", 200)
        assert {reply.status for reply in replies} == {200}
        assert [reply.headers.get(REPLAY) for reply in replies] == [None] + 6 * ["true"]
        assert {reply.headers["content-type"] for reply in replies} == {replies[0].headers["content-type"]}
        assert len({reply.headers["x-serve-app-request-id"] for reply in replies}) == 7
        assert there.runs == 1
        assert there.results() == {"run": 1, "joined": 3, "replayed": 3}

    check(scenario)


def test_another_body_is_the_same_refusal_at_every_router_whether_the_first_one_runs_or_has_run() -> None:
    async def scenario(there: Three) -> None:
        first, _ = await there.begun("a")
        running = [await there.post(router, tokens=3) for router in "abc"]
        await cancel(first)
        await there.post("b", headers={"Idempotency-Key": "two"})
        ended = [await there.post(router, tokens=3, headers={"Idempotency-Key": "two"}) for router in "abc"]
        assert {(reply.status, reply.error["code"]) for reply in running + ended} == {(400, "idempotency_key_reused")}
        assert {reply.body for reply in running + ended} == {running[0].body}

    check(scenario)


def test_a_tenant_learns_nothing_of_another_tenant_s_keys() -> None:
    async def scenario(there: Three) -> None:
        await there.post("a")
        for router in "abc":
            headers = {"Idempotency-Key": f"one{router}"}
            fresh = await there.post(router, key=BATCH_KEY, headers=headers, tokens=3)
            same = await there.post(router, key=BATCH_KEY, tokens=3)  # the other tenant's key, with another body
            assert (fresh.status, same.status) == (200, 200)
            if router == "a":
                assert fresh.headers.keys() == same.headers.keys(), "its own first request"

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("elsewhere", ["a", "b"])
def test_a_client_cut_at_any_point_gets_the_whole_answer_of_its_run_with_a_repeat(stream: bool, elsewhere: str) -> None:
    """It is cut once its answer has begun with so many messages, or once its run is as far."""

    async def scenario(there: Three) -> None:
        for messages in range(TOKENS + 2):
            reply, headers = Reply(), {"Idempotency-Key": f"cut {messages}".replace(" ", "-")}
            task = there.posting("a", reply, stream=stream, headers=headers)
            await turns(10 * messages + 1)
            if stream:
                await came(reply, messages)
            before = reply.body
            task.cancel()
            await asyncio.wait({task})
            again = await there.post(elsewhere, stream=stream, headers=headers)
            assert again.text == said("p", TOKENS)
            if stream and before:
                assert again.body.startswith(before)
            assert there.runs == messages + 1

    check(scenario, GRACE_S=30.0)


def test_a_run_that_nobody_reads_is_aborted_after_its_grace_and_not_before() -> None:
    async def scenario(there: Three) -> None:
        task, _ = await there.begun("a")
        await cancel(task)
        await turns(50)
        assert there.cluster["r1"].work == 1
        joined, reply = await there.begun("b")
        await asyncio.sleep(LATER_S)  # above the grace: a repeat at another router keeps it running
        assert not joined.done()
        assert there.cluster["r1"].work == 1
        await cancel(joined)
        await until(lambda: there.cluster["r1"].work == 0, SOON_S, "aborted")
        assert there["a"].outcomes == {Outcome.CANCELLED_RUNNING: 1}
        assert there["b"].outcomes == {Outcome.CANCELLED_QUEUED: 1}
        assert there.runs == 1
        assert (await there.post("c")).text == said("p", TOKENS) or reply.chunks  # the key can be used again

    check(scenario)


def test_a_client_may_ask_for_an_earlier_abort() -> None:
    async def scenario(there: Three) -> None:
        task, _ = await there.begun("a", headers=KEYED | {"X-Disconnect-Grace-Ms": "0"})
        await cancel(task)
        await until(lambda: there.cluster["r1"].work == 0, SOON_S, "aborted")

    check(scenario, GRACE_S=30.0)


def test_the_answer_is_on_a_second_router_and_at_the_actor_before_its_last_byte_goes_out() -> None:
    async def scenario(there: Three) -> None:
        seen = []

        async def look(reply: Reply) -> None:
            if reply.ended:
                seen.append({name for name, one in there.claims.routers.items() if one.store.runs()})
                kept = [
                    claim for tenant in there.claims.book._tenants.values() for claim, _ in tenant.expiring.values()
                ]
                seen.extend(set(claim.routers) for claim in kept)

        for stream in (True, False):
            seen.clear()
            await there.post("a", stream=stream, reading=look, headers={"Idempotency-Key": f"{stream}"})
            assert len(seen[0]) == 2
            assert seen[0] >= {"a"}
            assert seen[-1] == seen[0]
            for one in there.claims.routers.values():
                for log in list(one.store.logs.values()):
                    one.store.forget(log)

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_outlives_the_router_that_ran_it(stream: bool) -> None:
    async def scenario(there: Three) -> None:
        first = await there.post("a", stream=stream)
        there.claims.kill("a")
        early = [await there.post(router, stream=stream) for router in "bc"]  # the actor does not know yet
        there.claims.bury("a")
        later = [await there.post(router, stream=stream) for router in "bc"]
        assert {reply.body for reply in early + later} == {first.body}
        assert there.runs == 1

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_whose_router_died_starts_anew_once_is_counted_and_its_receipt_says_so(stream: bool) -> None:
    async def scenario(there: Three) -> None:
        task = there.posting("a", tokens=ANY, stream=stream)
        await until(lambda: there.runs == 1, SOON_S, "it runs")
        there.claims.kill("a")
        await asyncio.wait({task})
        repeats = [there.posting(router, tokens=ANY, stream=stream) for router in "bcc"]
        await asyncio.sleep(LATER_S)  # for the actor to notice; the router is asked in vain meanwhile
        assert there.runs == 1
        there.claims.bury("a")
        await until(lambda: there.runs == 2, SOON_S, "it runs again")
        replies = await asyncio.wait_for(asyncio.gather(*repeats), 2 * SOON_S)
        assert {reply.text for reply in replies} == {said("p", ANY)}
        assert there.runs == 2
        assert there.results() == {"restarted": 1, "joined": 2}
        (own,) = (reply for reply in replies if REPLAY not in reply.headers)
        client = next(
            one for one in there.routers.values() if one.edge.receipts.find(own.headers["x-serve-app-request-id"], None)
        )
        found = receipt_of(client, own)
        assert found.router_losses == 1
        told = json.loads((await client.get(f"/admin/requests/{found.request_id}")).body)
        assert any("had died" in line for line in told["story"])

    check(scenario, JOIN_S=30.0)


def test_who_has_a_part_of_a_run_that_died_with_its_router_is_told_so_and_starts_no_other() -> None:
    async def scenario(there: Three) -> None:
        task, _ = await there.begun("a")
        joined, reply = await there.begun("b")
        there.claims.kill("a")
        there.claims.bury("a")
        await asyncio.wait({task})
        await asyncio.wait_for(joined, SOON_S)
        assert reply.events[-1]["error"]["code"] == "run_lost"
        assert there.runs == 1
        again, _ = await there.begun("b")
        assert there.runs == 2
        await cancel(again)

    check(scenario)


def test_a_second_router_that_does_not_answer_holds_the_last_byte_up_for_its_bound_only() -> None:
    async def scenario(there: Three) -> None:
        there.claims.dead |= {"b"}  # its death is not known
        hung = asyncio.Event()
        call = there.claims.call

        async def hanging(replica_id: str, method: str, *arguments: Any) -> Any:
            if replica_id == "c" and method == "keep_answer":
                await hung.wait()
            return await call(replica_id, method, *arguments)

        there.claims.call = hanging  # type: ignore[method-assign]
        assert (await there.post("a")).text == said("p", TOKENS)
        hung.set()
        await there.beat("a")
        assert (await there.post("c")).text == said("p", TOKENS)
        assert there.runs == 1

    check(scenario, COPY_S=0.2)


def test_an_actor_that_is_away_is_waited_for_and_nothing_runs_without_it() -> None:
    async def scenario(there: Three) -> None:
        there.claims.up = False
        waits = there.posting("a")
        await asyncio.sleep(LATER_S)
        assert not waits.done()
        assert there.runs == 0
        there.claims.up = True
        assert (await waits).text == said("p", TOKENS)
        there.claims.up = False
        refused = await there.post("b", headers={"Idempotency-Key": "two"})
        assert (refused.status, refused.error["code"]) == (503, "no_quota")
        assert int(refused.headers["retry-after"]) >= 1
        assert there.runs == 1

    check(scenario, CLAIM_WAIT_S=1.0)


def test_an_answer_that_ends_while_the_actor_is_away_is_reported_to_it_later() -> None:
    async def scenario(there: Three) -> None:
        task = there.posting("a", tokens=100)
        await until(lambda: there.runs == 1, SOON_S, "it runs")
        there.claims.up = False
        first = await task
        there.claims.up = True
        await there.beat()
        there.claims.kill("a")
        there.claims.bury("a")
        assert (await there.post("b", tokens=100)).body == first.body
        assert there.runs == 1

    check(scenario, COPY_S=0.2)


def test_a_new_actor_learns_runs_and_answers_from_the_routers_and_decides_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claim_client, "PIECE", 2)

    async def scenario(there: Three) -> None:
        keys = [{"Idempotency-Key": f"{number}"} for number in range(5)]
        answers = [await there.post("a", headers=headers) for headers in keys]
        task, _ = await there.begun("b")
        there.claims.restart()
        early = there.posting("c", headers=keys[0])
        await turns(50)
        assert not early.done()
        await there.beat()
        repeats = [await early, *[await there.post("c", headers=headers) for headers in keys[1:]]]
        assert [reply.body for reply in repeats] == [reply.body for reply in answers]
        joined, _ = await there.begun("c")
        assert there.runs == 6
        await asyncio.gather(cancel(task), cancel(joined))

    check(scenario)


def test_an_answer_too_long_to_keep_goes_to_its_client_and_its_repeats_are_refused_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ANSWER_BYTES", 100)

    async def scenario(there: Three) -> None:
        assert (await there.post("a", tokens=30)).text == said("p", 30)
        for router in "abc":
            reply = await there.post(router, tokens=30)
            assert (reply.status, reply.error["code"]) == (409, "idempotency_answer_not_kept")
        assert there.runs == 1

    check(scenario)


def test_an_answer_that_its_routers_have_evicted_runs_again() -> None:
    async def scenario(there: Three) -> None:
        await there.post("a")
        for one in there.claims.routers.values():
            for log in list(one.store.logs.values()):
                one.store.forget(log)
        again = await there.post("b")
        assert again.text == said("p", TOKENS)
        assert REPLAY not in again.headers
        assert there.results() == {"run": 2}

    check(scenario)


def test_a_claim_whose_reply_got_lost_is_the_same_claim_when_it_is_asked_for_again() -> None:
    async def scenario(there: Three) -> None:
        lost = iter([True, True, False])
        there.claims.losing = lambda method: method == "claim" and next(lost, False)
        assert (await there.post("a")).text == said("p", TOKENS)
        assert there.claims.calls.count("claim") == 3
        assert there.runs == 1

    check(scenario)


def test_a_client_that_leaves_before_its_claim_is_answered_leaves_no_claim() -> None:
    async def scenario(there: Three) -> None:
        there.claims.losing = lambda method: method == "claim"
        task = there.posting("a")
        await until(lambda: "claim" in there.claims.calls, SOON_S, "the actor has granted it")
        task.cancel()
        await asyncio.wait({task})
        there.claims.losing = lambda method: False
        assert (await there.post("b", tokens=3)).error["code"] == "idempotency_key_reused"  # nobody has noticed yet
        await there.beat("a")
        await there.beat("a")
        assert (await there.post("b", tokens=3)).text == said("p", 3)

    check(scenario)


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_is_no_answer_and_the_repeat_runs(stream: bool) -> None:
    async def scenario(there: Three) -> None:
        blocker, _ = await running(there["c"], n=4)  # all the slots there are
        refused = await there.post("a", headers=KEYED | {"X-Deadline-Ms": "50"}, stream=stream)
        assert (refused.status, refused.error["code"]) == (429, "deadline")
        await cancel(blocker)
        again = await there.post("b", stream=stream)
        assert again.text == said("p", TOKENS)
        assert REPLAY not in again.headers

    check(scenario)
