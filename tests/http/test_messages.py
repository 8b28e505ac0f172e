"""Anthropic's Messages API at a router on fake engine replicas: answers, errors and headers in its form."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import httpx2
import pytest

from tests.requires import requires

requires("vllm")  # with it comes Anthropic's SDK

import anthropic  # noqa: E402

from serve_app.core.limits import LimitReason  # noqa: E402
from serve_app.errors import RateLimited  # noqa: E402
from serve_app.types import Outcome  # noqa: E402
from tests.fakes.asgi_client import KEY, Client, Reply, cancel, running, started  # noqa: E402
from tests.fakes.engines import MODEL, FakeCluster, model, run  # noqa: E402

MESSAGES = "/v1/messages"
LIMITED = {"requests_per_minute": 60, "tokens_per_minute": 1000}


def ask(text: str = "hi", tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]} | more


def check(scenario: Callable[[Client], Awaitable[None]], slots: int = 4, **settings: Any) -> None:
    async def with_client(cluster: FakeCluster) -> None:
        await scenario(await started(cluster, "r1", **settings))

    run(with_client, model(slots=slots))


def kind_of(reply: Reply) -> str:
    found = json.loads(reply.body)
    assert found["type"] == "error"
    assert found.get("request_id") == reply.headers.get("request-id")
    return str(found["error"]["type"])


def events(reply: Reply) -> list[dict[str, Any]]:
    found = [event for event in reply.body.decode().split("\n\n")[:-1] if not event.startswith(":")]
    return [json.loads(event.partition("\ndata: ")[2]) for event in found]


def test_an_answer_is_a_message_that_names_its_request() -> None:
    async def scenario(client: Client) -> None:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04", "x-api-key": KEY}
        reply = await client.post(ask(), MESSAGES, headers=headers, key=None)
        message = json.loads(reply.body)
        assert (reply.status, message["type"], message["stop_reason"]) == (200, "message", "max_tokens")
        assert message["id"] == "msg_" + reply.headers["request-id"]
        assert message["usage"] == {"input_tokens": 2, "output_tokens": 5}
        assert reply.headers["x-serve-app-request-id"] == reply.headers["request-id"]
        assert client.outcomes == {Outcome.OK: 1}
        assert (await client.get(f"/admin/requests/{message['id']}")).status == 200

    check(scenario)


def test_a_stream_ends_with_the_end_of_its_message() -> None:
    async def scenario(client: Client) -> None:
        whole = json.loads((await client.post(ask(), MESSAGES)).body)
        reply = await client.post(ask(stream=True), MESSAGES)
        found = events(reply)
        texts = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert found[-1] == {"type": "message_stop"}
        assert "".join(texts) == whole["content"][0]["text"]

    check(scenario)


def sdk(reply: Reply) -> anthropic.Anthropic:
    """Anthropic's SDK at a server with this answer."""
    answer = httpx2.Response(reply.status, headers=reply.headers, content=reply.body)
    transport = httpx2.MockTransport(lambda request: answer)
    http_client = httpx2.Client(transport=transport)
    return anthropic.Anthropic(base_url="http://test", api_key=KEY, http_client=http_client, max_retries=0)


def test_the_sdk_reads_a_message_and_its_stream() -> None:
    async def scenario(client: Client) -> None:
        reply = await client.post(ask(), MESSAGES)
        asked: Any = ask()
        whole = sdk(reply).messages.create(**asked)
        assert whole.id == f"msg_{whole._request_id}"
        with sdk(await client.post(ask(stream=True), MESSAGES)).messages.stream(**asked) as stream:
            parts = stream.get_final_message()
        assert [block.to_dict() for block in parts.content] == [block.to_dict() for block in whole.content]
        assert (parts.stop_reason, parts.usage) == (whole.stop_reason, whole.usage)

    check(scenario)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (ask(model="no"), {}, anthropic.NotFoundError),
        (ask(tokens=0), {}, anthropic.BadRequestError),
        (ask(priority="critical"), {}, anthropic.PermissionDeniedError),
        (ask(), {"X-Deadline-Ms": "1"}, anthropic.OverloadedError),
    ],
)
def test_the_sdk_raises_its_own_exceptions(
    body: dict[str, Any], headers: dict[str, str], expected: type[anthropic.APIStatusError]
) -> None:
    async def scenario(client: Client) -> None:
        task, _ = await running(client)
        reply = await client.post(body, MESSAGES, headers=headers)
        asked: Any = ask()
        with pytest.raises(expected) as caught:
            sdk(reply).messages.create(**asked)
        assert caught.value.request_id == reply.headers["x-serve-app-request-id"]
        await cancel(task)

    check(scenario, slots=1)


