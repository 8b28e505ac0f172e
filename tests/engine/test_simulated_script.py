"""What the simulated engine plays by script, read by the types of both SDKs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from tests.requires import requires

requires("vllm")  # with it comes Anthropic's SDK

from anthropic.types import Message, RawMessageStreamEvent  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from serve_app.core.anthropic import chat_body  # noqa: E402
from serve_app.engine.simulated import SimulatedEngine  # noqa: E402
from serve_app.errors import BadRequest  # noqa: E402
from serve_app.settings import SimulatedSettings  # noqa: E402
from serve_app.transport import EngineInfo, Frame  # noqa: E402
from serve_app.types import Operation  # noqa: E402
from tests.engine.simulated_engine import MadeUpTime, document, pieces, run, submit  # noqa: E402

ARGUMENTS = {"path": "notes.txt", "lines": [1, 20]}
CALLING = {
    "reasoning": "It is in the notes.",
    "text": "I read them.",
    "calls": [{"name": "read", "arguments": ARGUMENTS}],
}
SAYING = {"text": "They say hello."}
SCRIPT = {"script": [CALLING, SAYING]}
TOOL = {"name": "read", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
EVENTS: dict[Operation, TypeAdapter[Any]] = {
    Operation.MESSAGES: TypeAdapter(RawMessageStreamEvent),
    Operation.CHAT: TypeAdapter(ChatCompletionChunk),
    Operation.RESPONSES: TypeAdapter(ResponseStreamEvent),
}


def asked(operation: Operation, *answers: str, tools: bool = True, **more: Any) -> dict[str, Any]:
    """A conversation with these answers in it."""
    turns = [USER]
    for text in answers:
        turns += [{"role": "assistant", "content": text}, USER]
    if operation is Operation.RESPONSES:
        held = [{"type": "function", **TOOL}] if tools else []
        return {"model": "sim", "input": turns, "tools": held, **more}
    body = {"model": "sim", "max_tokens": 99, "messages": turns, "tools": [TOOL] if tools else [], **more}
    return chat_body(Operation.MESSAGES, body)


def events(operation: Operation, body: dict[str, Any]) -> list[Any]:
    text = b"".join(frame.body for frame in pieces(operation, {**body, "stream": True}, simulated=SCRIPT)).decode()
    lines = [event.rpartition("\n")[2].removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    return [EVENTS[operation].validate_json(line) for line in lines if line != "[DONE]"]


def whole(operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
    return document(operation, body, simulated=SCRIPT)


def text_of(operation: Operation, body: dict[str, Any]) -> str:
    """The text of a whole answer."""
    found = whole(operation, body)
    if operation is Operation.CHAT:
        return str(found["choices"][0]["message"]["content"])
    if operation is Operation.MESSAGES:
        return "".join(block.text for block in Message.model_validate(found).content if block.type == "text")
    return Response.model_validate(found).output_text


def test_a_message_has_a_block_for_thoughts_text_and_call_whole_and_streamed() -> None:
    body = asked(Operation.MESSAGES)
    message = Message.model_validate(whole(Operation.MESSAGES, body), strict=True)
    thought, text, call = message.content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert (thought.thinking, text.text, call.name, call.input) == (
        CALLING["reasoning"], CALLING["text"], "read", ARGUMENTS,
    )  # fmt: skip
    assert message.stop_reason == "tool_use"

    streamed = events(Operation.MESSAGES, body)
    begun = [event.content_block for event in streamed if event.type == "content_block_start"]
    assert [block.type for block in begun] == ["thinking", "text", "tool_use"]
    deltas = [(event.index, event.delta) for event in streamed if event.type == "content_block_delta"]
    assert "".join(delta.thinking for _, delta in deltas if delta.type == "thinking_delta") == thought.thinking
    assert [(at, delta.signature) for at, delta in deltas if delta.type == "signature_delta"] == [
        (0, thought.signature)
    ]
    assert "".join(delta.text for _, delta in deltas if delta.type == "text_delta") == text.text
    given = "".join(delta.partial_json for _, delta in deltas if delta.type == "input_json_delta")
    assert (begun[2].id, json.loads(given)) == (call.id, ARGUMENTS)
    assert [event.index for event in streamed if event.type == "content_block_stop"] == [0, 1, 2]
    end = streamed[-2]
    assert (end.delta.stop_reason, end.usage.output_tokens) == ("tool_use", message.usage.output_tokens)
    assert streamed[-1].type == "message_stop"


def test_a_chat_has_reasoning_content_and_calls_whole_and_streamed() -> None:
    body = asked(Operation.CHAT)
    choice = ChatCompletion.model_validate(whole(Operation.CHAT, body)).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    extra = choice.message.model_extra or {}
    assert (extra["reasoning"], choice.message.content) == (CALLING["reasoning"], CALLING["text"])
    assert json.loads(call.function.arguments) == ARGUMENTS

    deltas = [event.choices[0].delta for event in events(Operation.CHAT, body)]
    assert "".join(delta.content or "" for delta in deltas) == CALLING["text"]
    assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == CALLING["reasoning"]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert (parts[0].id, parts[0].function.name) == (call.id, "read")
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_response_has_an_item_for_each_whole_and_streamed() -> None:
    body = asked(Operation.RESPONSES)
    response = Response.model_validate(whole(Operation.RESPONSES, body), strict=True)
    thought, message, call = response.output
    assert (thought.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert (response.output_text, json.loads(call.arguments)) == (CALLING["text"], ARGUMENTS)
    assert response.status == "completed"

    streamed = events(Operation.RESPONSES, body)
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    assert [event.item for event in streamed if event.type == "response.output_item.done"] == response.output
    given = "".join(event.delta for event in streamed if event.type == "response.function_call_arguments.delta")
    assert given == call.arguments
    assert {event.item_id for event in streamed if hasattr(event, "item_id")} == {item.id for item in response.output}
    assert streamed[-1].type == "response.completed"
    assert streamed[-1].response.output == response.output


@pytest.mark.parametrize("operation", EVENTS)
def test_each_answer_is_the_next_turn_and_the_script_begins_again(operation: Operation) -> None:
    texts = [text_of(operation, asked(operation, *["before"] * turns)) for turns in range(4)]
    assert texts == [CALLING["text"], SAYING["text"]] * 2


@pytest.mark.parametrize("operation", EVENTS)
def test_a_request_without_the_tools_of_a_turn_gets_another(operation: Operation) -> None:
    assert text_of(operation, asked(operation, tools=False)) == SAYING["text"]


def test_items_of_one_answer_count_once() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "hello"}
    items = [USER, {"type": "reasoning", "summary": []}, call, call, output, output]
    assert text_of(Operation.RESPONSES, asked(Operation.RESPONSES) | {"input": items}) == SAYING["text"]


def test_an_answer_that_reaches_its_bound_is_cut() -> None:
    cut = whole(Operation.MESSAGES, asked(Operation.MESSAGES, max_tokens=1))
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 1)
    assert [block["type"] for block in cut["content"]] == ["thinking"]
    response = whole(Operation.RESPONSES, asked(Operation.RESPONSES, max_output_tokens=1))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole(Operation.CHAT, asked(Operation.CHAT, max_tokens=1))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("operation", EVENTS)
def test_another_engine_continues_a_stream_with_the_same_bytes(operation: Operation) -> None:
    body = asked(operation, stream=True)
    sent = pieces(operation, body, simulated=SCRIPT)
    groups = [group for frame in sent for group in frame.groups]
    at = len(groups) // 2

    async def continued(engine: SimulatedEngine, time: MadeUpTime, info: EngineInfo) -> list[Frame]:
        made = msgspec.structs.replace(submit(operation, body), groups=groups[:at], events=at)
        return [frame async for frame in engine.run(made)]

    rest = run(continued, simulated=SCRIPT)
    assert b"".join(frame.body for frame in [*sent[:at], *rest]) == b"".join(frame.body for frame in sent)


def test_several_answers_are_refused() -> None:
    (frame,) = pieces(Operation.CHAT, asked(Operation.CHAT) | {"n": 2}, simulated=SCRIPT)
    assert frame.status == BadRequest.status
    assert json.loads(frame.body)["error"]["param"] == "n"


@pytest.mark.parametrize(("script", "named"), [([{}], "script.0"), ([CALLING], "script"), ([{"says": "a"}], "says")])
def test_a_script_that_cannot_be_played_is_refused(script: Any, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        SimulatedSettings.model_validate({"script": script})
