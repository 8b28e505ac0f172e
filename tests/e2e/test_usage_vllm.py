"""The use that the store has of vLLM's answers, cached prompts included, against the answers' own `usage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.stack import TINY, Stack
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # test_usage has the sums; tests/engine what vLLM reports

PROMPT = "The river carries the boat past the mill and the two old bridges. " * 12  # several blocks of the KV cache
REPORTED_S = 20.0  # a report takes a second and some milliseconds; the rest is for a busy machine


def stored(stack: Stack, key: str) -> Counter[str]:
    answer = stack.get(f"/admin/usage?by=model&model={TINY}", headers=stack.headers(key))
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["data"] or [{}]
    return Counter({name: row[name] for name in row if name.endswith(("requests", "tokens", "unsettled"))})


def answers(client: openai.OpenAI) -> Iterator[tuple[int, int, int]]:
    """Prompt, cached and output tokens of answers of each kind, streamed or not, by their own usage."""
    messages: Any = [{"role": "user", "content": PROMPT}]
    whole: dict[str, Any] = {"model": TINY, "max_tokens": 6}
    streamed: dict[str, Any] = whole | {"stream": True, "stream_options": {"include_usage": True}}
    for n in (1, 2):
        yield of(client.chat.completions.create(messages=messages, n=n, **whole).usage)
        yield of([chunk.usage for chunk in client.chat.completions.create(messages=messages, n=n, **streamed)][-1])
        yield of(client.completions.create(prompt=PROMPT, n=n, **whole).usage)
        yield of([chunk.usage for chunk in client.completions.create(prompt=PROMPT, n=n, **streamed)][-1])
    for prompts in ([PROMPT, "The mill", PROMPT],):
        yield of(client.completions.create(prompt=prompts, **whole).usage)
        yield of([chunk.usage for chunk in client.completions.create(prompt=prompts, **streamed)][-1])
    response: dict[str, Any] = {"model": TINY, "input": PROMPT, "max_output_tokens": 6}
    yield of_response(client.responses.create(**response).usage)
    yield of_response(list(client.responses.create(stream=True, **response))[-1].response.usage)


def of(usage: Any) -> tuple[int, int, int]:
    details = usage.prompt_tokens_details
    return usage.prompt_tokens, 0 if details is None else details.cached_tokens or 0, usage.completion_tokens


def of_response(usage: Any) -> tuple[int, int, int]:
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


def test_what_is_counted_is_what_vllm_says_in_its_answers(
    stack: Stack, batch_client: openai.OpenAI, batch_key: str
) -> None:
    before = stored(stack, batch_key)
    found = list(answers(batch_client))
    prompt, cached, output = (sum(column) for column in zip(*found, strict=True))
    print(found)
    assert cached > 0
    counter = Counter(requests=len(found), prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
    wait_until(
        lambda: stored(stack, batch_key) - before, REPORTED_S, "the sums of the answers' own usage", wanted=counter
    )


def test_a_stream_that_its_client_leaves_counts_with_its_prompt_and_what_was_generated(
    stack: Stack, batch_client: openai.OpenAI, batch_key: str
) -> None:
    before = stored(stack, batch_key)
    stream = batch_client.completions.create(
        model=TINY, prompt="a b c", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    wait_until(
        lambda: (stored(stack, batch_key) - before)["requests"], REPORTED_S, "the request that was cut", wanted=1
    )
    row = stored(stack, batch_key) - before
    assert row["prompt_tokens"] > 0
    assert 5 <= row["output_tokens"] < 1500
