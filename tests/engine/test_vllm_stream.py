"""vLLM's streams as frames: an error before anything of the answer is a status, a later one an event in our format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.exceptions import VLLMValidationError

from serve_app.engine.token_recorder import TokenRecorder
from serve_app.engine.vllm_adapter.engine import answer_frames
from serve_app.engine.vllm_adapter.serving import request_of, responses_events, with_tier
from serve_app.errors import BadRequest
from serve_app.transport import Frame, Submit, TokenUsage
from serve_app.types import Operation

SUBMIT = Submit(1, "r", Operation.CHAT, {"model": "m", "logit_bias": {"9999999": 1}})
CHUNK = 'data: {"id":"x"}\n\n'
REFUSED = (
    'data: {"error": {"message": "out of range", "type": "BadRequestError", "param": "logit_bias", "code": 400}}\n\n'
)
ERROR = {
    "message": "out of range",
    "type": "invalid_request_error",
    "param": "logit_bias",
    "code": "invalid_request_error",
}


class Response(BaseModel):
    status: str


class Created(BaseModel):
    type: str = "response.created"
    response: Response = Response(status="in_progress")


class Completed(BaseModel):
    type: str = "response.completed"
    response: Response = Response(status="incomplete")


class Delta(BaseModel):
    type: str = "response.output_text.delta"


def frames(*texts: str, error: Exception | None = None, recorded: list[list[int]] | None = None) -> list[Frame]:
    async def events() -> AsyncGenerator[str, None]:
        for text in texts:
            yield text
        if error is not None:
            raise error

    async def start() -> AsyncGenerator[str, None]:
        return events()

    recorder = TokenRecorder(1, (), usage_by_call=recorded or [])

    async def collect() -> list[Frame]:
        return [frame async for frame in answer_frames(start, recorder, SUBMIT)]

    return asyncio.run(collect())


def test_an_error_in_place_of_the_first_event_is_a_status() -> None:
    (frame,) = frames(REFUSED, "data: [DONE]\n\n")
    assert (frame.status, frame.media) == (400, "json")
    assert json.loads(frame.body) == {"error": ERROR}
    assert frame.usage is not None


def test_the_first_frame_of_a_stream_has_the_prompt_s_tokens_and_no_other_has() -> None:
    first, second, last = frames(CHUNK, CHUNK, recorded=[[9, 1, 4]])
    assert first.prompt == TokenUsage(9, 1, 4)
    assert (second.prompt, last.prompt, last.usage) == (None, None, TokenUsage(9, 1, 4))


def test_an_error_raised_before_the_first_event_is_a_status() -> None:
    (frame,) = frames(error=VLLMValidationError("out of range", parameter="logit_bias"))
    assert (frame.status, json.loads(frame.body)) == (400, {"error": ERROR})


def test_an_error_after_the_first_event_is_an_event_in_openai_s_format() -> None:
    first, second, third, last = frames(CHUNK, REFUSED, "data: [DONE]\n\n")
    assert (first.status, first.media, first.body) == (200, "sse", CHUNK.encode())
    assert (second.status, json.loads(second.body.removeprefix(b"data: "))) == (0, {"error": ERROR})
    assert third.body == b"data: [DONE]\n\n"
    assert last.usage is not None


async def no_entries(entries: Iterable[Any]) -> None:
    assert not list(entries)


def responses(*sent: BaseModel) -> list[str]:
    async def events() -> AsyncGenerator[BaseModel, None]:
        for event in sent:
            yield event

    async def collect() -> list[str]:
        return [text async for text in responses_events(events(), no_entries)]

    return asyncio.run(collect())


def test_a_responses_stream_begins_with_the_first_output() -> None:
    """Else an error that the engine finds could be no status any more."""
    (text,) = responses(Created(), Delta())
    assert text.index("event: response.created") < text.index("event: response.output_text.delta")


def test_a_response_that_was_cut_off_ends_as_incomplete_and_none_is_stored() -> None:
    cut_off = Completed()
    complete = Completed(response=Response(status="completed"))
    for event, kind in ((cut_off, "response.incomplete"), (complete, "response.completed")):
        (text,) = responses(event)
        named, _, data = text.partition("\ndata: ")
        assert named == f"event: {kind}"
        body = json.loads(data)
        assert (body["type"], body["response"]["store"]) == (kind, False)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "is_strict"),
    [
        ("required", True),
        ({"type": "function", "function": {"name": "f"}}, True),
        ("auto", False),
        ("none", False),
    ],
)
def test_a_call_that_is_demanded_satisfies_the_schema(choice: Any, is_strict: bool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": choice}
    asked = request_of(Submit(1, "r", Operation.CHAT, body), True)
    assert [tool.function.strict is True for tool in asked.tools] == [is_strict]


def test_a_response_s_tool_that_is_demanded_satisfies_its_schema() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    body = {"model": "m", "input": "x", "tools": [tool], "tool_choice": "required"}
    asked = request_of(Submit(1, "r", Operation.RESPONSES, body), True)
    assert [tool.strict for tool in asked.tools] == [True]


def test_a_schema_that_no_grammar_enforces_is_refused_before_anything_is_made_of_it() -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"n": {"not": {}}}}}}
    for operation, prompt in ((Operation.CHAT, {"messages": []}), (Operation.COMPLETION, {"prompt": "x"})):
        with pytest.raises(BadRequest) as refused:
            request_of(Submit(1, "r", operation, {"model": "m", "response_format": wrong, **prompt}), True)
        assert refused.value.param == "response_format.json_schema.schema.properties.n.not"


def test_the_tier_that_served_a_stream_is_in_its_first_event() -> None:
    async def events() -> AsyncGenerator[str, None]:
        yield CHUNK
        yield CHUNK

    async def collect() -> list[str]:
        reported = with_tier(events(), "flex")
        assert not isinstance(reported, BaseModel)
        return [text async for text in reported]

    first, second = asyncio.run(collect())
    assert json.loads(first.removeprefix("data: ")) == {"id": "x", "service_tier": "flex"}
    assert second == CHUNK
