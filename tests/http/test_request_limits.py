"""Every request of a limited key is charged once and ended once: settled by its tokens, or refunded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve_app.core.limits import LimitReason
from serve_app.errors import RateLimited
from serve_app.http.request_limits import duration
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Outcome
from tests.fakes.asgi_client import BATCH_KEY, Client, ask, cancel, running, started
from tests.fakes.engines import MODEL, FakeCluster, model, run, until
from tests.fakes.router import SOON_S

LIMITED = {"requests_per_minute": 60, "tokens_per_minute": 1000}


def check(scenario: Callable[[Client, FakeCluster], Awaitable[None]], slots: int = 4, **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", **{"limits": LIMITED, **settings}), cluster)

    run(with_client, model(slots=slots))


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_is_charged_by_its_estimate_and_settled_by_its_usage(streamed: bool) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask("one two three", 7, stream=streamed))
        (charge,) = client.limits.charges
        assert reply.status == 200
        assert charge.request.scopes == (("key:desk", charge.request.scopes[0][1]),)
        assert (charge.request.tokens, charge.end) == (4 + 7, (3 + 7, 0))

    check(scenario)


def test_a_repeat_of_the_sdk_is_distinguished_from_a_first_attempt() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("hello"))
        for count in ("0", "1"):
            await client.post(ask("hello"), headers={"X-Stainless-Retry-Count": count})
        assert [request.is_repeat for request in client.limits.asked] == [None, False, True]

    check(scenario)


def test_a_key_without_limits_is_not_charged_and_gets_no_rate_limit_headers() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask("hello", priority="low"), key=BATCH_KEY)
        assert (reply.status, client.limits.asked) == (200, [])
        assert not [name for name in reply.headers if name.startswith("x-ratelimit")]

    check(scenario)


@pytest.mark.parametrize("streamed", [True, False])
def test_every_answer_of_a_limited_key_has_the_rate_limit_headers(streamed: bool) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for prompt, n, status in (("hello", 1, 200), ("word " * 9000, 1, 400), ("hello", 4000, 400)):
            reply = await client.post(ask(prompt, n=n, stream=streamed))
            assert reply.status == status
            found = {name: value for name, value in reply.headers.items() if name.startswith("x-ratelimit")}
            assert found == {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "58",
                "x-ratelimit-reset-requests": "2s",
            }

    check(scenario)


def test_the_limits_of_key_tenant_and_model_are_charged_together() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        await client.post(ask("hello"))
        scopes = dict(client.limits.asked[0].scopes)
        assert list(scopes) == ["key:desk", "tenant:people", f"model:people\0{MODEL}"]
        assert scopes["tenant:people"].max_concurrent == 8
        assert scopes[f"model:people\0{MODEL}"].tokens_per_day == 10**6

    tenants = {"people": {"limits": {"max_concurrent": 8}, "models": {MODEL: {"tokens_per_day": 10**6}}}}
    check(scenario, admission={"tenants": tenants})


def test_a_refused_request_never_reaches_the_queue_and_says_when_to_come_back() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        client.limits.refusal = RateLimited("requests per minute", code=LimitReason.RATE_LIMIT, retry_after_s=1.2)
        reply = await client.post(ask("hello"))
        assert (reply.status, reply.error["code"], reply.headers["retry-after-ms"]) == (429, "rate_limit", "1200")
        assert "x-ratelimit-remaining-requests" in reply.headers
        assert client.at_rest()
        (receipt,) = client.edge.parts.receipts.kept.values()
        assert (receipt.outcome, receipt.refused) == (Outcome.REFUSED, LimitReason.RATE_LIMIT)
        assert client.figures("serve_app_limited_total", "tenant", "reason") == {("people", "rate_limit"): 1}

    check(scenario)


def test_a_refusal_of_the_queue_is_refunded() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        reply = await client.post(ask("too much"))
        assert (reply.status, client.limits.ends) == (429, [None, "refunded"])
        await cancel(task)

    check(scenario, slots=1, admission={"max_queued": 0})


def test_an_engine_s_refusal_is_refunded() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask("word " * 9000, stream=False))
        assert (reply.status, client.limits.ends) == (400, ["refunded"])

    check(scenario)


def test_a_large_request_that_is_wrong_pays_for_its_prompt() -> None:
    """It was read, in a process that all tenants share; who repeats it without end meets the limit."""

    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask("word " * 20_000))
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        reply = await client.post({"model": MODEL, "tokens": [-1] * 6000 + [{"a": 1}] * 600}, "/detokenize")
        assert reply.status == 400
        assert client.limits.ends == [(8192, 0), (0, 0)]  # of tokens no more than the model holds

    check(scenario)


@pytest.mark.parametrize(("words", "end"), [(3, "refunded"), (20_000, (8192, 0))])
def test_a_large_request_at_which_the_engine_fails_pays_for_its_prompt(words: int, end: Any) -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        async def failing(submit: Submit, put: Callable[[Frame], None]) -> None:
            put(Frame(submit.number, b'{"error":{"code":"request_failed"}}', 500, "json", usage=TokenUsage()))

        cluster["r1"].engine.server.run = failing
        reply = await client.post(ask("word word " * words, stream=False))
        assert (reply.status, reply.headers["x-should-retry"]) == (500, "false")
        assert client.limits.ends == [end]

    check(scenario)


def test_a_client_that_leaves_pays_for_what_was_made_until_then() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        task, _ = await running(client)
        await cancel(task)
        (end,) = client.limits.ends
        assert isinstance(end, tuple)
        assert 0 < end[0] < client.limits.charges[0].request.tokens

    check(scenario)


def test_a_client_that_leaves_while_its_request_waits_pays_nothing() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        first, _ = await running(client)
        second = client.posting(ask("waits"))
        await until(lambda: client.model.queue.waiting == 1, SOON_S, "it waits")
        await cancel(second)
        assert client.limits.ends == [None, "refunded"]
        await cancel(first)

    check(scenario, slots=1)


def test_a_list_of_prompts_is_one_request_with_all_its_tokens() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        reply = await client.post(ask(["one two", "three four"], 5, stream=False))
        (charge,) = client.limits.charges
        usage = json.loads(reply.body)["usage"]
        assert charge.end == (usage["total_tokens"], 0)
        assert charge.request.tokens >= 10

    check(scenario)


def test_a_kept_answer_is_not_charged_again() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for _ in range(2):
            reply = await client.post(ask("hello"), headers={"Idempotency-Key": "once"})
            assert reply.status == 200
        assert len(client.limits.charges) == 1

    check(scenario)


def test_a_request_that_waits_aside_is_in_no_queue_and_its_own_deadline_holds() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        client.limits.held = asyncio.Event()
        late = client.posting(ask("in time only"), headers={"X-Deadline-Ms": "50"})
        patient = client.posting(ask("whenever"))
        reply = await late
        assert (reply.status, reply.error["code"], client.limits.cancelled) == (429, "deadline", 1)
        assert client.at_rest()
        client.limits.waited_s = 3.0
        client.limits.held.set()
        assert (await patient).status == 200
        assert client.limits.asked[1].may_wait
        receipt = list(client.edge.parts.receipts.kept.values())[-1]
        assert receipt.trace.limit_wait_s == 3.0
        assert client.figures("serve_app_limit_wait_seconds_total", "tenant") == {("people",): 3.0}

    check(scenario, admission={"tenants": {"people": {"over_limit": "wait"}}})


def test_the_same_bytes_have_the_same_fingerprint_and_others_another() -> None:
    async def scenario(client: Client, cluster: FakeCluster) -> None:
        for prompt in ("a", "b", "a"):
            await client.post(ask(prompt))
        first, second, third = (request.fingerprint for request in client.limits.asked)
        assert (first == third, first == second) == (True, False)

    check(scenario)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0171, "18ms"),
        (0.9999, "1s"),
        (8.64, "8.64s"),
        (60.0, "1m0s"),
        (360.0, "6m0s"),
        (3723, "1h2m3s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
