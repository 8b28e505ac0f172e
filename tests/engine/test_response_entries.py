"""Log probabilities of a response are encoded in slices, to the JSON of vLLM's models."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from openai.types.responses import (
    ResponseContentPartDoneEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response_output_text import Logprob, LogprobTopLogprob
from pydantic import BaseModel

from serve_app.engine.vllm_adapter import response_entries
from serve_app.engine.vllm_adapter.log_probabilities import SLICE_ENTRIES, Entries, keep_entries
from serve_app.engine.vllm_adapter.private_names import RESPONSE_NAMES, RESPONSES_SERVING, missing
from serve_app.engine.vllm_adapter.response_entries import encoded, event_body

TOKENS = 300
EACH = 20
SLICES = 6


class Turns:
    """Runs slices, and counts them."""

    def __init__(self) -> None:
        self.slices = 0

    async def make(self, kept: Iterable[Entries]) -> None:
        for entries in kept:
            for _ in entries.slices():
                self.slices += 1


def logprobs(tokens: int) -> list[Logprob]:
    draw = random.Random(7)
    values = [1e-9, -9999.0, -0.0, -1.25, *(-draw.random() for _ in range(9))]

    def entry(number: int) -> dict[str, Any]:
        text = ("é", "\n", '"', "a", "�")[number % 5]
        return {"token": text, "logprob": draw.choice(values), "bytes": list(text.encode())}

    return [
        Logprob(**entry(number), top_logprobs=[LogprobTopLogprob(**entry(other)) for other in range(EACH)])
        for number in range(tokens)
    ]


def text_of(entries: list[Logprob] | None) -> ResponseOutputText:
    return ResponseOutputText(text="x", annotations=[], type="output_text", logprobs=entries)


def message_of(*texts: ResponseOutputText) -> ResponseOutputMessage:
    return ResponseOutputMessage(id="m", content=list(texts), role="assistant", status="completed", type="message")


class Response(BaseModel):
    output: list[Any]


class Completed(BaseModel):
    type: str = "response.completed"
    response: Response


def events(text: ResponseOutputText) -> list[BaseModel]:
    where = {"sequence_number": 1, "output_index": 0}
    reasoning = ResponseReasoningItem(id="r", summary=[], type="reasoning")
    return [
        ResponseContentPartDoneEvent(
            type="response.content_part.done", item_id="m", content_index=0, part=text, **where
        ),
        ResponseOutputItemDoneEvent(type="response.output_item.done", item=message_of(text), **where),
        Completed(response=Response(output=[reasoning, message_of(text_of([]), text)])),
    ]


@pytest.mark.parametrize("number", range(3))
def test_an_event_of_a_stream_is_encoded_in_slices_to_the_same_json(number: int) -> None:
    text = text_of(logprobs(TOKENS))
    turns = Turns()
    event = events(text)[number]
    expected = event.model_dump_json(by_alias=True)
    body = msgspec.json.encode(asyncio.run(event_body(event, turns.make)))
    assert json.loads(body) == json.loads(expected)
    assert turns.slices == SLICES
    assert event.model_dump_json(by_alias=True) == expected, "the event is as it was"


@pytest.mark.parametrize("tokens", [0, SLICE_ENTRIES // EACH])
def test_an_event_with_few_log_probabilities_takes_no_turns(tokens: int) -> None:
    turns = Turns()
    for event in events(text_of(logprobs(tokens) or None)):
        assert asyncio.run(event_body(event, turns.make)) == event.model_dump(mode="json", by_alias=True)
    assert not turns.slices


def test_the_name_that_is_patched_is_there() -> None:
    assert missing(RESPONSE_NAMES) == []


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_whole_answer_is_made_in_slices_and_is_what_vllm_makes(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    import importlib

    from vllm.logprobs import Logprob as TokenLogprob

    owner: Any = importlib.import_module(RESPONSES_SERVING).OpenAIServingResponses
    (name,) = RESPONSE_NAMES
    called = name.path.rpartition(".")[2]
    monkeypatch.setattr(owner, called, getattr(owner, called))
    serving = object.__new__(owner)
    serving.return_tokens_as_token_ids = False
    draw = random.Random(5)
    tokens = [draw.randrange(2000) for _ in range(TOKENS)]
    entries = [
        {one: TokenLogprob(-draw.random(), 1, f"é{one}") for one in (token, *draw.sample(range(2000, 9000), EACH - 1))}
        for token in tokens
    ]

    def answer() -> Response:
        made = getattr(serving, called)(token_ids=tokens, logprobs=entries, tokenizer=None, top_logprobs=EACH)
        return Response(output=[message_of(text_of(None), text_of(made))])

    expected = answer().model_dump_json(by_alias=True)
    response_entries.install()
    kept = keep_entries(is_whole)
    turns = Turns()
    response = answer()
    assert len(kept) == is_whole
    asyncio.run(turns.make(kept))
    assert json.loads(encoded(response, kept)) == json.loads(expected)
    assert turns.slices == SLICES * is_whole
    keep_entries(is_whole=False)
