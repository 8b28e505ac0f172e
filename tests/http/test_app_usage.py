"""Which requests count, and with what: the router's app on simulated engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from serve_app.core.usage import USAGE_COUNTS, UsageBatch, UsageRow
from serve_app.errors import BadRequest, Forbidden
from serve_app.http.api.usage_report import usage_report
from serve_app.router import UsageReporter
from serve_app.store import UsageQuery
from serve_app.types import Identity, Outcome, RequestClass
from tests.fakes.asgi_client import CHAT, Client, Reply, ask, cancel, router_app, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S

WITH_USAGE = {"stream_options": {"include_usage": True}}


def used(client: Client) -> UsageRow:
    """The sum of all that the router would report, and has reported to nobody."""
    batch = client.usage_meter.next_batch()
    if batch is None:
        return UsageRow()
    client.usage_meter.acknowledge(batch.seq)
    assert len(batch.rows) <= 1
    return batch.rows[0] if batch.rows else UsageRow()


def usage_of(reply: Reply) -> tuple[int, int]:
    """Prompt and output tokens by the answer's own `usage`."""
    events = reply.events if reply.headers["content-type"].startswith("text/event-stream") else [json.loads(reply.body)]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return usage["prompt_tokens"], usage["completion_tokens"]


def tokens(row: UsageRow) -> tuple[int, int, int]:
    return row.requests, row.prompt_tokens, row.output_tokens


def test_requests_count_with_the_usage_of_their_own_answers() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        message = {"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}
        replies = [
            await client.post(ask("a b c", 5, **WITH_USAGE)),
            await client.post(ask("a b", 7, stream=False)),
            await client.post(message, CHAT),
        ]
        row = used(client)
        found = [usage_of(reply) for reply in replies]
        assert tokens(row) == (3, sum(prompt for prompt, _ in found), sum(output for _, output in found))
        assert (row.tenant, row.model) == ("people", MODEL)
        assert row.kv_token_ms > 0

    run(scenario)


def test_a_list_of_prompts_counts_once_with_the_sums() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for streamed in (True, False):
            more: dict[str, Any] = WITH_USAGE if streamed else {}
            reply = await client.post(ask(["a b c", "d e", "f"], 5, stream=streamed, **more))
            assert tokens(used(client)) == (1, *usage_of(reply)) == (1, 6, 15)

    run(scenario)


def test_refused_requests_and_work_without_a_slot_do_not_count() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 0})
        assert (await client.post(ask("x", max_tokens=-1))).status == 400
        assert (await client.post({"model": MODEL, "prompt": "a b"}, "/tokenize")).status == 200
        task, _ = await running(client)
        others = [client.posting(ask("x", 1)) for _ in range(8)]
        refused = [reply for reply in await asyncio.gather(*others) if reply.status == 429]
        assert refused
        await cancel(task)
        assert used(client).requests == 1 + len(others) - len(refused)
        assert client.usage_meter.next_batch() is None

    run(scenario)


def test_ended_requests_whose_use_the_store_lacks_are_a_metric() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for count in (1, 2):
            await client.post(ask("a b", 3))
            assert (
                f'serve_app_usage_pending{{router="router"}} {count}.0' in (await client.get("/metrics")).body.decode()
            )
        batch = client.usage_meter.next_batch()
        assert batch is not None
        client.usage_meter.acknowledge(batch.seq)
        assert 'serve_app_usage_pending{router="router"} 0.0' in (await client.get("/metrics")).body.decode()

    run(scenario)


def test_replays_of_a_kept_answer_do_not_count() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        for _ in range(3):
            reply = await client.post(ask("a b", 3), headers={"idempotency-key": "once"})
        assert reply.headers["x-idempotent-replay"] == "true"
        assert tokens(used(client)) == (1, 2, 3)

    run(scenario)


def test_a_cut_answer_counts_with_what_was_generated() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        task, reply = await running(client)
        batch = client.usage_meter.next_batch()
        assert batch is not None
        assert [entry.count for entry in batch.in_flight] == [1]
        client.usage_meter.acknowledge(batch.seq)
        await cancel(task)
        row = used(client)
        sent = len([event for event in reply.events if event.get("choices") and event["choices"][0]["text"]])
        assert (row.requests, row.prompt_tokens) == (1, 1)
        assert sent <= row.output_tokens < LONG

    run(scenario)


def test_an_answer_that_its_client_left_before_its_only_frame_is_unsettled() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        task = client.posting(ask("a", LONG, stream=False))
        await until(lambda: client.usage_meter.has_news, SOON_S, "the engine has it")
        await cancel(task)
        row = used(client)
        assert (row.requests, row.unsettled, row.output_tokens) == (0, 1, 0)
        assert client.usage_meter.next_batch() is None

    run(scenario)


