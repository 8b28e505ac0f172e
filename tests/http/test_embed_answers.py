"""Cohere's embeddings: their lists are split as those of others are, and answered as by one engine."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from serve_app.core.body_bounds import body_size, check_prompt
from serve_app.errors import BadRequest
from serve_app.http.embed_answers import joined_answer
from serve_app.http.prompt_list import MergedExchange
from serve_app.http.request_size import MEDIA_TOKENS
from serve_app.http.split_body import INPUTS_TOGETHER, SplitBody, split_body
from serve_app.settings import HttpSettings
from serve_app.types import Operation

IMAGE = "data:image/png;base64," + 300_000 * "A"
MANY = 2 * INPUTS_TOGETHER + 3


def split(**body: Any) -> SplitBody:
    size = body_size(Operation.EMBED, body)
    check_prompt(Operation.EMBED, body, size, 128)
    return split_body(Operation.EMBED, body, size, HttpSettings())


def answer(part: int, numbers: list[float], **more: Any) -> bytes:
    billed = {"input_tokens": len(numbers), "image_tokens": 0}
    body = {
        "id": f"embd-r-{part}",
        "embeddings": {"float": [[number] for number in numbers], "base64": [str(number) for number in numbers]},
        "meta": {"api_version": {"version": "2"}, "billed_units": billed},
        "response_type": "embeddings_by_type",
    }
    return json.dumps(body | more).encode()


@pytest.mark.parametrize(
    ("field", "entry"), [("texts", "a"), ("images", IMAGE), ("inputs", {"content": [{"type": "text", "text": "a"}]})]
)
def test_a_list_is_split_as_that_of_other_embeddings(field: str, entry: Any) -> None:
    found = split(**{field: [entry] * MANY}, embedding_types=["float"])
    assert [one for body, _ in found.parts for one in body[field]] == [entry] * MANY
    assert found.measure.answers == MANY
    assert len(found.parts) >= 3
    assert all(body["embedding_types"] == ["float"] for body, _ in found.parts)


def test_an_image_counts_as_a_medium_however_many_bytes_it_has() -> None:
    assert split(images=[IMAGE]).measure.prompt_bytes == split(images=["x"]).measure.prompt_bytes > MEDIA_TOKENS
    assert body_size(Operation.EMBED, {"images": [IMAGE]}).has_media


def test_a_text_is_bounded_by_the_model_unless_it_is_truncated_as_is_cohere_s_default() -> None:
    text = 100_000 * "a"
    assert split(texts=["b", text]).measure.sequences == 2
    with pytest.raises(BadRequest) as caught:
        split(texts=["b", text], truncate="NONE")
    assert caught.value.param == "texts.1"


def test_more_inputs_than_allowed_are_refused_by_their_field() -> None:
    most = HttpSettings().max_embedding_inputs
    with pytest.raises(BadRequest) as caught:
        split(inputs=[{"content": []}] * (most + 1))
    assert caught.value.param == "inputs"


def test_parts_are_answered_as_by_one_engine() -> None:
    parts = [answer(0, [0.25, 1], texts=["a", "b"]), answer(1, [2.5], texts=["c"])]
    joined = json.loads(joined_answer(parts))
    assert joined == json.loads(answer(0, [0.25, 1, 2.5], texts=["a", "b", "c"], id="embd-r"))
    images = json.loads(joined_answer([answer(0, [1]), answer(1, [2])]))
    assert "texts" not in images


def test_the_client_gets_the_parts_in_their_order_whichever_ends_first() -> None:
    found = split(texts=[str(number) for number in range(INPUTS_TOGETHER + 1)])
    sent = list[Any]()

    class Client:
        async def send_answer(self, *answer: Any) -> None:
            sent.append(answer)

    client: Any = Client()
    merged = MergedExchange(client, found)
    merged.keep(1, answer(1, [9.0], texts=["32"]))
    merged.keep(0, answer(0, [1.0, 2.0], texts=["0", "1"]))
    asyncio.run(merged.end())
    ((status, _, body),) = sent
    assert status == 200
    assert json.loads(body)["texts"] == ["0", "1", "32"]
    assert json.loads(body)["embeddings"]["float"] == [[1.0], [2.0], [9.0]]
    error = merged.in_list(1, BadRequest("`texts.0` is wrong", param="texts.0"))
    assert (error.param, error.message) == (f"texts.{INPUTS_TOGETHER}", f"`texts.{INPUTS_TOGETHER}` is wrong")


@pytest.mark.parametrize("operation", [Operation.CLASSIFY, Operation.POOLING])
def test_inputs_of_other_pooling_are_split_and_a_conversation_is_one(operation: Operation) -> None:
    body: dict[str, Any] = {"input": ["a"] * MANY}
    found = split_body(operation, body, body_size(operation, body), HttpSettings())
    assert [len(part["input"]) for part, _ in found.parts] == [INPUTS_TOGETHER, INPUTS_TOGETHER, 3]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}] * MANY}
    alone = split_body(operation, chat, body_size(operation, chat, sys.maxsize), HttpSettings())
    assert [part for part, _ in alone.parts] == [chat]
