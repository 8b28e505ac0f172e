"""Messages requests and answers beside vLLM's own: the same chat is asked for, and its answer converted by vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from tests.requires import requires

requires("vllm")

from anthropic.types import Message  # noqa: E402
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse  # noqa: E402

from serve_app.core.anthropic import chat_body  # noqa: E402
from serve_app.engine.vllm_adapter import continuing, messages  # noqa: E402
from serve_app.transport import Submit  # noqa: E402
from serve_app.types import Operation  # noqa: E402

USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
THOUGHT = {"type": "thinking", "thinking": "Which?", "signature": "s"}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [TEXT, IMAGE, {"type": "text", "text": "b"}]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"properties": {}}, "strict": True}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}

# What is compared: the fields of a chat that a Messages request can decide.
COMPARED = (
    "max_tokens", "stop", "temperature", "top_p", "top_k", "stream", "tool_choice", "reasoning_effort",
    "thinking_token_budget", "response_format", "tools", "messages",
)  # fmt: skip
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sampling": {"temperature": 0.3, "top_p": 0.9, "top_k": 4, "stop_sequences": ["x", "y"], "stream": True},
    "system": {"system": "Be brief."},
    "system_blocks": {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, TEXT, TEXT]},
    "inline_system": {"messages": [USER, {"role": "system", "content": [TEXT]}, USER]},
    "blocks": {"messages": [{"role": "user", "content": [TEXT, IMAGE, TEXT]}]},
    "one_block": {"messages": [{"role": "user", "content": [TEXT]}]},
    "tools": {
        "tools": [TOOL],
        "messages": [
            USER,
            {"role": "assistant", "content": [THOUGHT, TEXT, CALL]},
            {"role": "user", "content": [RESULT, TEXT]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "a"}, CALL]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
        ],
    },
    **{
        f"choice_{kind}": {"tools": [TOOL], "tool_choice": {"type": kind} | more}
        for kind, more in (("auto", {}), ("any", {"disable_parallel_tool_use": True}), ("none", {}))
    },
    "choice_tool": {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
    "thinking": {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 2048}},
    "no_thinking": {"thinking": {"type": "disabled"}},
    "form": {"output_config": {"effort": "high", "format": SCHEMA}},
}


def plain(request: ChatCompletionRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.model_dump_json(include=set(COMPARED)))
    found["stop"] = found["stop"] or None
    if not request.tools:
        found.pop("tool_choice")  # "none" and nothing mean the same then
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_the_chat_that_vllm_makes_of_it(name: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [USER]} | REQUESTS[name]
    ours = chat_body(Operation.MESSAGES, body)
    convert = AnthropicServingMessages.to_chat_completion_request
    theirs = convert(AnthropicMessagesRequest.model_validate(body))
    made = ChatCompletionRequest.model_validate(json.loads(json.dumps(ours)))
    assert plain(made) == plain(theirs)
    if "parallel_tool_calls" in ours:
        assert made.parallel_tool_calls == theirs.parallel_tool_calls


# Fields of vLLM's that steer the engine, or that only its other routes read (`http.contract.STRIPPED`).
LEFT_OUT = {
    "cache_salt", "ec_transfer_params", "kv_transfer_params", "mm_payload", "return_mm_kwargs", "vllm_xargs",
    "watermarking",
}  # fmt: skip


def test_every_field_of_vllm_s_request_has_a_decision() -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": [USER]}
    fields = AnthropicMessagesRequest.model_fields.keys()
    translated = {name for body in REQUESTS.values() for name in body} | asked.keys()
    assert fields - translated - LEFT_OUT == {"metadata", "chat_template_kwargs"}
    for name in LEFT_OUT:
        assert chat_body(Operation.MESSAGES, {**asked, name: "x"}) == chat_body(Operation.MESSAGES, asked)


def serving(*, merges: bool = False) -> Any:
    """vLLM's object without an engine."""
    made = object.__new__(AnthropicServingMessages)
    vars(made).update({"_merge_inline_system": merges, "_disabled_thinking_effort": "low"})
    return made


