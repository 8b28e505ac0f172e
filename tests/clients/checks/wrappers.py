"""LiteLLM and instructor, which wrap OpenAI's SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import litellm
import openai
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import field_validator

from tests.clients.checks.common import (
    ASK,
    BASE_URL,
    BRIEF,
    BUSY,
    EMBED,
    KEY,
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


def litellm_call(**more: Any) -> Any:
    asked = {"model": f"openai/{TINY}", "messages": ASK, "api_base": BASE_URL, "api_key": KEY, "max_tokens": 5}
    return litellm.completion(**asked | more)


def litellm_chat() -> None:
    assert litellm_call().choices[0].message.content
    assert litellm.stream_chunk_builder(list(litellm_call(stream=True))).choices[0].message.content


def litellm_usage() -> None:
    last = list(litellm_call(stream=True, stream_options={"include_usage": True}))[-1]
    assert 0 < last.usage.completion_tokens <= 5


def litellm_errors() -> None:
    raised(litellm.NotFoundError, lambda: litellm_call(model=f"openai/{WRONG_MODEL}"))
    raised(litellm.AuthenticationError, lambda: litellm_call(api_key=WRONG_KEY))
    assert "top_p" in str(raised(litellm.BadRequestError, lambda: litellm_call(top_p=7)))


def litellm_busy() -> None:
    with refused("queue_full", 2):
        busy = {"model": f"openai/{BUSY}", "api_key": LOW_KEY, "max_retries": 1}
        raised(litellm.RateLimitError, lambda: litellm_call(**busy))
    with refused("deadline", 1):
        busy = {"model": f"openai/{BUSY}", "extra_headers": PAST, "max_retries": 1}
        raised(litellm.RateLimitError, lambda: litellm_call(**busy))


def litellm_limited() -> None:
    key = {"api_key": LIMITED_KEY}
    limited(lambda: litellm_call(**key), litellm.RateLimitError, lambda: litellm_call(**key, max_retries=0))


def litellm_leaving() -> None:
    async def leave() -> None:
        asked = {"model": f"openai/{SLOW}", "messages": ASK, "api_base": BASE_URL, "api_key": KEY}
        stream = await litellm.acompletion(**asked, max_tokens=MANY_TOKENS, stream=True)
        await anext(aiter(stream))
        await stream.aclose()

    with leaves():
        asyncio.run(leave())


def litellm_tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        asked = {"tools": [WEATHER_TOOL], "tool_choice": choice, "max_tokens": TOKENS}
        whole = litellm.stream_chunk_builder(list(litellm_call(**asked, stream=True)))
        for answer in (whole, litellm_call(**asked)):
            Weather.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


def litellm_structured() -> None:
    answer = litellm_call(response_format=Weather, max_tokens=TOKENS)
    Weather.model_validate_json(answer.choices[0].message.content)


def litellm_responses() -> None:
    asked = {"model": f"openai/{TINY}", "input": "Hello!", "api_base": BASE_URL, "api_key": KEY}
    assert litellm.responses(**asked, max_output_tokens=5).output
    last = list(litellm.responses(**asked, max_output_tokens=5, stream=True))[-1]
    assert last.type in ("response.completed", "response.incomplete")


def litellm_chat_turns(stream: bool) -> None:
    asked = {"tools": [WEATHER_TOOL], "tool_choice": "none", "stream": stream}

    def answered(messages: list[Any], **more: Any) -> Any:
        answer = litellm_call(**asked | more, messages=messages)
        return (litellm.stream_chunk_builder([*answer]) if stream else answer).choices[0].message

    history: list[Any] = [{"role": "system", "content": BRIEF}, {"role": "user", "content": PARTS}]
    first = answered(history, tool_choice="required", max_tokens=TOKENS)
    results = [{"role": "tool", "tool_call_id": call.id, "content": WARM} for call in first.tool_calls]
    history += [first, *results]
    history += [answered(history), *ASK]
    assert answered(history).content
    assert answered(stored([one if isinstance(one, dict) else one.model_dump() for one in history])).content


def litellm_response_turns() -> None:
    tool = {"type": "function", **WEATHER_TOOL["function"]}
    asked = {"model": f"openai/{TINY}", "api_base": BASE_URL, "api_key": KEY, "tools": [tool]}

    def answered(history: list[Any], tokens: int = 5, **more: Any) -> Any:
        return litellm.responses(**asked | more, input=history, max_output_tokens=tokens).output

    history: list[Any] = [{"role": "developer", "content": BRIEF}, *ASK]
    history += answered(history, TOKENS, tool_choice="required")
    calls = [item.call_id for item in history[2:] if item.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": call, "output": WARM} for call in calls]
    history += [*answered(history), *ASK]
    assert answered(history)
    assert answered(stored([one if isinstance(one, dict) else one.model_dump() for one in history]))


def litellm_turns() -> None:
    for stream in (False, True):
        litellm_chat_turns(stream)
    litellm_response_turns()


def litellm_embeddings() -> None:
    found = litellm.embedding(model=f"openai/{EMBED}", input=["a", "b"], api_base=BASE_URL, api_key=KEY)
    assert len(found.data) == 2


def instructed(mode: instructor.Mode, max_retries: int = 0, **options: Any) -> Any:
    """A client, and the arguments of each of its calls."""
    return instructor.from_openai(OpenAI(max_retries=max_retries, **options), mode=mode)


def instructor_call(client: Any, model: str = TINY, **more: Any) -> Any:
    asked = {"model": model, "messages": ASK, "response_model": Weather, "max_tokens": TOKENS, "max_retries": 0}
    return client.chat.completions.create(**asked | more)


def instructor_errors() -> None:
    client = instructed(instructor.Mode.TOOLS)
    for kind, call in (
        (openai.NotFoundError, lambda: instructor_call(client, WRONG_MODEL)),
        (openai.AuthenticationError, lambda: instructor_call(instructed(instructor.Mode.TOOLS, api_key=WRONG_KEY))),
        (openai.BadRequestError, lambda: instructor_call(client, top_p=7)),
    ):
        cause = raised(InstructorRetryException, call).__cause__
        assert type(cause) is kind, repr(cause)
    assert cause.param == "top_p"


def instructor_busy() -> None:
    with refused("queue_full", 2):
        low = instructed(instructor.Mode.TOOLS, max_retries=1, api_key=LOW_KEY)
        raised(InstructorRetryException, lambda: instructor_call(low, BUSY))
    with refused("deadline", 1):
        late = instructed(instructor.Mode.TOOLS, max_retries=1, default_headers=PAST)
        raised(InstructorRetryException, lambda: instructor_call(late, BUSY))


def instructor_limited() -> None:
    unmodified = instructor.from_openai(OpenAI(api_key=LIMITED_KEY), mode=instructor.Mode.TOOLS)
    last = instructed(instructor.Mode.TOOLS, api_key=LIMITED_KEY)
    refusal = limited(lambda: instructor_call(unmodified), InstructorRetryException, lambda: instructor_call(last))
    assert isinstance(refusal.__cause__, openai.RateLimitError)


def instructor_tools() -> None:
    client = instructed(instructor.Mode.TOOLS)
    assert isinstance(instructor_call(client), Weather)
    asked = {"model": TINY, "messages": ASK, "response_model": Weather, "max_tokens": TOKENS}
    *_, last = client.chat.completions.create_partial(**asked)
    Weather.model_validate(last.model_dump())


def instructor_structured() -> None:
    assert isinstance(instructor_call(instructed(instructor.Mode.JSON_SCHEMA)), Weather)


def instructor_chat_turns() -> None:
    """The model's call is the first turn, and a model that its own checks refuse once has a second turn."""
    client = instructed(instructor.Mode.TOOLS)
    asked = {"model": TINY, "response_model": Weather, "max_tokens": TOKENS, "max_retries": 0}
    history: list[Any] = [{"role": "system", "content": BRIEF}, {"role": "user", "content": PARTS}]
    _, first = client.chat.completions.create_with_completion(messages=history, **asked)
    call = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": one.id, "content": WARM} for one in call.tool_calls]
    history += [call.model_dump(), *results, *ASK]  # it takes no objects
    for given in (history, stored(history)):
        assert isinstance(client.chat.completions.create(messages=given, **asked), Weather)


