"""What a client sends reaches neither the engine's scheduling nor another tenant's cache."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.stack import TINY, Stack

PREFIX_TOKENS = 160  # ten blocks of vLLM's prefix cache: a hit cannot be missed
SMUGGLED_HEADERS = {
    "X-Vllm-Priority": "not a number",  # vLLM itself answers 400 to that
    "X-data-parallel-rank": "77",
    "X-Session-Affinity": "x",
    "x-request-timeout-seconds": "0.000001",  # Serve's own
    "X-Request-Id": "same",
}
SMUGGLED_FIELDS: dict[str, Any] = {
    "request_id": "same",
    "session_id": "x",
    "cache_salt": "somebody",
    "data_parallel_rank": 77,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "127.0.0.1"},
    "ec_transfer_params": {"x": 1},
    "vllm_xargs": {"kv_transfer_params": "x"},
    "prompt_cache_key": "x",
    "mm_payload": "x",
    "no_such_field": {"a": [1]},
}


def fresh_prompt() -> list[int]:
    """Token ids nobody has sent before, so that the first request of a test finds nothing cached."""
    digits = uuid.uuid4().int
    return [256 + (digits >> i) % 1000 for i in range(16)] * (PREFIX_TOKENS // 16) + [300]


def ask(stack: Stack, prompt: list[int], *, key: str | None = None, **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    body = {"model": TINY, "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    response = stack.post("/v1/completions", body, headers=stack.headers(key) | headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_s_second_request_finds_its_prefix_cached(stack: Stack) -> None:
    prompt = fresh_prompt()
    first = ask(stack, prompt)
    second = ask(stack, prompt)

    assert cached(first) == 0
    assert cached(second) >= PREFIX_TOKENS - 32
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_two_tenants_do_not_share_a_cached_prefix(stack: Stack, batch_key: str) -> None:
    prompt = fresh_prompt()
    people = ask(stack, prompt)
    batch = ask(stack, prompt, key=batch_key)
    again = ask(stack, prompt, key=batch_key)

    assert cached(people) == 0
    assert cached(batch) == 0
    assert cached(again) >= PREFIX_TOKENS - 32
    assert people["choices"][0]["text"] == batch["choices"][0]["text"]


def test_a_client_s_cache_salt_opens_nobody_s_cache(stack: Stack, batch_key: str) -> None:
    """Not another tenant's, by naming the same salt; and its own stays one, whatever salts it names."""
    prompt = fresh_prompt()
    ask(stack, prompt, cache_salt="shared")

    assert cached(ask(stack, prompt, key=batch_key, cache_salt="shared")) == 0
    assert cached(ask(stack, prompt, cache_salt="other")) >= PREFIX_TOKENS - 32


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_tenants_are_kept_apart_on_every_route(stack: Stack, batch_key: str, route: str) -> None:
    words = f"{uuid.uuid4().hex} " * 8
    seen = []
    for key in (stack.api_key, batch_key, batch_key):
        with stack.client(key) as client:
            if route == "chat":
                messages: list[Any] = [{"role": "user", "content": words}]
                usage = client.chat.completions.create(model=TINY, messages=messages, max_tokens=1).usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                seen.append(usage.prompt_tokens_details.cached_tokens)
            else:
                reported = client.responses.create(model=TINY, input=words, max_output_tokens=1).usage
                assert reported is not None
                seen.append(reported.input_tokens_details.cached_tokens)

    assert seen[:2] == [0, 0]
    assert seen[2] is not None
    assert seen[2] > 0


@pytest.mark.parametrize("header", SMUGGLED_HEADERS)
def test_a_smuggled_header_changes_nothing(stack: Stack, header: str) -> None:
    plain = ask(stack, [300, 301, 302])
    smuggled = ask(stack, [300, 301, 302], headers={header: SMUGGLED_HEADERS[header]})

    assert smuggled["choices"] == plain["choices"]
    assert "same" not in smuggled["id"]


@pytest.mark.parametrize("field", SMUGGLED_FIELDS)
def test_a_smuggled_field_changes_nothing(stack: Stack, field: str) -> None:
    plain = ask(stack, [300, 301, 303])
    smuggled = ask(stack, [300, 301, 303], **{field: SMUGGLED_FIELDS[field]})

    assert smuggled["choices"] == plain["choices"]
    assert "same" not in smuggled["id"]
    assert smuggled.get("kv_transfer_params") is None


def test_requests_that_name_themselves_alike_run_side_by_side(stack: Stack) -> None:
    """Two alike would abort each other inside vLLM; here they are in flight at the same time and both end."""
    gate = threading.Barrier(4)
    headers = stack.headers() | {"X-Request-Id": "twin"}

    def ask(number: int) -> tuple[str, int]:
        body = {"model": TINY, "prompt": [300 + number] * 8, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        gate.wait(timeout=60)
        response = stack.post("/v1/completions", body | {"request_id": "twin", "session_id": "twin"}, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()["id"], response.json()["usage"]["completion_tokens"]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))

    assert len({name for name, _ in answers}) == 4
    assert [count for _, count in answers] == [200] * 4


def test_errors_tell_nothing_of_the_server(stack: Stack) -> None:
    response = stack.post("/v1/chat/completions", {"model": TINY, "messages": [{"role": "nobody"}]})

    assert response.status_code == 400
    assert "Traceback" not in response.text
    assert "site-packages" not in response.text
