"""vLLM's streams as frames: an error before anything of the answer is a status, a later one an event in our format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from vllm.exceptions import VLLMValidationError

from serve_app.engine.token_recorder import TokenRecorder
from serve_app.engine.vllm_adapter.engine import stream_frames
from serve_app.engine.vllm_adapter.serving import responses_events
from serve_app.transport import Frame, Submit
from serve_app.types import Operation

SUBMIT = Submit(1, "r", Operation.CHAT, {"model": "m", "logit_bias": {"9999999": 1}})
CHUNK = 'data: {"id":"x"}\n\n'
REFUSED = (
    'data: {"error": {"message": "out of range", "type": "BadRequestError", "param": "logit_bias", "code": 400}}\n\n'
)
ERROR = {"message": "out of range", "type": "invalid_request_error", "param": "logit_bias", "code": None}


class Created(BaseModel):
    type: str = "response.created"


class Delta(BaseModel):
    type: str = "response.output_text.delta"


def frames(*texts: str, error: Exception | None = None) -> list[Frame]:
    async def events() -> AsyncGenerator[str, None]:
        for text in texts:
            yield text
        if error is not None:
            raise error

    async def collect() -> list[Frame]:
        return [frame async for frame in stream_frames(events(), TokenRecorder(1, ()), SUBMIT)]

    return asyncio.run(collect())


def test_an_error_in_place_of_the_first_event_is_a_status() -> None:
    (frame,) = frames(REFUSED, "data: [DONE]\n\n")
    assert (frame.status, frame.media) == (400, "json")
    assert json.loads(frame.body) == {"error": ERROR}
    assert frame.usage is not None


def test_an_error_raised_before_the_first_event_is_a_status() -> None:
    (frame,) = frames(error=VLLMValidationError("out of range", parameter="logit_bias"))
    assert (frame.status, json.loads(frame.body)) == (400, {"error": ERROR})


def test_an_error_after_the_first_event_is_an_event_in_openai_s_format() -> None:
    first, second, third, last = frames(CHUNK, REFUSED, "data: [DONE]\n\n")
    assert (first.status, first.media, first.body) == (200, "sse", CHUNK.encode())
    assert (second.status, json.loads(second.body.removeprefix(b"data: "))) == (0, {"error": ERROR})
    assert third.body == b"data: [DONE]\n\n"
    assert last.usage is not None


def test_a_responses_stream_begins_with_the_first_output() -> None:
    """Else an error that the engine finds could be no status any more."""

    async def events() -> AsyncGenerator[BaseModel, None]:
        yield Created()
        yield Delta()

    async def collect() -> list[str]:
        return [text async for text in responses_events(events())]

    (text,) = asyncio.run(collect())
    assert text.index("event: response.created") < text.index("event: response.output_text.delta")
