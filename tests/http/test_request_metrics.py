"""What one request adds to the metrics: its times, its tokens, and how it ended."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serve_app.router.metrics import buckets
from tests.fakes.asgi_client import BATCH_KEY, CHAT, KEY, Client, ask, cancel, running, started
from tests.fakes.engines import FakeCluster, model, run, turns
from tests.http.test_app_receipts import check, leave, receipts
from tests.requires import requires

TIMES = (
    "request_duration_seconds",
    "time_to_first_token_seconds",
    "first_token_in_router_seconds",
    "first_token_in_engine_seconds",
    "time_per_output_token_seconds",
    "longest_token_gap_seconds",
    "queue_wait_seconds",
)


def total(client: Client, name: str) -> float:
    return sum(client.figures(f"serve_app_{name}").values())


def counts(client: Client, *names: str) -> dict[str, float]:
    return {name: total(client, f"{name}_count") for name in names}


def test_a_streamed_answer_is_in_each_histogram_once() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask("p", 7))).status == 200
        (receipt,) = receipts(client)
        assert counts(client, *TIMES) == dict.fromkeys(TIMES, 1)
        assert receipt.first_token_s is not None
        assert receipt.itl_s is not None
        assert total(client, "request_duration_seconds_sum") == pytest.approx(receipt.total_s)
        assert total(client, "time_per_output_token_seconds_sum") == pytest.approx(receipt.itl_s)
        assert total(client, "longest_token_gap_seconds_sum") == pytest.approx(receipt.longest_gap_s)
        assert total(client, "request_prompt_tokens_sum") == receipt.prompt_tokens
        assert total(client, "request_output_tokens_sum") == 7
        assert client.figures("serve_app_arrivals_total", "tenant", "priority") == {("people", "normal"): 1}
        assert client.figures("serve_app_estimate_ratio_count", "part") == {("prompt",): 1, ("output",): 1}

    check(scenario)


def test_router_engine_and_waits_add_up_to_the_first_token() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client, n=4)
        waits = client.posting(ask("waits", stream=False))
        await turns(20)
        await leave(task)
        assert (await waits).status == 200
        _, waited = receipts(client)
        assert waited.trace.waited_s > 0
        seconds = client.figures("serve_app_queue_wait_seconds_sum", "reason")
        assert seconds["slots",] == pytest.approx(waited.trace.waited_s)
        assert client.figures("serve_app_waited_seconds_total", "reason") == {("slots",): seconds["slots",]}
        assert client.figures("serve_app_queue_wait_seconds_count", "reason") == {("none",): 1, ("slots",): 1}
        parts = ("first_token_in_router_seconds", "first_token_in_engine_seconds", "queue_wait_seconds")
        together = sum(total(client, f"{part}_sum") for part in parts)
        assert together == pytest.approx(total(client, "time_to_first_token_seconds_sum"))

    check(scenario)


def test_an_answer_that_comes_whole_has_no_longest_gap() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask("p", 7, stream=False))).status == 200
        assert counts(client, *TIMES) == dict.fromkeys(TIMES, 1) | {"longest_token_gap_seconds": 0}

    check(scenario)


def test_a_list_of_prompts_is_one_request_whose_first_token_is_not_split() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask(["a", "b"], 3, stream=False))).status == 200
        assert counts(client, *TIMES) == {
            "request_duration_seconds": 1,
            "time_to_first_token_seconds": 1,
            "first_token_in_router_seconds": 0,
            "first_token_in_engine_seconds": 0,
            "time_per_output_token_seconds": 1,
            "longest_token_gap_seconds": 0,
            "queue_wait_seconds": 2,  # each prompt waits
        }
        assert total(client, "request_output_tokens_sum") == 6

    check(scenario)


def test_a_wrong_body_is_no_arrival_and_what_is_refused_has_no_duration() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 0})
        assert (await client.request("POST", CHAT, b"{")).status == 400
        assert total(client, "arrivals_total") == 0
        task, _ = await running(client)
        assert (await client.post(ask("no room"))).status == 429
        assert total(client, "arrivals_total") == 2
        assert total(client, "refusals_total") == 1
        await cancel(task)
        assert counts(client, "request_duration_seconds", "request_prompt_tokens")["request_duration_seconds"] == 0

    run(scenario, model(slots=1))


def test_a_queue_that_is_half_full_has_a_ratio_of_a_half() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1", admission={"max_queued": 4})
        await client.get("/metrics")
        assert client.figures("serve_app_waiting_ratio", "model") == {}
        task, _ = await running(client)
        waits = [client.posting(ask("waits")) for _ in range(2)]
        await turns(20)
        await client.get("/metrics")
        assert client.figures("serve_app_waiting_ratio", "model") == {("sim",): 0.5}
        for asked in [*waits, task]:
            await cancel(asked)

    run(scenario, model(slots=1))


def test_tenants_without_a_name_are_counted_together() -> None:
    async def scenario(cluster: FakeCluster) -> None:
        client = await started(cluster, "r1")
        named = client.edge.settings.metrics.model_copy(update={"named_tenants": 1})
        client.edge.configure(client.edge.settings.model_copy(update={"metrics": named}))
        assert (await client.post(ask("p", 7))).status == 200
        assert (await client.get("/metrics")).status == 200  # the heaviest is named
        for key in (KEY, BATCH_KEY):
            assert (await client.post(ask("p", 3), key=key)).status == 200
        assert client.figures("serve_app_requests_total", "tenant") == {("other",): 2, ("people",): 1}
        assert client.figures("serve_app_completion_tokens_total", "tenant") == {("other",): 10, ("people",): 3}
        assert client.figures("serve_app_request_duration_seconds_count", "tenant") == {("other",): 2, ("people",): 1}

    run(scenario)


def test_openmetrics_has_the_request_id_of_first_token_and_whole_request() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        assert (await client.post(ask("p", 7))).status == 200
        (receipt,) = receipts(client)
        reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert reply.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(reply.body.decode())}
        for name in ("serve_app_time_to_first_token_seconds", "serve_app_request_duration_seconds"):
            (exemplar,) = [one.exemplar for one in families[name].samples if one.exemplar is not None]
            assert exemplar.labels == {"request_id": receipt.request_id}
        assert families["serve_app_requests"].type == "counter"
        assert reply.body.count(b"# EOF") == 1
        plain = await client.get("/metrics", headers={"Accept": "text/plain"})
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"# {" not in plain.body
        assert b"# EOF" not in plain.body

    check(scenario)


def test_the_buckets_are_those_of_vllm() -> None:
    requires("vllm")
    from vllm.v1.metrics import buckets as vllm

    assert buckets.REQUEST_LATENCY_S == vllm.REQUEST_LATENCY_BUCKETS
    assert buckets.TIME_TO_FIRST_TOKEN_S == vllm.TIME_TO_FIRST_TOKEN_BUCKETS
    assert buckets.INTER_TOKEN_LATENCY_S == vllm.INTER_TOKEN_LATENCY_BUCKETS
    assert list(buckets.REQUEST_TOKENS) == vllm.build_1_2_5_buckets(1_000_000)
