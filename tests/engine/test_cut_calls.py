"""Tool calls of an answer that `max_tokens` cut, with vLLM's own parsers: whole as streamed, and marked incomplete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.requires import requires

requires("vllm")

from openai.types.responses import (  # noqa: E402
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseOutputItemDoneEvent,
)
from transformers import AutoTokenizer  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.parser.parser_manager import ParserManager  # noqa: E402
from vllm.tool_parsers import structural_tag_registry  # noqa: E402

from serve_app.engine.tiny_model import ensure_tiny_model  # noqa: E402
from serve_app.engine.token_recorder import CutOff, TokenRecorder, recorder_of_request  # noqa: E402
from serve_app.engine.vllm_adapter import cut_calls  # noqa: E402
from serve_app.engine.vllm_adapter.serving import responses_events  # noqa: E402

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FIRST = '<tool_call>\n{"name": "f", "arguments": {"a": "one"}}\n</tool_call>'
CUT = [
    FIRST + '<tool_call>\n{"name": "f", "arguments": {"a": "tw',
    FIRST + "<tool_",
    FIRST,
    '<tool_call>{"name": "f", "arguments": {"a"',
    'Let me see. <tool_call>{"name": "f", "argu',
    "only a text",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(ensure_tiny_model()))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    cut_calls.install()
    yield
    recorder_of_request.set(None)


def asked(choice: str) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": choice}
    request = ChatCompletionRequest.model_validate(body)
    request.skip_special_tokens = False
    return request


def parser(tokenizer: Any, request: ChatCompletionRequest, name: str = "hermes") -> Any:
    made = ParserManager.get_parser(tool_parser_name=name, enable_auto_tools=True, tokenizer=tokenizer)
    assert made is not None
    return made(tokenizer, request.tools)


def whole(tokenizer: Any, request: ChatCompletionRequest, text: str, is_cut: bool) -> tuple[str, list[tuple[str, str]]]:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    recorder = TokenRecorder(1, ())
    if is_cut:
        recorder.cut[0] = CutOff(text, tokens, [1])
    recorder_of_request.set(recorder)
    _, content, calls = parser(tokenizer, request).parse(text, request, True, tokens)
    return content or "", [(call.name, call.arguments) for call in calls or ()]


def streamed(tokenizer: Any, request: ChatCompletionRequest, text: str) -> tuple[str, list[tuple[str, str]]]:
    """As a client joins the pieces of one token each."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    made = parser(tokenizer, request)
    content = ""
    calls = dict[int, list[str]]()
    reported = ""
    for number, token in enumerate(tokens, 1):
        now = tokenizer.decode(tokens[:number])
        delta = made.parse_delta(now[len(reported) :], [token], request, [1], finished=number == len(tokens))
        reported = now
        content += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            known = calls.setdefault(call.index, ["", ""])
            known[0] += call.function.name or ""
            known[1] += call.function.arguments or ""
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("text", CUT)
def test_a_cut_answer_has_the_same_calls_whole_and_streamed(tokenizer: Any, choice: str, text: str) -> None:
    assert whole(tokenizer, asked(choice), text, is_cut=True) == streamed(tokenizer, asked(choice), text)


