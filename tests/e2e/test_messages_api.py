"""Anthropic's Messages API through its official SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.e2e import prompts
from tests.e2e.stack import SIMULATED, TINY, Stack
from tests.e2e.test_tools_and_schemas import COUNT, PERSON, ROOM, SCHEMAS, WEATHER
from tests.requires import requires

requires("vllm")  # with it comes Anthropic's SDK

import anthropic  # noqa: E402
from anthropic.types import Message, Usage  # noqa: E402

# The SDK has no argument for them any more.
GREEDY = {"temperature": 0}
GO_ON = GREEDY | {"ignore_eos": True}  # for a test that counts tokens: the model may end its answer before
ASKED: dict[str, Any] = {"model": TINY, "messages": [{"role": "user", "content": prompts.text(4)}]}
# The tools and the schema of the tests of chats, whose answers at temperature 0 are the same.
TOOLS: list[Any] = [
    {"name": "get_weather", "input_schema": WEATHER, "strict": True},
    {"name": "count_items", "input_schema": COUNT},
]
CALLED: dict[str, Any] = {
    "model": TINY,
    "messages": prompts.chat(2),
    "tools": TOOLS,
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": ROOM,
    "extra_body": GREEDY,
}


@pytest.fixture
def messages(stack: Stack) -> Iterator[anthropic.resources.Messages]:
    with anthropic.Anthropic(base_url=stack.base_url, api_key=stack.api_key, max_retries=0) as client:
        yield client.messages


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_tokens(usage: Usage) -> int:
    """All of them: `input_tokens` are those that were neither read from the cache nor put there."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def streamed(api: anthropic.resources.Messages, /, **asked: Any) -> Message:
    with api.stream(**asked) as stream:
        return stream.get_final_message()


def test_a_message_says_what_a_chat_says(messages: anthropic.resources.Messages, client: openai.OpenAI) -> None:
    message = messages.create(**ASKED, system="Be brief.", max_tokens=15, extra_body=GO_ON)
    turns: Any = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
    chat = client.chat.completions.create(model=TINY, messages=turns, max_tokens=15, temperature=0, extra_body=GO_ON)

    assert text_of(message) == chat.choices[0].message.content
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id == f"msg_{message._request_id}"
    assert chat.usage is not None
    assert message.usage.output_tokens == 15
    assert prompt_tokens(message.usage) == chat.usage.prompt_tokens


def test_a_stream_adds_up_to_the_whole_message(messages: anthropic.resources.Messages) -> None:
    whole = messages.create(**ASKED, max_tokens=20, extra_body=GO_ON)
    parts = streamed(messages, **ASKED, max_tokens=20, extra_body=GO_ON)

    assert text_of(parts) == text_of(whole)
    assert (parts.stop_reason, parts.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_demanded_call_has_arguments_of_its_schema_streamed_and_whole(
    messages: anthropic.resources.Messages,
) -> None:
    whole = messages.create(**CALLED)
    parts = streamed(messages, **CALLED)
    (call,) = (block for block in whole.content if block.type == "tool_use")
    (same,) = (block for block in parts.content if block.type == "tool_use")

    assert (whole.stop_reason, parts.stop_reason) == ("tool_use", "tool_use")
    jsonschema.validate(call.input, SCHEMAS[call.name])
    assert (same.name, same.input) == (call.name, call.input)


def test_the_result_of_a_tool_goes_back_into_the_conversation(messages: anthropic.resources.Messages) -> None:
    first = messages.create(**CALLED)
    (call,) = (block for block in first.content if block.type == "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
    turns: Any = [*CALLED["messages"], {"role": "assistant", "content": first.content}]
    turns.append({"role": "user", "content": [result]})
    second = messages.create(model=TINY, max_tokens=5, messages=turns, tools=TOOLS)

    assert second.usage.output_tokens > 0
    assert prompt_tokens(second.usage) > prompt_tokens(first.usage)


def test_an_answer_has_the_form_that_is_asked_for(messages: anthropic.resources.Messages) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": PERSON}}
    turns: Any = prompts.chat(1)
    message = messages.create(model=TINY, messages=turns, max_tokens=ROOM, output_config=form, extra_body=GREEDY)

    assert message.stop_reason == "end_turn"
    jsonschema.validate(json.loads(text_of(message)), PERSON)


@pytest.mark.parametrize("read", [lambda api, **asked: api.create(**asked), streamed], ids=["whole", "streamed"])
def test_a_stop_sequence_ends_the_answer_and_is_named(messages: anthropic.resources.Messages, read: Any) -> None:
    text = text_of(messages.create(**ASKED, max_tokens=20, extra_body=GO_ON))
    stop = text[8:11]
    message = read(messages, **ASKED, max_tokens=20, stop_sequences=[stop], extra_body=GO_ON)

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == text[: text.index(stop)]


def test_tokens_are_counted_as_an_answer_counts_them(messages: anthropic.resources.Messages) -> None:
    asked: Any = {"model": TINY, "messages": ASKED["messages"], "system": "Be brief.", "tools": TOOLS}
    counted = messages.count_tokens(**asked)
    usage = messages.create(**asked, max_tokens=1).usage

    assert counted.input_tokens == prompt_tokens(usage)


def test_an_answer_goes_on_behind_its_beginning(messages: anthropic.resources.Messages) -> None:
    text = text_of(messages.create(**ASKED, max_tokens=12, extra_body=GO_ON))
    begun: Any = [*ASKED["messages"], {"role": "assistant", "content": text}]
    rest = messages.create(model=TINY, messages=begun, max_tokens=8, extra_body=GO_ON)

    assert text + text_of(rest) == text_of(messages.create(**ASKED, max_tokens=20, extra_body=GO_ON))


def test_the_simulated_engine_answers_messages(messages: anthropic.resources.Messages, simulated: str) -> None:
    asked: Any = {"model": SIMULATED, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    assert text_of(streamed(messages, **asked)) == text_of(messages.create(**asked))


@pytest.mark.parametrize(
    ("fields", "expected", "kind", "named"),
    [
        ({"model": "no"}, anthropic.NotFoundError, "not_found_error", "no"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "invalid_request_error", "temperature"),
        ({"system": "river " * 9000}, anthropic.BadRequestError, "invalid_request_error", "prompt is too long"),
        ({"extra_body": {"priority": "critical"}}, anthropic.PermissionDeniedError, "permission_error", "priority"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_raises_its_own_exceptions(
    messages: anthropic.resources.Messages,
    fields: dict[str, Any],
    expected: type[anthropic.APIStatusError],
    kind: str,
    named: str,
    stream: bool,
) -> None:
    with pytest.raises(expected, match=named) as caught:
        messages.create(**{**ASKED, "max_tokens": 5, **fields}, stream=stream)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(stack: Stack) -> None:
    with (
        anthropic.Anthropic(base_url=stack.base_url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(**ASKED, max_tokens=1)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


def test_an_image_is_refused_by_a_model_that_reads_none(messages: anthropic.resources.Messages) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        messages.create(model=TINY, max_tokens=1, messages=[{"role": "user", "content": [image]}])
