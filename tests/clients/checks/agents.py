"""Agents: pydantic-ai and openai-agents."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from agents import Agent as OpenAIAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents import OpenAIResponsesModel as OpenAIAgentResponses
from openai import AsyncOpenAI
from pydantic_ai import Agent, Embedder, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

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

# An answer that ends by itself: openai-agents raises where a stream of Responses is cut by `max_tokens`.
END = {"structured_outputs": {"choice": ["Warm.", "Cold."]}}


def provider(**options: Any) -> OpenAIProvider:
    return OpenAIProvider(openai_client=AsyncOpenAI(**{"max_retries": 0} | options))


def pydantic_agent(model: str = TINY, tokens: int = TOKENS, client: Any = None, **more: Any) -> Any:
    settings = {"max_tokens": tokens, "parallel_tool_calls": False} | more.pop("settings", {})
    return Agent(OpenAIChatModel(model, provider=client or provider()), model_settings=settings, **more)


def pydantic_chat() -> None:
    async def stream() -> str:
        async with pydantic_agent(tokens=5).run_stream("Hello!") as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert pydantic_agent(tokens=5).run_sync("Hello!").output
    assert asyncio.run(stream())


def pydantic_usage() -> None:
    async def stream() -> Any:
        async with pydantic_agent(tokens=5).run_stream("Hello!") as result:
            await result.get_output()
            return result.usage

    assert 0 < asyncio.run(stream()).output_tokens <= 5


def pydantic_errors() -> None:
    missing = raised(ModelHTTPError, lambda: pydantic_agent(WRONG_MODEL).run_sync("a"))
    assert (missing.status_code, missing.body["code"]) == (404, "model_not_found")
    stranger = pydantic_agent(client=provider(api_key=WRONG_KEY))
    assert raised(ModelHTTPError, lambda: stranger.run_sync("a")).status_code == 401
    wrong = raised(ModelHTTPError, lambda: pydantic_agent(settings={"top_p": 7}).run_sync("a"))
    assert (wrong.status_code, wrong.body["param"]) == (400, "top_p")


def pydantic_busy() -> None:
    with refused("queue_full", 2):
        low = pydantic_agent(BUSY, client=provider(api_key=LOW_KEY, max_retries=1))
        assert raised(ModelHTTPError, lambda: low.run_sync("a")).status_code == 429
    with refused("deadline", 1):
        late = pydantic_agent(BUSY, client=provider(default_headers=PAST, max_retries=1))
        assert raised(ModelHTTPError, lambda: late.run_sync("a")).body["code"] == "deadline"


def pydantic_limited() -> None:
    def call(**more: Any) -> Any:
        client = OpenAIProvider(openai_client=AsyncOpenAI(api_key=LIMITED_KEY, **more))
        return asyncio.run(pydantic_agent(tokens=5, client=client).run("a"))

    assert limited(call, ModelHTTPError, lambda: call(max_retries=0)).status_code == 429


def pydantic_leaving() -> None:
    async def leave() -> None:
        async with pydantic_agent(SLOW, tokens=MANY_TOKENS).run_stream("Hello!") as result:
            await anext(aiter(result.stream_text(delta=True, debounce_by=None)))
            await result.cancel()

    with leaves():
        asyncio.run(leave())


def pydantic_tools() -> None:
    async def stream() -> Any:
        async with pydantic_agent(output_type=ToolOutput(Weather)).run_stream("Weather?") as result:
            return [output async for output in result.stream_output(debounce_by=None)][-1]

    assert isinstance(asyncio.run(stream()), Weather)


def pydantic_structured() -> None:
    assert isinstance(pydantic_agent(output_type=Weather).run_sync("Weather?").output, Weather)


def pydantic_turns() -> None:
    """The output's tool is called in the first turn."""

    async def streamed(agent: Any, *asked: Any, **more: Any) -> Any:
        async with agent.run_stream(*asked, **more) as result:
            await result.get_output()
            return result

    asked = [part["text"] for part in PARTS]
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for stream in (False, True):

            def turn(tokens: int, *given: Any, kind: Any = kind, stream: bool = stream, **more: Any) -> Any:
                output = more.pop("output_type", str)
                settings = {"max_tokens": tokens, "parallel_tool_calls": False}
                model = kind(TINY, provider=provider())
                agent = Agent(model, model_settings=settings, instructions=BRIEF, output_type=output)
                return asyncio.run(streamed(agent, *given, **more) if stream else agent.run(*given, **more))

            first = turn(TOKENS, asked, output_type=ToolOutput(Weather))
            second = turn(5, "And tomorrow?", message_history=first.all_messages())
            again = ModelMessagesTypeAdapter.validate_json(second.all_messages_json())
            assert turn(5, "And then?", message_history=again).all_messages()[-1].parts