def test_a_complete_first_call_is_not_lost_where_the_second_is_cut(tokenizer: Any) -> None:
    content, calls = whole(tokenizer, asked("required"), CUT[0], is_cut=True)

    assert content == ""
    assert [name for name, _ in calls] == ["f", "f"]
    assert json.loads(calls[0][1]) == {"a": "one"}


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_number_beyond_all_floats_is_written_as_json_has_it(tokenizer: Any, choice: str) -> None:
    """vLLM parses a whole answer's arguments and writes them again: they had `Infinity`, which is no JSON."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1e999, -1e999], "b": "\\"-Infinity"}}\n</tool_call>'
    for is_cut in (True, False):
        ((_, arguments),) = whole(tokenizer, asked(choice), text, is_cut)[1]
        assert arguments == '{"a": [1e999, -1e999], "b": "\\"-Infinity"}', is_cut


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_call_that_was_cut_before_its_arguments_gets_none(tokenizer: Any, is_cut: bool) -> None:
    """In a stream whose last piece has the name; vLLM makes up `{}`, which is right for a call that ends there."""
    recorder = TokenRecorder(1, ())
    if is_cut:
        recorder.cut[0] = CutOff("", [], [])
    recorder_of_request.set(recorder)
    request = asked("required")
    delta = parser(tokenizer, request).parse_delta('<tool_call>{"name": "f", ', [1], request, [1], finished=True)
    assert "".join(call.function.arguments or "" for call in delta.tool_calls) == ("" if is_cut else "{}")


def test_an_answer_that_was_not_cut_is_parsed_as_vllm_does(tokenizer: Any) -> None:
    assert whole(tokenizer, asked("required"), FIRST, is_cut=False) == ("", [("f", '{"a": "one"}')])
    assert whole(tokenizer, asked("required"), CUT[0], is_cut=False)[1] == []


def test_a_cut_choice_ends_with_length_whatever_it_called() -> None:
    recorder = TokenRecorder(2, ())
    recorder.cut[1] = CutOff("x", [1], [])
    recorder_of_request.set(recorder)
    choices = [SimpleNamespace(index=index, finish_reason="tool_calls") for index in range(2)]
    answer = cut_calls.with_finish_reasons(SimpleNamespace(choices=choices))
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "length"]


@pytest.mark.parametrize(("strict", "parameters"), [(False, {"type": "integer"}), (True, None), (True, {})])
def test_the_arguments_in_a_call_s_grammar_are_an_object(strict: bool, parameters: Any) -> None:
    """Of a tool without `strict` on a model with `tool_strict: false`, or beside a strict one."""
    function = {"name": "f", "parameters": parameters, "strict": strict}
    body = {"model": "m", "messages": [], "tools": [{"type": "function", "function": function}]}
    tools = ChatCompletionRequest.model_validate(body).tools
    tag = structural_tag_registry.get_model_structural_tag("hermes", tools, "required", reasoning=False)
    schemas = [one["content"]["json_schema"] for one in tag.model_dump()["format"]["tags"]]
    assert schemas == [{"type": "object"}] * 2


def call(arguments: str) -> ResponseFunctionToolCall:
    return ResponseFunctionToolCall(
        type="function_call", name="f", call_id="c", arguments=arguments, status="completed"
    )


def sent(items: list[ResponseFunctionToolCall], is_cut: bool) -> list[dict[str, Any]]:
    """The data of a response's events with these items."""
    recorder = TokenRecorder(1, ())
    if is_cut:
        recorder.cut[0] = CutOff("", [], [])
    done = [
        ResponseOutputItemDoneEvent(type="response.output_item.done", sequence_number=1, output_index=0, item=item)
        for item in items
    ]
    end = ResponseCompletedEvent.model_construct(type="response.completed", sequence_number=2, response=None)

    async def events() -> AsyncGenerator[Any, None]:
        for event in [*done, end]:
            yield event

    async def no_entries(kept: Iterable[Any]) -> None:
        assert not list(kept)

    async def collect() -> list[str]:
        return [text async for text in responses_events(events(), no_entries, recorder)]

    return [json.loads(text.partition("\ndata: ")[2]) for text in asyncio.run(collect())]


@pytest.mark.parametrize(
    ("last", "is_cut", "status"),
    [('{"a": 1', True, "incomplete"), ('{"a": 1}', True, "completed"), ('{"a": 1', False, "completed")],
)
def test_the_last_item_of_a_cut_response_is_incomplete_if_it_is(last: str, is_cut: bool, status: str) -> None:
    first = call("{}")
    second = call(last)
    events = sent([first, second], is_cut)

    assert [event["type"] for event in events][-1] == "response.completed"
    assert [event["item"]["status"] for event in events[:2]] == ["completed", status]
    assert second.status == status  # the same object is in the response that ends the stream