def refused_once() -> type[Weather]:
    """A model whose own check refuses its first object."""
    refusals = ["too warm"]

    class Checked(Weather):
        @field_validator("days")
        @classmethod
        def check(cls, days: int) -> int:
            if refusals:
                raise ValueError(refusals.pop())
            return days

    return Checked


def instructor_turns() -> None:
    instructor_chat_turns()
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        answer = instructor_call(instructed(mode), response_model=refused_once(), max_retries=1)
        assert isinstance(answer, Weather), mode
    client = instructed(instructor.Mode.RESPONSES_TOOLS)
    asked = {"model": TINY, "input": ASK, "response_model": refused_once(), "max_output_tokens": TOKENS}
    assert isinstance(client.responses.create(**asked, max_retries=1), Weather)


def instructor_responses() -> None:
    client = instructed(instructor.Mode.RESPONSES_TOOLS)
    asked = {"model": TINY, "input": "Weather?", "response_model": Weather, "max_output_tokens": TOKENS}
    assert isinstance(client.responses.create(**asked, max_retries=0), Weather)


CHECKS: dict[str, dict[str, Check]] = {
    "litellm": {
        "chat, stream": litellm_chat,
        "usage of a stream": litellm_usage,
        "errors": litellm_errors,
        "429": litellm_busy,
        "limited key": litellm_limited,
        "leaving a stream": litellm_leaving,
        "tools, streamed": litellm_tools,
        "structured output": litellm_structured,
        "two turns": litellm_turns,
        "responses": litellm_responses,
        "embeddings": litellm_embeddings,
    },
    "instructor": {
        "errors": instructor_errors,
        "429": instructor_busy,
        "limited key": instructor_limited,
        "tools, streamed": instructor_tools,
        "structured output": instructor_structured,
        "two turns": instructor_turns,
        "responses": instructor_responses,
    },
}
