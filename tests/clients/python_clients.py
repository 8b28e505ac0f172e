"""Checks of Python clients; reads OPENAI_BASE_URL and OPENAI_API_KEY, prints a JSON object for each check.

Each client is used as its own documentation shows it. The model is noise: what is checked is that the client accepts
the answer, and that arguments and structured outputs parse into the client's own types.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

MODEL = "tiny"
BASE_URL, KEY = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_API_KEY", "")
TOKENS = 700  # of an answer with a schema: the noise model puts a hundred of white space around each value
HELLO: Any = [{"role": "user", "content": "Hello!"}]


class Weather(BaseModel):
    """The weather of a city."""

    unit: Literal["c", "f"]
    days: Literal[1, 2, 3]


def openai_chat() -> None:
    from openai import OpenAI

    client = OpenAI()
    assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5).choices[0].message.content
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, stream=True))
    assert chunks[-1].choices[0].finish_reason


def openai_parse() -> None:
    from openai import OpenAI

    done = OpenAI().chat.completions.parse(model=MODEL, messages=HELLO, response_format=Weather, max_tokens=TOKENS)
    assert isinstance(done.choices[0].message.parsed, Weather)


def openai_responses() -> None:
    from openai import OpenAI

    events = list(OpenAI().responses.create(model=MODEL, input="Hello!", max_output_tokens=5, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")


def azure_key() -> None:
    import httpx

    httpx.get(f"{BASE_URL}/models", headers={"api-key": KEY}, timeout=30).raise_for_status()


def langchain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, max_tokens=TOKENS, timeout=120, **more)


def langchain_chat() -> None:
    assert langchain().invoke("Hello!").content
    assert "".join(str(chunk.content) for chunk in langchain().stream("Hello!"))


def langchain_structured() -> None:
    for method in ("function_calling", "json_schema"):
        found = langchain().with_structured_output(Weather, method=method).invoke("Weather?")
        assert isinstance(found, Weather), (method, found)


def langchain_batch() -> None:
    from langchain_openai import OpenAI

    answers = OpenAI(model=MODEL, max_tokens=5).generate([f"prompt {number}" for number in range(20)])
    assert len(answers.generations) == 20


def litellm_chat() -> None:
    import litellm

    asked = {"model": f"openai/{MODEL}", "messages": HELLO, "api_base": BASE_URL, "api_key": KEY, "max_tokens": 5}
    assert litellm.completion(**asked).choices[0].message.content
    assert list(litellm.completion(**asked, stream=True))


def litellm_tool() -> None:
    import litellm

    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    answer = litellm.completion(
        model=f"openai/{MODEL}", messages=HELLO, api_base=BASE_URL, api_key=KEY, max_tokens=TOKENS, tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    Weather.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


def instructor_tools() -> None:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.TOOLS)
    found = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_model=Weather, max_tokens=TOKENS, max_retries=0
    )
    assert isinstance(found, Weather)


def instructor_schema() -> None:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
    found = client.chat.completions.create(
        model=MODEL, messages=HELLO, response_model=Weather, max_tokens=TOKENS, max_retries=0
    )
    assert isinstance(found, Weather)


def pydantic_ai_output() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    agent = Agent(model, output_type=Weather, model_settings={"max_tokens": TOKENS, "parallel_tool_calls": False})
    assert isinstance(agent.run_sync("Weather?").output, Weather)


def pydantic_ai_responses() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
    assert Agent(model, model_settings={"max_tokens": 300}).run_sync("Hello!").output


def openai_agents_run() -> None:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="a", model=model, output_type=Weather, model_settings=ModelSettings(max_tokens=TOKENS))
    found = asyncio.run(Runner.run(agent, "Weather?"))
    assert isinstance(found.final_output, Weather)


def openai_agents_responses() -> None:
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="a", model=model, model_settings=ModelSettings(max_tokens=300))
    assert asyncio.run(Runner.run(agent, "Hello!")).final_output


def llama_index_chat() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, max_tokens=5, context_window=2048)
    assert llm.chat([ChatMessage(role="user", content="Hello!")]).message.content
    assert list(llm.stream_chat([ChatMessage(role="user", content="Hello!")]))


def llama_index_structured() -> None:
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        max_tokens=TOKENS, context_window=2048,
    )  # fmt: skip
    assert isinstance(llm.as_structured_llm(Weather).complete("Weather?").raw, Weather)


CHECKS: dict[str, dict[str, Callable[[], None]]] = {
    "openai": {"chat, stream": openai_chat, "structured output": openai_parse, "responses": openai_responses},
    "httpx": {"`api-key` header": azure_key},
    "langchain-openai": {
        "chat, stream": langchain_chat,
        "structured output": langchain_structured,
        "20 prompts": langchain_batch,
    },
    "litellm": {"chat, stream": litellm_chat, "named tool": litellm_tool},
    "instructor": {"tools": instructor_tools, "structured output": instructor_schema},
    "pydantic-ai-slim": {"structured output": pydantic_ai_output, "responses": pydantic_ai_responses},
    "openai-agents": {"structured output": openai_agents_run, "responses": openai_agents_responses},
    "llama-index-llms-openai-like": {"chat, stream": llama_index_chat, "structured output": llama_index_structured},
}


def main() -> None:
    for client, checks in CHECKS.items():
        try:
            version = importlib.metadata.version(client)
        except importlib.metadata.PackageNotFoundError:
            continue
        for check, run in checks.items():
            error = None
            try:
                run()
            except Exception as failure:  # noqa: BLE001 - any failure is a row of the table
                error = f"{type(failure).__name__}: {failure}"[:600]
            print(json.dumps({"client": client, "version": version, "check": check, "error": error}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