def pydantic_responses() -> None:
    model = OpenAIResponsesModel(TINY, provider=provider())
    assert Agent(model, model_settings={"max_tokens": 300}).run_sync("Hello!").output
    agent = Agent(OpenAIResponsesModel(TINY, provider=provider()), output_type=Weather)
    assert isinstance(agent.run_sync("Weather?", model_settings={"max_tokens": TOKENS}).output, Weather)


def pydantic_embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(EMBED, provider=provider()))
    assert len(embedder.embed_documents_sync(["a", "b"]).embeddings) == 2


def agent_of(
    model: str = TINY, tokens: int = TOKENS, client: Any = None, settings: Any = None, **more: Any
) -> OpenAIAgent[Any]:
    """By chat completions, as its documentation has it for other servers than OpenAI's."""
    set_tracing_disabled(True)
    chat = OpenAIChatCompletionsModel(model=model, openai_client=client or AsyncOpenAI(max_retries=0))
    return OpenAIAgent(name="a", model=chat, model_settings=ModelSettings(max_tokens=tokens, **settings or {}), **more)


def ask(agent: OpenAIAgent[Any]) -> Any:
    return asyncio.run(Runner.run(agent, "Weather?"))


async def streamed(agent: OpenAIAgent[Any]) -> tuple[list[Any], Any]:
    result = Runner.run_streamed(agent, "Weather?")
    return [event async for event in result.stream_events()], result


def agents_chat() -> None:
    assert ask(agent_of(tokens=5)).final_output
    events, result = asyncio.run(streamed(agent_of(tokens=5)))
    assert events
    assert result.final_output


def agents_usage() -> None:
    _, result = asyncio.run(streamed(agent_of(tokens=5, settings={"include_usage": True})))
    assert 0 < result.context_wrapper.usage.output_tokens <= 5


def agents_errors() -> None:
    assert raised(openai.NotFoundError, lambda: ask(agent_of(WRONG_MODEL))).code == "model_not_found"
    raised(openai.AuthenticationError, lambda: ask(agent_of(client=AsyncOpenAI(api_key=WRONG_KEY))))
    assert raised(openai.BadRequestError, lambda: ask(agent_of(settings={"top_p": 7}))).param == "top_p"


def agents_busy() -> None:
    with refused("queue_full", 2):
        low = agent_of(BUSY, client=AsyncOpenAI(api_key=LOW_KEY, max_retries=1))
        raised(openai.RateLimitError, lambda: ask(low))
    with refused("deadline", 1):
        late = agent_of(BUSY, client=AsyncOpenAI(default_headers=PAST, max_retries=1))
        raised(openai.RateLimitError, lambda: ask(late))


def agents_limited() -> None:
    def call(**more: Any) -> Any:
        return ask(agent_of(tokens=5, client=AsyncOpenAI(api_key=LIMITED_KEY, **more)))

    assert limited(call, openai.RateLimitError, lambda: call(max_retries=0)).code == "rate_limit"


