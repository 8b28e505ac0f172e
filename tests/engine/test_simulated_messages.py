"""What the simulated engine answers to Messages requests, read by the types of Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.requires import requires

requires("vllm")  # with it comes Anthropic's SDK

from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from serve_app.core.anthropic import chat_body  # noqa: E402
from serve_app.engine.simulated import SimulatedEngine  # noqa: E402
from serve_app.transport import EngineInfo, Frame, Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402
from tests.engine.simulated_engine import HELLO, MadeUpTime, document, pieces, run, submit  # noqa: E402

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def asked(tokens: int = 9, **more: Any) -> dict[str, Any]:
    return chat_body(Operation.MESSAGES, HELLO | {"model": "sim", "max_tokens": tokens} | more)


def events(body: dict[str, Any]) -> list[Any]:
    text = b"".join(frame.body for frame in pieces(Operation.MESSAGES, body)).decode()
    found = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert name == f"event: {found[-1].type}"
    return found


@pytest.mark.parametrize("stops", [None, ["ba", "ko", "ri"]], ids=["cut", "stopped"])
def test_a_stream_has_the_events_of_the_whole_message(stops: list[str] | None) -> None:
    whole = Message.model_validate(document(Operation.MESSAGES, asked(40, stop_sequences=stops)), strict=True)
    begin, text_begin, *deltas, text_end, end, last = events(asked(40, stop_sequences=stops, stream=True))
    assert [begin.type, text_begin.type] == ["message_start", "content_block_start"]
    assert [text_end.type, end.type, last.type] == ["content_block_stop", "message_delta", "message_stop"]
    (block,) = whole.content
    assert block.type == "text"
    assert "".join(event.delta.text for event in deltas) == block.text
    assert (begin.message.id, begin.message.usage.input_tokens) == (whole.id, whole.usage.input_tokens)
    assert (end.delta.stop_reason, end.delta.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert end.usage.output_tokens == whole.usage.output_tokens
    if stops is None:
        assert (whole.stop_reason, len(deltas)) == ("max_tokens", 40)  # an event for every token
    else:
        assert whole.stop_reason == "stop_sequence"
        assert whole.stop_sequence in stops


def test_the_text_is_that_of_the_chat() -> None:
    of_chat = document(Operation.CHAT, HELLO | {"max_tokens": 9})["choices"][0]["message"]["content"]
    assert document(Operation.MESSAGES, asked())["content"] == [{"type": "text", "text": of_chat}]


def test_tokens_are_counted_as_those_of_the_prompt() -> None:
    body = chat_body(Operation.MESSAGE_TOKENS, HELLO | {"model": "sim", "system": "Be brief."})
    counted = document(Operation.MESSAGE_TOKENS, body)
    answered = document(Operation.MESSAGES, asked(system="Be brief."))
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}


def frames(request: Submit) -> list[Frame]:
    async def collect(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        return [frame async for frame in engine.run(request)]

    found: list[Frame] = run(collect)
    return found


@pytest.mark.parametrize("had", range(1, 9))
def test_a_stream_that_another_engine_continues_has_the_bytes_of_one(had: int) -> None:
    request = submit(Operation.MESSAGES, asked(stream=True))
    undisturbed = frames(request)
    assert len(undisturbed) == 9
    groups = [group for frame in undisturbed[:had] for group in frame.groups]
    rest = frames(msgspec.structs.replace(request, groups=groups, events=len(groups)))
    assert b"".join(frame.body for frame in undisturbed[:had] + rest) == b"".join(frame.body for frame in undisturbed)
