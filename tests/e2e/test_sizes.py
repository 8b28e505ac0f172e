"""Requests and answers of megabytes: they pass, or are refused by name, and nobody else notices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serve_app.core.body_bounds import MAX_TOKEN_BYTES
from tests.e2e.observe import FILL_S, Observer
from tests.e2e.stack import TINY, Stack
from tests.waiting import wait_until

MODEL_TOKENS = 2048  # max_model_len of the tests' model
GRPC_DEFAULT_BYTES = 4 * 2**20  # the largest message between two Serve processes unless it is raised
LONG_TEXT = "river " * 1_250_000  # 7.5 MB, below the bound for bodies
ANSWER_WITHIN_S = 60.0  # reading eight megabytes takes a second; the bound is for a loaded machine


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_prompt_of_megabytes_is_given_the_model_s_limit(stack: Stack, path: str) -> None:
    body: dict[str, Any] = {"model": TINY}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": LONG_TEXT}]
    else:
        body["prompt" if path == "/v1/completions" else "input"] = LONG_TEXT
    response = stack.post(path, body, timeout=ANSWER_WITHIN_S)

    assert response.status_code == 400, response.text
    assert "2048" in response.json()["error"]["message"]


def test_megabytes_beside_the_prompt_are_refused_by_name(stack: Stack) -> None:
    body = {"model": TINY, "prompt": "a", "max_tokens": 1, "metadata": {"a": "x" * 6_000_000}}
    response = stack.post("/v1/completions", body, timeout=ANSWER_WITHIN_S)

    assert response.status_code == 400, response.text[:300]
    assert response.json()["error"]["param"] == "metadata"
    assert stack.post("/v1/completions", body | {"metadata": {"a": "x" * 4000}}).status_code == 200


def test_text_to_tokenize_is_bounded_by_the_models_length(stack: Stack) -> None:
    """The tokenizer serves everybody, one text at a time; megabytes would hold it for seconds."""
    most = MAX_TOKEN_BYTES * MODEL_TOKENS
    fits = stack.post("/tokenize", {"model": TINY, "prompt": LONG_TEXT[:most]}, timeout=ANSWER_WITHIN_S)
    assert fits.status_code == 200, fits.text[:300]
    assert fits.json()["count"] == len(fits.json()["tokens"]) > MODEL_TOKENS

    beyond = stack.post("/tokenize", {"model": TINY, "prompt": LONG_TEXT}, timeout=ANSWER_WITHIN_S)
    assert beyond.status_code == 400
    assert beyond.json()["error"]["param"] == "prompt"


@pytest.mark.long
def test_an_answer_of_megabytes_arrives_and_breaks_no_other_stream(
    stack: Stack, observer: Observer, batch_key: str
) -> None:
    """The streams of all tenants on one replica share a channel; one of them runs while the large answer passes."""
    observer.wait_idle(TINY)
    stream = {"model": TINY, "prompt": "The river", "max_tokens": 1500, "temperature": 0, "stream": True}
    large = {
        "model": TINY,
        "prompt": [[300 + (start + i) % 500 for i in range(2000)] for start in range(4)],
        "max_tokens": 1,
        "prompt_logprobs": 20,
    }
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stack.post, "/v1/completions", stream | {"ignore_eos": True})
        wait_until(lambda: observer.running(TINY), FILL_S, "sequences running", wanted=1)
        answer = stack.post("/v1/completions", large, headers=stack.headers(batch_key), timeout=ANSWER_WITHIN_S)
        text = other.result().text

    assert answer.status_code == 200, answer.text[:300]
    assert len(answer.content) > GRPC_DEFAULT_BYTES
    assert len(answer.json()["choices"]) == 4
    assert all(len(choice["prompt_logprobs"]) == 2000 for choice in answer.json()["choices"])
    assert text.endswith("data: [DONE]\n\n")
    assert '"error":{' not in text
    assert '"finish_reason":"length"' in text