def agents_leaving() -> None:
    async def leave() -> None:
        result = Runner.run_streamed(agent_of(SLOW, tokens=MANY_TOKENS), "Hello!")
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()

    with leaves():
        asyncio.run(leave())


def weather_tool(seen: list[dict[str, Any]]) -> Any:
    """`seen` gets the arguments of its calls."""

    @function_tool
    def weather(unit: Literal["c", "f"], days: Literal[1, 2, 3]) -> str:
        """The weather."""
        seen.append({"unit": unit, "days": days})
        return WARM

    return weather


def agents_tools() -> None:
    seen: list[dict[str, Any]] = []
    weather = weather_tool(seen)
    agent = agent_of(tools=[weather], settings={"tool_choice": "required"}, tool_use_behavior="stop_on_first_tool")
    asyncio.run(streamed(agent))
    Weather.model_validate(seen[0])
    looping = agent_of(tools=[weather], settings={"tool_choice": "required"})  # `required` until a tool was called
    assert [item.type for item in ask(looping).new_items][-1] == "message_output_item"


def agents_structured() -> None:
    assert isinstance(ask(agent_of(output_type=Weather)).final_output, Weather)


def agents_turns() -> None:
    set_tracing_disabled(True)

    async def turn(model: Any, history: Any, stream: bool, **settings: Any) -> Any:
        given = ModelSettings(max_tokens=TOKENS, **settings or {"extra_body": END, "tool_choice": "none"})
        agent = OpenAIAgent(
            name="a", instructions=BRIEF, model=model(TINY, AsyncOpenAI(max_retries=0)), model_settings=given,
            tools=[weather_tool([])], tool_use_behavior="stop_on_first_tool",
        )  # fmt: skip
        if not stream:
            return await Runner.run(agent, history)
        result = Runner.run_streamed(agent, history)
        assert [event async for event in result.stream_events()]
        return result

    for kind in (OpenAIChatCompletionsModel, OpenAIAgentResponses):
        for stream in (False, True):
            asked = [{"role": "user", "content": [{"type": "input_text", "text": part["text"]} for part in PARTS]}]
            called = asyncio.run(turn(kind, asked, stream, tool_choice="required"))
            answered = asyncio.run(turn(kind, called.to_input_list(), stream))
            history = [*answered.to_input_list(), *ASK]
            for given in (history, stored(history)):
                assert asyncio.run(turn(kind, given, stream)).final_output


def agents_responses() -> None:
    """Its default."""
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(max_retries=0), use_for_tracing=False)
    settings = ModelSettings(max_tokens=TOKENS)
    assert ask(OpenAIAgent(name="a", model=TINY, model_settings=settings)).final_output
    set_default_openai_client(AsyncOpenAI(max_retries=0), use_for_tracing=False)
    agent = OpenAIAgent(name="a", model=TINY, model_settings=settings, output_type=Weather)
    _, result = asyncio.run(streamed(agent))
    assert isinstance(result.final_output, Weather)


CHECKS: dict[str, dict[str, Check]] = {
    "pydantic-ai-slim": {
        "chat, stream": pydantic_chat,
        "usage of a stream": pydantic_usage,
        "errors": pydantic_errors,
        "429": pydantic_busy,
        "limited key": pydantic_limited,
        "leaving a stream": pydantic_leaving,
        "tools, streamed": pydantic_tools,
        "structured output": pydantic_structured,
        "two turns": pydantic_turns,
        "responses": pydantic_responses,
        "embeddings": pydantic_embeddings,
    },
    "openai-agents": {
        "chat, stream": agents_chat,
        "usage of a stream": agents_usage,
        "errors": agents_errors,
        "429": agents_busy,
        "limited key": agents_limited,
        "leaving a stream": agents_leaving,
        "tools, streamed": agents_tools,
        "structured output": agents_structured,
        "two turns": agents_turns,
        "responses": agents_responses,
    },
}
