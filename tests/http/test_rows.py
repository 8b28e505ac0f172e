"""Rows of batches: requests of a key that nobody sends, at class `low`, with limits and use of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.batches import ENDPOINTS
from serve_app.core.limits import LimitReason, Limits
from serve_app.errors import RateLimited
from serve_app.http.asgi_bridge import AsgiBridge
from serve_app.http.error_responses import Headers
from serve_app.http.keys import KeyRing, RowOwner
from serve_app.http.python_calls import HttpRequest
from serve_app.http.stored_keys import KeyTable
from serve_app.names import ONGOING
from serve_app.settings import AuthSettings, AutoscaleSettings, KeySettings
from serve_app.store import KeyRecord
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Operation, RequestClass
from tests.fakes.asgi_client import COMPLETIONS, Client, ask, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import LONG, SOON_S

OPS = "sk-ops-0123456789abc"
OFFICE = RowOwner("desk", "people")
TENANTS = {"people": {"limits": {"max_concurrent": 8}, "batch_limits": {"tokens_per_day": 1000}}}


async def answer_of(
    client: Client, body: dict[str, Any], owner: RowOwner = OFFICE, key: str = "batch_1-1", path: str = COMPLETIONS
) -> tuple[int, Headers, bytes]:
    headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
    sent = body | {"stream": False} if path == COMPLETIONS else body
    request = HttpRequest("POST", path, headers, json.dumps(sent).encode())
    pieces = [piece async for piece in AsgiBridge(client.edge).exchange(request, owner)]
    head = pieces[0]
    assert isinstance(head, tuple)
    return head[0], head[1], b"".join([head[2], *(piece for piece in pieces[1:] if isinstance(piece, bytes))])


def check(scenario: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", **settings))

    run(with_client)


def test_a_row_has_the_answer_of_the_same_request_and_the_class_low() -> None:
    async def scenario(client: Client) -> None:
        over = await client.post(ask("one two", 7, stream=False))
        status, _, body = await answer_of(client, ask("one two", 7))
        assert (status, json.loads(body)["choices"]) == (200, json.loads(over.body)["choices"])
        classes = client.figures("serve_app_requests_total", "tenant", "priority")
        assert classes == {("people", "normal"): 1, ("people", "low"): 1}

    check(scenario)


POOLED: dict[str, tuple[Operation, dict[str, Any], dict[str, Any]]] = {
    "/v2/embed": (Operation.EMBED, {"texts": ["a", "b"]}, {"id": "embd-1", "embeddings": {"float": [[1.0], [2.0]]}}),
    "/pooling": (Operation.POOLING, {"input": "a"}, {"id": "pool-1", "data": [{"index": 0, "data": [1.0, 2.0]}]}),
    "/classify": (Operation.CLASSIFY, {"input": "a"}, {"id": "classify-1", "data": [{"index": 0, "label": "good"}]}),
}


@pytest.mark.parametrize("path", sorted(POOLED))
def test_a_row_for_a_pooling_model_runs_once_as_class_low_and_has_the_engine_s_answer(path: str) -> None:
    operation, body, answer = POOLED[path]
    assert path in ENDPOINTS
    asked = list[Submit]()

    async def answers(submit: Submit) -> AsyncGenerator[Frame]:
        """In place of the simulated engine, which answers no such request."""
        asked.append(submit)
        yield Frame(submit.number, json.dumps(answer).encode(), 200, "json", events=1, usage=TokenUsage(3))

    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        backend: Any = cluster["r1"].engine.backend
        backend.run = answers
        for _ in range(2):  # the second time as a worker that has lost the answer asks
            status, _, found = await answer_of(client, {"model": MODEL} | body, path=path)
            assert (status, json.loads(found)) == (200, answer)
        (submit,) = asked
        assert submit.operation is operation
        assert body.items() <= submit.body.items()
        assert set(client.figures("serve_app_requests_total", "tenant", "priority")) == {("people", "low")}
        (used,) = client.usage_meter.next_batch().rows  # type: ignore[union-attr]
        assert (used.key_id, used.prompt_tokens, used.output_tokens) == ("desk", 3, 0)

    run(scenario, model(task="embed"))


@pytest.mark.parametrize("tier", ["priority", "default", "auto"])
def test_a_row_is_low_whatever_its_body_asks_for(tier: str) -> None:
    async def scenario(client: Client) -> None:
        status, _, _ = await answer_of(client, ask("one", service_tier=tier))
        assert status == 200
        assert client.figures("serve_app_requests_total", "priority") == {("low",): 1}

    check(scenario)


@pytest.mark.parametrize("owner", [RowOwner("gone", "people"), RowOwner("desk", "others")])
def test_a_row_of_a_key_that_is_not_there_or_of_another_tenant_is_refused(owner: RowOwner) -> None:
    async def scenario(client: Client) -> None:
        status, _, body = await answer_of(client, ask("one"), owner)
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")

    check(scenario)


def test_a_row_is_charged_to_the_limits_of_batches_and_a_request_is_not() -> None:
    async def scenario(client: Client) -> None:
        await client.post(ask("one"))
        await answer_of(client, ask("one"))
        request, row = (list(dict(one.scopes)) for one in client.limits.asked)
        assert request == ["key:desk", "tenant:people"]
        assert row == ["batch:people"]

    check(scenario, limits={"requests_per_minute": 60}, admission={"tenants": TENANTS})


@pytest.mark.parametrize(("count_batch_rows", "load"), [(False, 1), (True, 2)])
def test_a_row_is_no_load_for_scaling_unless_the_model_s_settings_count_it(count_batch_rows: bool, load: int) -> None:
    async def counts(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        asked = [
            client.posting(ask("one", LONG, stream=False)),
            asyncio.create_task(answer_of(client, ask("two", LONG))),
        ]
        await until(lambda: cluster["r1"].work == 2, SOON_S, "both run")
        assert (await cluster["r1"].engine.record_autoscaling_stats())[ONGOING] == load
        assert (client.model.active[True], client.model.active[False]) == (load, 2 - load)
        for request in asked:
            request.cancel()
        await asyncio.wait(asked)

    run(counts, model(replicas=AutoscaleSettings(count_batch_rows=count_batch_rows)))


def test_a_row_is_charged_to_its_key_s_day_and_month_and_not_to_its_minute() -> None:
    async def scenario(client: Client) -> None:
        await client.post(ask("one"))
        await answer_of(client, ask("one"))
        request, row = (dict(one.scopes) for one in client.limits.asked)
        assert list(request) == ["key:desk", "allowance:desk", "tenant:people"]
        assert list(row) == ["allowance:desk", "batch:people"]
        assert row["allowance:desk"] == request["allowance:desk"] == Limits(tokens_per_day=100, budget_per_month=5)
        assert request["key:desk"] == Limits(requests_per_minute=60, max_concurrent=2)

    limits = {"requests_per_minute": 60, "max_concurrent": 2, "tokens_per_day": 100, "budget_per_month": 5}
    check(scenario, limits=limits, admission={"tenants": TENANTS})


def test_a_row_is_charged_to_its_key_s_limits_for_batches() -> None:
    async def scenario(client: Client) -> None:
        client.edge.keys.configured["desk"] = replace(
            client.edge.keys.configured["desk"], batch_limits=Limits(max_concurrent=3)
        )
        await client.post(ask("one"))
        await answer_of(client, ask("one"))
        (row,) = client.limits.asked
        assert row.scopes == (("rows:desk", Limits(max_concurrent=3)),)

    check(scenario)


def test_a_row_over_its_limit_learns_when_to_come_back() -> None:
    async def scenario(client: Client) -> None:
        client.limits.refusal = RateLimited("tokens per day", code=LimitReason.ALLOWANCE, retry_after_s=1.2)
        status, headers, _ = await answer_of(client, ask("one"))
        assert (status, dict(headers)[b"retry-after-ms"]) == (429, b"1200")

    check(scenario, admission={"tenants": TENANTS})


def test_a_row_sent_again_gets_the_answer_of_its_first_run_and_costs_a_client_s_key_nothing() -> None:
    async def scenario(client: Client) -> None:
        first, again = [await answer_of(client, ask("one", 3)) for _ in range(2)]
        assert (first[0], first[2]) == (again[0], again[2])
        own = await client.post(ask("another", 3, stream=False), headers={"Idempotency-Key": "batch_1-1"})
        assert own.status == 200, "a client's key is another one, though it reads the same"
        used = client.usage_meter.next_batch()
        assert used is not None
        assert {(row.model, row.requests) for row in used.rows} == {(MODEL, 1), (f"{MODEL} (batch)", 1)}

    check(scenario)


def test_rows_of_a_key_of_the_store_end_with_the_key() -> None:
    stored = KeyTable()
    record = KeyRecord(
        "key_1", "ops", "people", b"d" * 32, models=("small",), max_class=RequestClass.CRITICAL, admin=True
    )
    ring = KeyRing(AuthSettings(keys=(KeySettings(key=OPS),)), stored, lambda: 100.0)
    owner = RowOwner("key_1", "people")

    def status() -> int:
        try:
            found = ring.identify({}, owner)
        except Exception as error:  # noqa: BLE001 - its status is compared
            return int(getattr(error, "status", 0))
        assert (found.is_row, found.admin, found.default_class) == (True, False, RequestClass.LOW)
        assert not found.may_use("large")
        return 200

    found = [status()]
    for version, changed in enumerate(({}, {"expires_at": 50.0}, {"expires_at": 200.0}, {"revoked_at": 60.0}), 1):
        stored.update(version, [replace(record, version=version, **changed)])
        found.append(status())
    assert found == [503, 200, 401, 200, 401]


def test_http_cannot_name_whose_row_a_request_is() -> None:
    async def scenario(client: Client) -> None:
        named = {"serve_app.row_owner": "desk", "x-row-owner": "desk"}
        reply = await client.request("POST", COMPLETIONS, json.dumps(ask("one")).encode(), named, key=None)
        assert reply.status == 401

    check(scenario)


def test_rows_at_the_same_time_are_joined_by_their_key() -> None:
    async def scenario(client: Client) -> None:
        answers = await asyncio.gather(*(answer_of(client, ask("one", 50)) for _ in range(3)))
        assert len({body for _, _, body in answers}) == 1
        used = client.usage_meter.next_batch()
        assert used is not None
        assert [row.requests for row in used.rows] == [1]

    check(scenario)


def test_rows_over_their_limits_are_refused_and_cost_no_other_request_its_answer() -> None:
    """The refusal of the quota actor once ended the reply that carried it, with the decisions for everybody else."""

    async def scenario(client: Client) -> None:
        rows = [asyncio.create_task(answer_of(client, ask(f"row {n}"), key=f"batch_1-{n}")) for n in range(6)]
        others = await asyncio.gather(*(client.post(ask(f"p {n}", stream=False)) for n in range(24)))
        assert {reply.status for reply in others} == {200}
        answers = await asyncio.gather(*rows)
        assert sorted(status for status, _, _ in answers) == [200, 429, 429, 429, 429, 429]
        refused = [json.loads(body)["error"] for status, _, body in answers if status == 429]
        assert {error["code"] for error in refused} == {"rate_limit"}
        assert all("60 requests per minute of the batches of this tenant" in error["message"] for error in refused)
        kept = client.edge.parts.receipts.kept.values()
        assert sorted(one.refused for one in kept if one.refused) == ["rate_limit"] * 5

    limits = {"requests_per_minute": 60, "burst_requests": 1}
    check(scenario, admission={"tenants": {"people": {"batch_limits": limits}}}, charges=True)