def answer(arguments: str | None = None, reason: str = "stop", **message: Any) -> ChatCompletionResponse:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    spoken = {"role": "assistant", **message} | ({} if arguments is None else {"tool_calls": [call]})
    choice = {"index": 0, "message": spoken, "finish_reason": reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    body = {"id": "chatcmpl-r1", "model": "m", "choices": [choice], "usage": usage}
    return ChatCompletionResponse.model_validate(body)


def whole(chat: ChatCompletionResponse) -> Message:
    body = messages.anthropic_answer(serving(), chat)
    assert isinstance(body, bytes)
    return Message.model_validate_json(body, strict=True)


def test_a_whole_answer_is_a_message_of_the_sdk() -> None:
    message = whole(answer(content="hi"))
    assert (message.id, message.stop_reason, message.stop_sequence) == ("msg_r1", "end_turn", None)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hi"}]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ('{"city": "Rome", "days": [1, 2', {"city": "Rome", "days": [1, 2]}),
        ("", {}),
        ("[1]", {}),
    ],
)
def test_a_call_that_was_cut_has_the_arguments_that_there_are(arguments: str, expected: dict[str, Any]) -> None:
    (block,) = whole(answer(arguments, "length")).content
    assert block.type == "tool_use"
    assert block.input == expected


async def chunks(*events: str) -> AsyncGenerator[str, None]:
    for event in events:
        yield event


def chunk(**delta: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    body = {"id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    return f"data: {json.dumps(body | {'usage': usage})}\n\n"


def streamed(*events: str) -> list[str]:
    async def collect() -> list[str]:
        found = messages.anthropic_answer(serving(), chunks(*events))
        assert isinstance(found, AsyncGenerator)
        return [event async for event in found]

    return asyncio.run(collect())


def test_a_stream_names_its_message_and_ends() -> None:
    begin, *_, last = streamed(chunk(role="assistant", content=""), chunk(content="hi"), "data: [DONE]\n\n")
    assert '"id":"msg_r1"' in begin
    assert last.startswith("event: message_stop")


@pytest.mark.parametrize("before", [(), (chunk(role="assistant", content=""), chunk(content="hi"))])
def test_an_error_of_vllm_s_stream_passes_as_it_is_and_is_the_last(before: tuple[str, ...]) -> None:
    error = 'data: {"error": {"message": "no", "code": 500}}\n\n'
    *_, last = streamed(*before, error, "data: [DONE]\n\n")
    assert last == error


def test_a_chunk_that_cannot_be_converted_is_an_error_of_the_request() -> None:
    (last,) = streamed('data: {"choices": "none"}\n\n')
    assert last.startswith(messages.ERROR_EVENT)
    assert json.loads(last.removeprefix("data:"))["error"]["code"] == 500


def submit(**more: Any) -> Submit:
    body = {"model": "m", "max_tokens": 5, "messages": [USER]} | more
    return Submit(1, "r1", Operation.MESSAGES, chat_body(Operation.MESSAGES, body))


def taken(asked: Submit, *, merges: bool = False) -> dict[str, Any]:
    return dict(asyncio.run(messages.as_model_takes(serving(merges=merges), asked)).body)


def test_a_template_that_wants_one_system_prompt_gets_one() -> None:
    asked = submit(system="A.", messages=[USER, {"role": "system", "content": "B."}, USER])
    assert taken(asked) == asked.body
    assert taken(asked, merges=True)["messages"] == [{"role": "system", "content": "A.B."}, USER, USER]
    assert len(asked.body["messages"]) == 4


def test_thinking_is_switched_off_by_the_effort_that_the_template_knows() -> None:
    assert taken(submit(thinking={"type": "disabled"}))["reasoning_effort"] == "low"


def test_signatures_of_thinking_are_the_same_in_every_run_of_a_request() -> None:
    def signatures() -> list[str]:
        identity = continuing.AnswerIdentity("r1", 1)
        token = continuing.identity_of_request.set(identity)
        try:
            return [continuing.AnswerUuids().uuid4().hex for _ in range(2)]
        finally:
            continuing.identity_of_request.reset(token)

    first = signatures()
    assert first == signatures()
    assert len(set(first)) == 2


def test_bodies_survive_the_way_to_an_engine() -> None:
    asked = submit(messages=[{"role": "user", "content": [TEXT, IMAGE]}])
    sent = msgspec.msgpack.encode(asked)
    assert msgspec.msgpack.decode(sent, type=Submit) == asked
