"""Every request with a key leaves one receipt, whatever becomes of it, and estimates learn from what it has used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.core.estimate import EstimateSource, RequestCost
from serve_app.core.estimate.estimate import MIN_SEEN
from serve_app.core.queue import RefusalReason, WaitReason
from serve_app.core.receipts import Receipt
from serve_app.core.routing import Route
from serve_app.http import python_calls
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.types import Outcome, RequestClass
from tests.fakes.asgi_client import BATCH_KEY, CHAT, KEY, Client, Reply, ask, running, started
from tests.fakes.engines import FakeCluster, model, run, turns, until
from tests.fakes.router import LONG, SOON_S

HIGH = RequestClass.HIGH
NORMAL = RequestClass.NORMAL
LOW = RequestClass.LOW


def receipts(client: Client) -> list[Receipt]:
    """The oldest first."""
    return list(client.edge.parts.receipts.kept.values())


def check(scenario: Callable[[Client, FakeCluster], Awaitable[None]], slots: int = 4, **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", **settings), cluster)

    run(with_client, model(slots=slots))


async def leave(task: asyncio.Task[Reply]) -> None:
    task.cancel()
    await asyncio.wait({task})


def test_a_finished_request_tells_its_place_its_times_and_its_tokens() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask("one two three", 7, priority="high"), headers={"X-Request-Id": "trace-17"})
        (found,) = receipts(client)
        assert found.request_id == reply.headers["x-serve-app-request-id"]
        assert (found.client_id, found.tenant, found.request_class) == ("trace-17", "people", HIGH)
        assert (found.outcome, found.granted, found.trace.replica_id, found.trace.losses) == (Outcome.OK, True, "r1", 0)
        assert found.trace.route is Route.HOME
        assert (found.prompt_tokens, found.output_tokens) == (3, 7)
        assert found.trace.measure.cost == RequestCost(4, 7, EstimateSource.PRIOR, 7)
        assert found.first_token_s is not None
        assert 0 <= found.wait_s <= found.first_token_s <= found.total_s
        assert (found.refused, found.trace.ahead) == (None, ())
        estimated = client.figures("serve_app_estimated_tokens_total", "part")
        used = client.figures("serve_app_used_tokens_total", "part")
        assert (estimated, used) == ({("prompt",): 4, ("output",): 7}, {("prompt",): 3, ("output",): 7})
        assert client.figures("serve_app_granted_tokens_total", "model", "priority") == {(found.model, "high"): 11}

    check(scenario)


def test_a_refused_request_tells_why_who_was_ahead_and_what_it_was_answered() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4, prompt_logprobs=1)  # so that it cannot be stopped for the other one
        waits = client.posting(ask("waits", priority="high"))
        await turns(20)
        reply = await client.post(ask("no"), headers={"X-Deadline-Ms": "20"})
        await leave(waits)
        await leave(task)
        refused, left, ran = receipts(client)
        assert refused.request_id == reply.headers["x-serve-app-request-id"]
        assert (refused.outcome, refused.refused) == (Outcome.REFUSED, RefusalReason.DEADLINE)
        assert (refused.granted, refused.trace.replica_id, refused.deadline_s) == (False, None, 0.02)
        assert refused.trace.ahead == ((HIGH, 1),)
        assert refused.retry_after_s is not None
        assert (left.outcome, left.granted, left.trace.ahead) == (Outcome.CANCELLED_QUEUED, False, ())
        assert (ran.outcome, ran.granted) == (Outcome.CANCELLED_RUNNING, True)

    check(scenario)


def test_a_request_that_waited_tells_what_for_in_its_receipt_and_in_the_metrics() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4)
        waits = client.posting(ask("waits"))
        await turns(20)
        await leave(task)
        assert (await waits).status == 200
        _, waited = receipts(client)
        assert waited.trace.waited_for is WaitReason.SLOTS
        seconds = client.figures("serve_app_waited_seconds_total", "priority", "reason")
        assert set(seconds) == {("normal", "slots")}
        assert 0 < seconds["normal", "slots"] <= waited.wait_s
        shown = json.loads((await client.get(f"/admin/requests/{waited.request_id}")).body)
        assert shown["waits"] == {"slots": pytest.approx(seconds["normal", "slots"], abs=1e-5)}
        assert shown["story"][-1].startswith("First token: ")

    check(scenario)


def test_a_client_that_leaves_while_it_is_answered_leaves_what_was_made_so_far() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        await leave(task)
        (found,) = receipts(client)
        assert (found.outcome, found.trace.replica_id) == (Outcome.CANCELLED_RUNNING, "r1")
        assert found.prompt_tokens == 1
        assert found.output_tokens is not None
        assert 0 < found.output_tokens < LONG

    check(scenario)


def test_a_lost_engine_is_reported_with_the_replica_and_the_reason() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        client.model.replica_set.info = None  # no engine is known that could go on
        cluster.kill("r1")
        await task
        (found,) = receipts(client)
        assert (found.outcome, found.refused, found.trace.replica_id) == (Outcome.ENGINE_FAILED, None, "r1")

    check(scenario)


def test_a_request_that_continues_elsewhere_tells_where_and_how_many_were_lost() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        cluster["r1"].freeze()
        task = client.posting(ask("p"))
        await until(lambda: cluster["r1"].work == 1, SOON_S, "handed in")
        await cluster.add("r2")
        cluster.kill("r1")
        assert (await task).status == 200
        (found,) = receipts(client)
        assert (found.outcome, found.trace.replica_id, found.trace.losses) == (Outcome.OK, "r2", 1)

    check(scenario)


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        (b"{", Outcome.BAD_REQUEST, None),
        (json.dumps(ask("p", model="no")).encode(), Outcome.BAD_REQUEST, None),
        (json.dumps(ask("p", priority="critical")).encode(), Outcome.BAD_REQUEST, None),
        (json.dumps(ask("", stream=False)).encode(), Outcome.BAD_REQUEST, None),
        (json.dumps(ask("p", n=8)).encode(), Outcome.BAD_REQUEST, RefusalReason.TOO_LARGE),
    ],
)
def test_a_wrong_request_has_a_receipt_under_the_id_it_was_answered_with(
    body: bytes, outcome: Outcome, reason: RefusalReason | None
) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.request("POST", "/v1/completions", body)
        (found,) = receipts(client)
        assert found.request_id == reply.headers["x-serve-app-request-id"]
        assert (found.outcome, found.refused, found.tenant) == (outcome, reason, "people")

    check(scenario)


def test_a_key_reads_the_receipts_of_its_own_tenant_and_no_other_s() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for key in (KEY, BATCH_KEY):
            reply = await client.post(ask("p"), key=key, headers={"X-Request-Id": "same"})
            for name in (reply.headers["x-serve-app-request-id"], "same"):
                found = json.loads((await client.get(f"/admin/requests/{name}", key=key)).body)
                assert found["request_id"] == reply.headers["x-serve-app-request-id"]
            other = BATCH_KEY if key == KEY else KEY
            refused = await client.get(f"/admin/requests/{reply.headers['x-serve-app-request-id']}", key=other)
            assert (refused.status, refused.error["code"]) == (404, "request_not_found")

    check(scenario)


def test_an_answer_that_is_not_streamed_tells_its_wait_and_its_first_token_and_a_repeat_of_it_does_not() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4)
        waits = client.posting(ask("p", 7, stream=False), headers={"Idempotency-Key": "k"})
        await asyncio.sleep(0.05)  # its wait, to be told
        await leave(task)
        reported = (await waits).headers
        wait_ms, first_ms = (int(reported[f"x-serve-app-{name}-ms"]) for name in ("wait", "first-token"))
        assert 40 <= wait_ms <= first_ms
        found = receipts(client)[-1]
        assert found.first_token_s is not None
        assert [wait_ms, first_ms] == [round(1000 * found.wait_s), round(1000 * found.first_token_s)]
        again = await client.post(ask("p", 7, stream=False), headers={"Idempotency-Key": "k"})
        assert again.headers["x-idempotent-replay"] == "true"
        assert not [name for name in again.headers if name.endswith("-ms")]
        streamed = await client.post(ask("p"))
        assert not [name for name in streamed.headers if name.endswith("-ms")]

    check(scenario)


def test_who_has_no_key_leaves_nothing() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask("p"), key="sk-nobody-0123456789")).status == 401
        assert receipts(client) == []

    check(scenario)


def test_a_repeat_of_a_kept_answer_has_a_receipt_of_its_own_that_ran_nowhere() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for _ in range(2):
            assert (await client.post(ask("p"), headers={"Idempotency-Key": "k"})).status == 200
        first, again = receipts(client)
        assert (first.granted, again.granted, again.trace.replica_id) == (True, False, None)
        assert again.outcome is Outcome.OK

    check(scenario)


def test_tokenizing_and_embedding_leave_receipts_and_teach_nothing() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        body = {"model": ask("")["model"], "prompt": "a b c"}
        reply = await client.post(body, path="/tokenize")
        assert reply.status == 200
        (found,) = receipts(client)
        assert (found.outcome, found.trace.replica_id) == (Outcome.OK, "r1")
        assert not client.edge.estimator.tenants

    check(scenario)


def test_answers_that_end_by_themselves_teach_and_cut_ones_are_lower_bounds() -> None:
    """The simulated engine answers up to the bound, unless a stop string ends it."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for _ in range(MIN_SEEN):  # each is cut at its bound: nothing is known but that
            await client.post(ask("word " * 10, 5))
        await client.post(ask("word " * 10, 900, stop=["a"]))
        cost = receipts(client)[-1].trace.measure.cost
        assert (cost.source, cost.output_tokens) == (EstimateSource.PRIOR, 900)
        assert cost.prompt_tokens in (10, 11)  # as learned; by four bytes a token it were 13
        for _ in range(4 * MIN_SEEN):
            await client.post(ask("word " * 10, 900, stop=["a"]))
        cost = receipts(client)[-1].trace.measure.cost
        assert cost.source is EstimateSource.TENANT
        assert cost.output_tokens <= 10

    check(scenario)


def test_another_quantile_holds_from_the_next_request_on() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        edge = client.edge
        admission = edge.settings.admission.model_copy(update={"output_quantile": 0.3})
        edge.configure(edge.settings.model_copy(update={"admission": admission}))
        assert edge.estimator.quantile == 0.3

    check(scenario)


def test_a_call_by_handle_leaves_one_like_any_other() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        call = {"prompt": "one two", "model": ask("")["model"], "max_tokens": 3, "api_key": BATCH_KEY}
        answer = await AsgiBridge(client.edge).answer(python_calls.make_request(python_calls.CallKind.COMPLETE, call))
        (found,) = receipts(client)
        assert (found.request_id, found.tenant, found.output_tokens) == (answer["id"], "batch", 3)

    check(scenario)


def test_a_class_and_a_tenant_are_those_of_the_key() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        body = {"model": ask("")["model"], "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert (await client.post(body, path=CHAT, key=BATCH_KEY)).status == 200
        (found,) = receipts(client)
        assert (found.tenant, found.request_class) == ("batch", LOW)

    check(scenario)
