"""Tool calls (hermes format) and structured output: whatever the model says has to fit what was asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from tests.e2e import prompts
from tests.e2e.stack import TINY

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
COUNT: dict[str, Any] = {
    "type": "object",
    "properties": {"item": {"type": "string", "enum": ["letter", "window"]}, "limit": {"type": "integer"}},
    "required": ["item", "limit"],
    "additionalProperties": False,
}
# The second without `strict`, as most clients send it: a call that is demanded satisfies its schema all the same.
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "count_items", "parameters": COUNT}},
]
SCHEMAS = {"get_weather": WEATHER, "count_items": COUNT}
NAMED: Any = {"type": "function", "function": {"name": "count_items"}}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ROOM = 400  # tokens: a model may put a hundred of white space around a short answer
LETTER: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 300}},  # many more tokens than are asked for
    "required": ["text"],
    "additionalProperties": False,
}


def test_a_named_tool_is_the_one_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY, messages=prompts.chat(1), tools=TOOLS, tool_choice=NAMED, max_tokens=ROOM, temperature=0
    )

    (choice,) = answer.choices
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "count_items"
    jsonschema.validate(json.loads(call.function.arguments), COUNT)
    assert choice.finish_reason in ("stop", "tool_calls")


def test_a_required_tool_call_fits_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(2),
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=ROOM,
        temperature=0,
    )

    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.id
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_streamed_tool_call_adds_up_to_the_same_arguments(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": TINY,
        "messages": prompts.chat(2),
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": ROOM,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls
    name = ""
    arguments = ""
    ids = set()
    for chunk in client.chat.completions.create(stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.index == 0
            ids |= {call.id} - {None}
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""

    assert whole
    assert name == whole[0].function.name
    assert json.loads(arguments) == json.loads(whole[0].function.arguments)
    assert len(ids) == 1


def test_the_sdk_s_stream_helper_understands_the_tool_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=TINY,
        messages=prompts.chat(3),
        tools=TOOLS[:1],  # the SDK parses arguments of strict tools alone
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=ROOM,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()

    calls = final.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.parsed_arguments == json.loads(calls[0].function.arguments)


# What a model says by itself that was trained to call these tools; the built-in one is made to.
SAYS_A_CALL = (
    r'(of|water): <tool_call>\{"name": "count_items", '
    r'"arguments": \{"item": "(letter|window)", "limit": [1-9]\}\}</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_the_text_is_parsed_as_hermes_writes_it(client: openai.OpenAI, stream: bool) -> None:
    """With tool_choice "auto" nothing but the parser makes a tool call of the text."""
    asked: dict[str, Any] = {
        "model": TINY,
        "messages": prompts.chat(4),
        "tools": TOOLS[1:],  # vLLM joins the grammar of a strict one with the given grammar
        "tool_choice": "auto",
        "max_tokens": ROOM,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"regex": SAYS_A_CALL}},
    }
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]

    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "count_items"
    jsonschema.validate(json.loads(call.function.arguments), COUNT)
    assert "<tool_call>" not in (choice.message.content or "")
    assert (choice.message.content or "").strip() in ("of:", "water:")


def test_a_tool_s_result_goes_back_in(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "count_items", "arguments": '{"item": "letter"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
    ]
    answer = client.chat.completions.create(
        model=TINY, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=8, temperature=0
    )

    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_json_schema_output_parses_and_validates(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for number in range(5):
        answer = client.chat.completions.create(
            model=TINY, messages=prompts.chat(number), response_format=wanted, max_tokens=ROOM, temperature=0
        )
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)


def test_json_schema_output_streams_to_the_same_object(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": TINY,
        "messages": prompts.chat(1),
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        "max_tokens": ROOM,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **asked)]

    assert "".join(pieces) == whole


def test_the_sdk_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    class Light(pydantic.BaseModel):
        colour: str = pydantic.Field(max_length=10)
        level: int

    answer = client.chat.completions.parse(
        model=TINY, messages=prompts.chat(6), response_format=Light, max_tokens=ROOM, temperature=0
    )

    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Light)
    assert len(parsed.colour) <= 10


def test_json_object_output_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(3),
        response_format={"type": "json_object"},
        max_tokens=ROOM,
        temperature=0,
    )

    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_vllm_s_own_structured_outputs_pass(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(8),
        max_tokens=30,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["mountain", "ocean"]}},
    )

    assert answer.choices[0].message.content in ("mountain", "ocean")


def test_a_schema_that_is_none_is_the_client_s_error(client: openai.OpenAI) -> None:
    broken: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=TINY, messages=prompts.chat(9), response_format=broken, max_tokens=5)


def test_a_tool_choice_without_such_a_tool_is_the_client_s_error(client: openai.OpenAI) -> None:
    unknown: Any = {"type": "function", "function": {"name": "unknown"}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=TINY, messages=prompts.chat(9), tools=TOOLS, tool_choice=unknown, max_tokens=5
        )


# Requests of field reports: 58 came for `multipleOf: 1000`, a number for the arguments of a tool without parameters.
THOUSANDS: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "multipleOf": 1000}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": THOUSANDS}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": THOUSANDS}}],
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
        ({"extra_body": {"structured_outputs": {"json": THOUSANDS}}}, "structured_outputs.json"),
    ],
)
def test_a_keyword_that_no_grammar_enforces_is_refused_by_its_path(
    client: openai.OpenAI, asked: dict[str, Any], path: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=TINY, messages=prompts.chat(1), max_tokens=60, **asked)

    assert refused.value.param == f"{path}.properties.n.multipleOf"
    assert "multipleOf" in refused.value.message


@pytest.mark.parametrize("parameters", [{}, {"title": "FArgs"}, {"type": ["object", "null"], "properties": {}}])
def test_a_demanded_call_has_an_object_of_arguments_whatever_its_schema_leaves_out(
    client: openai.OpenAI, parameters: dict[str, Any]
) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = client.chat.completions.create(
        model=TINY,
        messages=prompts.chat(1),
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=ROOM,
        temperature=0,
    )

    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize("max_tokens", [15, 40, 90])
def test_calls_that_are_cut_are_the_same_whole_and_streamed(client: openai.OpenAI, max_tokens: int) -> None:
    asked: dict[str, Any] = {
        "model": TINY,
        "messages": prompts.chat(2),
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_body": {"min_tokens": max_tokens},  # after a whole call it has to begin another one
    }
    whole = client.chat.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked) if chunk.choices]
    streamed = dict[int, list[str]]()
    for call in (call for piece in pieces for call in piece.delta.tool_calls or ()):
        assert call.function is not None
        known = streamed.setdefault(call.index, ["", ""])
        known[0] += call.function.name or ""
        known[1] += call.function.arguments or ""

    assert whole.finish_reason == pieces[-1].finish_reason == "length"
    assert (whole.message.content or "") == "".join(piece.delta.content or "" for piece in pieces)
    calls: list[Any] = list(whole.message.tool_calls or ())
    assert [[call.function.name, call.function.arguments] for call in calls] == list(streamed.values())


@pytest.mark.parametrize("stream", [False, True])
def test_the_item_of_a_response_s_call_that_is_cut_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    tool: Any = {"type": "function", "name": "letter", "parameters": LETTER, "strict": True}
    asked: dict[str, Any] = {
        "model": TINY,
        "input": "Write!",
        "tools": [tool],
        "tool_choice": "required",
        "max_output_tokens": 20,
        "temperature": 0,
    }
    answer: Any = client.responses.create(**asked)
    if stream:
        events: list[Any] = list(client.responses.create(stream=True, **asked))
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.status for item in items] == ["incomplete"]
        answer = events[-1].response

    assert answer.status == "incomplete"
    assert [(item.type, item.status) for item in answer.output] == [("function_call", "incomplete")]