def test_tokens_are_counted_without_an_answer() -> None:
    async def scenario(client: Client) -> None:
        counted = ask(system="Be brief.")
        del counted["max_tokens"]
        reply = await client.post(counted, f"{MESSAGES}/count_tokens")
        assert (reply.status, json.loads(reply.body)) == (200, {"input_tokens": 5})

    check(scenario)


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "kind"),
    [
        (MESSAGES, ask(), "sk-wrong", 401, "authentication_error"),
        (MESSAGES, ask(), None, 401, "authentication_error"),
        (MESSAGES, ask(model="no"), KEY, 404, "not_found_error"),
        (MESSAGES, ask(priority="critical"), KEY, 403, "permission_error"),
        (MESSAGES, ask(tokens=0), KEY, 400, "invalid_request_error"),
        (MESSAGES, ask("word " * 9000), KEY, 400, "invalid_request_error"),
        (f"{MESSAGES}/batches", {}, KEY, 404, "not_found_error"),
        (f"{MESSAGES}/count_tokens", {"model": MODEL}, KEY, 400, "invalid_request_error"),
    ],
)
def test_a_refusal_has_anthropic_s_form(path: str, body: Any, key: str | None, status: int, kind: str) -> None:
    async def scenario(client: Client) -> None:
        reply = await client.post(body, path, key=key)
        assert (reply.status, kind_of(reply)) == (status, kind)
        assert reply.headers["x-should-retry"] == "false"

    check(scenario)


def test_a_prompt_above_the_model_s_length_is_refused_in_anthropic_s_words() -> None:
    async def scenario(client: Client) -> None:
        for stream in (False, True):
            reply = await client.post(ask("word " * 9000, stream=stream), MESSAGES)
            assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
            assert reply.error["message"].startswith("prompt is too long: ")

    check(scenario)


def test_what_the_engine_refuses_has_the_names_of_the_client() -> None:
    async def scenario(client: Client) -> None:
        reply = await client.post(ask(stop_sequences=["a", "b", "c", "d", "e"]), MESSAGES)
        assert (reply.status, reply.error["param"]) == (400, "stop_sequences")
        assert "`stop_sequences` may have 4 entries" in reply.error["message"]

    check(scenario)


def test_a_service_without_room_is_overloaded_and_a_limit_of_the_key_is_not() -> None:
    async def scenario(client: Client) -> None:
        task, _ = await running(client)
        reply = await client.post(ask(), MESSAGES, headers={"X-Deadline-Ms": "1"})
        assert (reply.status, kind_of(reply)) == (529, "overloaded_error")
        assert int(reply.headers["retry-after"]) >= 1
        await cancel(task)
        client.limits.refusal = RateLimited("one at a time", code=LimitReason.CONCURRENCY, retry_after_s=2)
        reply = await client.post(ask(), MESSAGES)
        assert (reply.status, kind_of(reply), reply.headers["retry-after"]) == (429, "rate_limit_error", "2")

    check(scenario, slots=1, limits=LIMITED)


def test_a_limited_key_reads_its_limits_in_anthropic_s_headers() -> None:
    async def scenario(client: Client) -> None:
        reply = await client.post(ask(), MESSAGES)
        found = {name: value for name, value in reply.headers.items() if "ratelimit" in name}
        assert datetime.fromisoformat(found.pop("anthropic-ratelimit-requests-reset")).tzinfo is not None
        assert found == {
            "anthropic-ratelimit-requests-limit": "60",
            "anthropic-ratelimit-requests-remaining": "58",
        }

    check(scenario, limits=LIMITED)


def test_a_repeat_under_a_key_gets_the_same_message_or_the_same_error() -> None:
    async def scenario(client: Client) -> None:
        key = {"Idempotency-Key": "k1"}
        first, again = [await client.post(ask(), MESSAGES, headers=key) for _ in range(2)]
        assert (first.body, again.headers["x-idempotent-replay"]) == (again.body, "true")
        wrong = {"Idempotency-Key": "k2"}
        refused, repeated = [await client.post(ask("word " * 9000), MESSAGES, headers=wrong) for _ in range(2)]
        assert (refused.status, kind_of(refused)) == (400, "invalid_request_error")
        assert json.loads(repeated.body)["error"] == json.loads(refused.body)["error"]

    check(scenario)