def test_a_request_that_runs_again_after_the_loss_of_its_engine_counts_once() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", "r2")
        task = client.posting(ask("a b", 60, stream=False))
        await until(lambda: client.usage_meter.has_news, SOON_S, "an engine has it")
        name = next(name for name in ("r1", "r2") if client.model.queue.core.account(name)[0])
        cluster.kill(name)
        reply = await task
        assert reply.status == 200
        assert tokens(used(client)) == (1, *usage_of(reply))

    run(scenario, model(step_s=0.02))


def test_an_error_in_place_of_an_answer_does_not_count_and_a_broken_answer_does() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"no_replica_wait_s": 0.1})
        whole = client.posting(ask("a b", LONG, stream=False))
        task, _ = await running(client)
        cluster.kill("r1")
        assert (await whole).status >= 500
        await task
        row = used(client)
        assert (row.requests, row.unsettled, row.prompt_tokens) == (1, 0, 1)
        assert row.output_tokens > 0
        assert client.outcomes[Outcome.ENGINE_FAILED] >= 1

    run(scenario)


def test_the_cost_is_by_the_prices_at_the_beginning() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        await client.post(ask("a b c", 5))
        assert used(client).cost_micro == 3 * 2 + 5 * 10

    run(scenario, model(prices={"prompt_per_million": 2.0, "output_per_million": 10.0}))


def test_the_end_of_the_app_reports_what_is_left() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reported: list[UsageBatch] = []

        async def add_usage(batch: UsageBatch) -> None:
            reported.append(batch)

        usage = UsageReporter("router", add_usage)
        client.edge = router_app(client.edge.settings, client.edge.parts.models, client.metrics, usage=usage)
        await client.post(ask("a b", 3))
        sent: list[str] = []
        events = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> dict[str, Any]:
            return next(events)

        async def send(message: Any) -> None:
            sent.append(message["type"])
            assert len(reported) == len(sent) - 1

        await client.edge({"type": "lifespan"}, receive, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert tokens(reported[0].rows[0]) == (1, 2, 3)

    run(scenario)


def asked_by(identity: Identity, query: str, rows: list[UsageRow] | None = None) -> tuple[UsageQuery, dict[str, Any]]:
    asked = []

    async def get(query: UsageQuery) -> list[UsageRow]:
        asked.append(query)
        return rows or []

    answer = asyncio.run(usage_report(get, identity, query.encode()))
    return asked[0], answer


def identity_of(*, admin: bool) -> Identity:
    return Identity("acme", RequestClass.HIGH, RequestClass.NORMAL, admin=admin)


def test_a_tenant_s_key_reads_the_use_of_its_own_tenant_only() -> None:
    for query in ("", "tenant=acme", "by=tenant&from=2026-11-01&to=2026-11-30"):
        assert asked_by(identity_of(admin=False), query)[0].tenant == "acme"
    for query in ("tenant=other", "tenant=acme&tenant=other", "tenant="):
        with pytest.raises(Forbidden):
            asked_by(identity_of(admin=False), query)


def test_an_operator_reads_the_use_of_all_or_of_what_it_names() -> None:
    assert asked_by(identity_of(admin=True), "")[0] == UsageQuery(by=("day", "tenant", "key_id", "model"))
    query = "by=key,day&by=model,name&from=2026-11-01&to=2026-11-30&tenant=a%26b&key=k&name=chat&model=m/x"
    row = UsageRow("d", "k", "", "m/x", 2, 9, 4, 5, 6, 7, 8, 1, "chat")
    asked, answer = asked_by(identity_of(admin=True), query, [row])
    by = ("day", "key_id", "asked_model", "model")
    assert asked == UsageQuery(by, "2026-11-01", "2026-11-30", "a&b", "k", "m/x", "chat")
    counts = dict(zip(USAGE_COUNTS, (2, 9, 4, 5, 6, 7, 8, 1), strict=True))
    assert answer["data"] == [{"day": "d", "key": "k", "name": "chat", "model": "m/x", **counts}]
    assert (answer["by"], answer["from"], answer["to"]) == (["day", "key", "name", "model"], "2026-11-01", "2026-11-30")


@pytest.mark.parametrize(
    "query",
    [
        "by=digest",
        "from=25.11.2026",
        "to=2026-02-30",
        "day=2026-02-03",
        "from=",
        "tenant=%00",
        "key=a%00",
        "model=%00",
        "name=%00",
    ],
)
def test_what_it_does_not_know_is_refused_by_name(query: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked_by(identity_of(admin=True), query)
    assert refused.value.param == query.partition("=")[0]


def test_the_route_answers_by_the_store_and_says_that_it_is_away() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        reply = await client.request("GET", "/admin/usage", query="by=day")
        assert (reply.status, reply.error["code"]) == (503, "no_store")
        assert (await client.request("GET", "/admin/usage", query="by=week")).status == 400
        assert (await client.request("GET", "/admin/usage", key=None)).status == 401

    run(scenario)
