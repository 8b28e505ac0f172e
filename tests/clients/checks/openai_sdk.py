"""OpenAI's SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI

from tests.clients.checks.common import (
    ASK,
    BRIEF,
    BUSY,
    EMBED,
    LIMITED_KEY,
    LOW_KEY,
    MANY_TOKENS,
    PARTS,
    PAST,
    SLOW,
    TINY,
    TOKENS,
    WARM,
    WEATHER_TOOL,
    WRONG_KEY,
    WRONG_MODEL,
    Check,
    Weather,
    leaves,
    limited,
    raised,
    refused,
    stored,
)


def chat() -> None:
    client = OpenAI()
    assert client.chat.completions.create(model=TINY, messages=ASK, max_tokens=5).choices[0].message.content
    chunks = list(client.chat.completions.create(model=TINY, messages=ASK, max_tokens=5, stream=True))
    assert chunks[-1].choices[0].finish_reason


def usage() -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": ASK, "max_tokens": 5, "stream": True}
    *chunks, last = OpenAI().chat.completions.create(**asked, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert not last.choices
    assert last.usage.completion_tokens <= 5
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def errors() -> None:
    client = OpenAI(max_retries=0)
    missing = raised(openai.NotFoundError, lambda: client.chat.completions.create(model=WRONG_MODEL, messages=ASK))
    assert (missing.code, missing.param) == ("model_not_found", "model")
    stranger = OpenAI(api_key=WRONG_KEY)
    raised(openai.AuthenticationError, lambda: stranger.chat.completions.create(model=TINY, messages=ASK))
    for stream in (False, True):
        wrong = raised(
            openai.BadRequestError,
            lambda stream=stream: client.chat.completions.create(model=TINY, messages=ASK, top_p=7, stream=stream),
        )
        assert wrong.param == "top_p"
    wrong = raised(openai.BadRequestError, lambda: client.responses.create(model=TINY, input="a", top_p=7))
    assert wrong.param == "top_p"


def busy() -> None:
    with refused("queue_full", 2):
        low = OpenAI(api_key=LOW_KEY, max_retries=1)
        found = raised(openai.RateLimitError, lambda: low.chat.completions.create(model=BUSY, messages=ASK))
        assert found.code == "queue_full"
    with refused("deadline", 1):
        client = OpenAI(max_retries=1, default_headers=PAST)
        found = raised(openai.RateLimitError, lambda: client.chat.completions.create(model=BUSY, messages=ASK))
        assert found.code == "deadline"


def limited_key() -> None:
    def call(**more: Any) -> Any:
        asked: dict[str, Any] = {"model": TINY, "messages": ASK, "max_tokens": 5}
        return OpenAI(api_key=LIMITED_KEY, **more).chat.completions.create(**asked)

    assert limited(call, openai.RateLimitError, lambda: call(max_retries=0)).code == "rate_limit"


def leaving() -> None:
    with leaves():
        stream = OpenAI().chat.completions.create(model=SLOW, messages=ASK, max_tokens=MANY_TOKENS, stream=True)
        next(iter(stream))
        stream.close()
    asked: dict[str, Any] = {"model": TINY, "input": "Hello!", "max_output_tokens": 1900}
    with leaves(TINY), OpenAI().responses.stream(**asked, extra_body={"ignore_eos": True}) as events:
        next(event for event in events if event.type == "response.output_text.delta")


def tools() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        asked: dict[str, Any] = {"model": TINY, "messages": ASK, "max_tokens": TOKENS, "tools": [WEATHER_TOOL]}
        chunks = OpenAI().chat.completions.create(**asked, tool_choice=choice, stream=True)
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        first = [call for call in calls if call.index == 0]
        assert first[0].id
        assert [call.function.name for call in first if call.function.name] == ["weather"]
        Weather.model_validate_json("".join(call.function.arguments or "" for call in first))
    tool = openai.pydantic_function_tool(Weather)
    client = OpenAI()
    parsed = {"model": TINY, "messages": ASK, "max_tokens": TOKENS}
    with client.chat.completions.stream(**parsed, tools=[tool], tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def structured() -> None:
    asked: dict[str, Any] = {"model": TINY, "messages": ASK, "response_format": Weather, "max_tokens": TOKENS}
    assert isinstance(OpenAI().chat.completions.parse(**asked).choices[0].message.parsed, Weather)
    with OpenAI().chat.completions.stream(**asked) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


def plain(item: Any) -> Any:
    return item if isinstance(item, dict) else item.model_dump()


def chat_turns(called: Callable[[dict[str, Any]], Any]) -> None:
    """`called`: the message of the first answer, which calls the tool."""
    tool = openai.pydantic_function_tool(Weather)
    client = OpenAI()
    asked = {"model": TINY, "tools": [tool], "max_tokens": 5}
    history: list[Any] = [{"role": "developer", "content": BRIEF}, {"role": "user", "content": PARTS}]
    first = called(asked | {"messages": history, "tool_choice": "required", "max_tokens": TOKENS})
    results = [{"role": "tool", "tool_call_id": call.id, "content": WARM} for call in first.tool_calls]
    history += [first, *results]
    history += [client.chat.completions.create(**asked, messages=history).choices[0].message, *ASK]
    assert client.chat.completions.create(**asked, messages=history).usage.completion_tokens
    assert list(client.chat.completions.create(**asked, messages=stored([*map(plain, history)]), stream=True))


def response_turns(called: Callable[[dict[str, Any]], Any]) -> None:
    """`called`: the first response, which calls the tool."""
    tool = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    client = OpenAI()
    asked = {"model": TINY, "tools": [tool], "max_output_tokens": 5}
    parts = [{"type": "input_text", "text": part["text"]} for part in PARTS]
    history: list[Any] = [{"role": "developer", "content": BRIEF}, {"role": "user", "content": parts}]
    first = called(asked | {"input": history, "tool_choice": "required", "max_output_tokens": TOKENS})
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    history += first.output
    history += [{"type": "function_call_output", "call_id": call, "output": WARM} for call in calls]
    history += [*client.responses.create(**asked, input=history).output, *ASK]
    assert client.responses.create(**asked, input=history).output
    *_, last = client.responses.create(**asked, input=stored([*map(plain, history)]), stream=True)
    assert last.response.output


def turns() -> None:
    def streamed(asked: dict[str, Any]) -> Any:
        with OpenAI().chat.completions.stream(**asked) as stream:
            return stream.get_final_completion()

    def streamed_response(asked: dict[str, Any]) -> Any:
        with OpenAI().responses.stream(**asked) as stream:
            return stream.get_final_response()

    completions = OpenAI().chat.completions
    responses = OpenAI().responses
    for complete in (lambda asked: completions.create(**asked), lambda asked: completions.parse(**asked), streamed):
        chat_turns(lambda asked, complete=complete: complete(asked).choices[0].message)
    for respond in (lambda asked: responses.create(**asked), lambda asked: responses.parse(**asked), streamed_response):
        response_turns(respond)


def responses() -> None:
    client = OpenAI()
    events = list(client.responses.create(model=TINY, input="Hello!", max_output_tokens=5, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    asked: dict[str, Any] = {"model": TINY, "input": "Weather?", "max_output_tokens": TOKENS}
    assert isinstance(client.responses.parse(**asked, text_format=Weather).output_parsed, Weather)
    with client.responses.stream(**asked, text_format=Weather) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)
    assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens
    tool = openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}
    with client.responses.stream(**asked, tools=[tool], tool_choice="required") as stream:
        pieces = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        calls = [item for item in stream.get_final_response().output if item.type == "function_call"]
    Weather.model_validate_json(calls[0].arguments)
    assert pieces == "".join(call.arguments for call in calls)


def embeddings() -> None:
    found = OpenAI().embeddings.create(model=EMBED, input=["a", "b"])  # the SDK asks for base64
    plain = OpenAI().embeddings.create(model=EMBED, input=["a", "b"], encoding_format="float")
    assert [item.index for item in found.data] == [0, 1]
    for first, other in zip(found.data, plain.data, strict=True):
        assert max(abs(a - b) for a, b in zip(first.embedding, other.embedding, strict=True)) < 1e-3


CHECKS: dict[str, dict[str, Check]] = {
    "openai": {
        "chat, stream": chat,
        "usage of a stream": usage,
        "errors": errors,
        "429": busy,
        "limited key": limited_key,
        "leaving a stream": leaving,
        "tools, streamed": tools,
        "structured output": structured,
        "two turns": turns,
        "responses": responses,
        "embeddings": embeddings,
    }
}
