"""Models, tokenizer routes, embeddings on a model without them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.e2e import prompts
from tests.e2e.reference import Reference
from tests.e2e.stack import TINY, Stack


def test_the_models_are_listed_with_their_length(stack: Stack, client: openai.OpenAI) -> None:
    cards = {card.id: card for card in client.models.list()}

    assert set(cards) == stack.models
    assert all(card.object == "model" for card in cards.values())
    extra = cards[TINY].model_extra
    assert extra is not None
    assert extra["max_model_len"] == 2048


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(TINY) in list(client.models.list())
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("text", ["The river", "def f(x):\n\treturn {}", "größer 河 🌊", "<|end|> is only text?"])
def test_tokenize_and_detokenize_equal_the_library(stack: Stack, reference: Reference, text: str) -> None:
    body = stack.post("/tokenize", {"model": TINY, "prompt": text}).json()
    back = stack.post("/detokenize", {"model": TINY, "tokens": body["tokens"]}).json()

    assert body["tokens"] == reference.encode(text)
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 2048
    assert back["prompt"] == text


def test_tokenize_renders_a_conversation_as_the_library_does(stack: Stack, reference: Reference) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
    for number in range(4):
        messages = prompts.chat(number)
        body = stack.post("/tokenize", {"model": TINY, "messages": messages}).json()
        assert body["tokens"] == reference.encode_chat(messages)
    body = stack.post("/tokenize", {"model": TINY, "messages": prompts.chat(1), "tools": tools}).json()
    assert body["count"] > len(reference.encode_chat(prompts.chat(1)))


def test_embeddings_of_a_generating_model_are_refused_clearly(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings"):
        client.embeddings.create(model=TINY, input="The river")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": TINY}, None),
        ("/tokenize", {"model": TINY, "prompt": 5}, "prompt"),
        ("/detokenize", {"model": TINY, "tokens": "abc"}, "tokens"),
        ("/detokenize", {"model": TINY, "tokens": ["x"]}, "tokens"),
    ],
)
def test_wrong_tokenizer_requests_are_the_client_s_errors(
    stack: Stack, path: str, body: dict[str, object], param: str | None
) -> None:
    response = stack.post(path, body)

    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"]
    if param is not None:
        assert param in (error["param"] or "")


def test_a_token_id_outside_the_vocabulary_is_the_client_s_error(stack: Stack) -> None:
    response = stack.post("/v1/completions", {"model": TINY, "prompt": [1, 2, 999_999], "max_tokens": 1})

    assert response.status_code == 400
    assert "vocab" in response.json()["error"]["message"]


def test_the_input_of_a_response_is_counted_as_its_usage_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": TINY, "input": "What is a letter?", "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(**asked)
    usage = client.responses.create(**asked, max_output_tokens=1).usage

    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


def test_the_tokenizer_is_described_to_operators(stack: Stack) -> None:
    reported = stack.get(f"/tokenizer_info?model={TINY}")

    assert reported.status_code == 200
    assert "tokenizer_class" in reported.json()
