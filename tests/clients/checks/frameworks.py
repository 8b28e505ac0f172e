"""LangChain and LlamaIndex."""

from __future__ import annotations

import gc
import time
from typing import Any

import openai
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage, messages_from_dict, messages_to_dict
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_openai import OpenAI as LangChainCompletions
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

from tests.clients.checks.common import (
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
    WRONG_KEY,
    WRONG_MODEL,
    Check,
    Weather,
    leaves,
    limited,
    raised,
    refused,
    running,
    stored,
)

HELLO = [ChatMessage(role="user", content="Hello!")]


def langchain(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": TINY, "max_tokens": TOKENS, "timeout": 120, "max_retries": 0} | more)


def langchain_chat() -> None:
    assert langchain(max_tokens=5).invoke("Hello!").content
    assert "".join(str(chunk.content) for chunk in langchain(max_tokens=5).stream("Hello!"))
    completions = LangChainCompletions(model=TINY, max_tokens=5)
    assert len(completions.generate([f"prompt {number}" for number in range(20)]).generations) == 20


def langchain_usage() -> None:
    first, *others = langchain(max_tokens=5, stream_usage=True).stream("Hello!")
    assert 0 < sum(others, first).usage_metadata["output_tokens"] <= 5


def langchain_errors() -> None:
    missing = raised(openai.NotFoundError, lambda: langchain(model=WRONG_MODEL).invoke("a"))
    assert missing.code == "model_not_found"
    raised(openai.AuthenticationError, lambda: langchain(api_key=WRONG_KEY).invoke("a"))
    assert raised(openai.BadRequestError, lambda: langchain(top_p=7).invoke("a")).param == "top_p"


def langchain_busy() -> None:
    with refused("queue_full", 2):
        low = langchain(model=BUSY, api_key=LOW_KEY, max_retries=1)
        raised(openai.RateLimitError, lambda: low.invoke("a"))
    with refused("deadline", 1):
        late = langchain(model=BUSY, default_headers=PAST, max_retries=1)
        raised(openai.RateLimitError, lambda: late.invoke("a"))


def langchain_limited() -> None:
    unmodified = ChatOpenAI(model=TINY, max_tokens=5, api_key=LIMITED_KEY)
    last = langchain(max_tokens=5, api_key=LIMITED_KEY)
    refusal = limited(lambda: unmodified.invoke("a"), openai.RateLimitError, lambda: last.invoke("a"))
    assert refusal.code == "rate_limit"


def langchain_leaving() -> None:
    with leaves():
        stream = langchain(model=SLOW, max_tokens=MANY_TOKENS).stream("Hello!")
        next(stream)
        stream.close()


def langchain_tools() -> None:
    for choice in ("any", "Weather"):
        first, *others = langchain().bind_tools([Weather], tool_choice=choice).stream("Weather?")
        asked = sum(others, first)
        assert asked.tool_calls[0]["name"] == "Weather"
        Weather.model_validate(asked.tool_calls[0]["args"])


def langchain_structured() -> None:
    for method in ("function_calling", "json_schema"):
        found = langchain().with_structured_output(Weather, method=method).invoke("Weather?")
        assert isinstance(found, Weather), (method, found)


def langchain_turns() -> None:
    for api in ({}, {"use_responses_api": True}, {"output_version": "responses/v1"}, {"output_version": "v1"}):
        short = langchain(**api, max_tokens=5).bind_tools([Weather], tool_choice="none")
        for stream in (False, True):
            history: list[Any] = [SystemMessage(BRIEF), HumanMessage(PARTS)]
            first = answered(langchain(**api).bind_tools([Weather], tool_choice="any"), history, stream)
            history += [first, *(ToolMessage(WARM, tool_call_id=call["id"]) for call in first.tool_calls)]
            history += [answered(short, history, stream), HumanMessage("Hello!")]
            assert answered(short, history, stream).text
            assert answered(short, messages_from_dict(stored(messages_to_dict(history))), stream).text


def answered(model: Any, history: list[Any], stream: bool) -> Any:
    if not stream:
        return model.invoke(history)
    first, *others = model.stream(history)
    return sum(others, first)


def langchain_responses() -> None:
    model = langchain(use_responses_api=True)
    assert model.invoke("Hello!", max_tokens=300).text
    first, *others = model.stream("Hello!", max_tokens=300)
    assert sum(others, first).text
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke("Weather?"), Weather)


def langchain_embeddings() -> None:
    # without `check_embedding_ctx_length=False` it sends the tokens of OpenAI's own tokenizer
    model = OpenAIEmbeddings(model=EMBED, check_embedding_ctx_length=False)
    assert len(model.embed_documents(["a", "b"])) == 2


def llama(**more: Any) -> OpenAILike:
    given = {"model": TINY, "api_base": BASE_URL, "api_key": KEY, "is_chat_model": True, "context_window": 2048}
    return OpenAILike(**given | {"is_function_calling_model": True, "max_tokens": TOKENS, "max_retries": 0} | more)


def llama_chat() -> None:
    assert llama(max_tokens=5).chat(HELLO).message.content
    assert list(llama(max_tokens=5).stream_chat(HELLO))


def llama_usage() -> None:
    *_, last = llama(max_tokens=5).stream_chat(HELLO, stream_options={"include_usage": True})
    assert 0 < last.raw.usage.completion_tokens <= 5


def llama_errors() -> None:
    missing = raised(openai.NotFoundError, lambda: llama(model=WRONG_MODEL).chat(HELLO))
    assert missing.code == "model_not_found"
    raised(openai.AuthenticationError, lambda: llama(api_key=WRONG_KEY).chat(HELLO))
    assert raised(openai.BadRequestError, lambda: llama().chat(HELLO, top_p=7)).param == "top_p"


def llama_busy() -> str:
    with refused("queue_full", 2):
        raised(openai.RateLimitError, lambda: llama(model=BUSY, api_key=LOW_KEY, max_retries=1).chat(HELLO))
    with refused("deadline", 1):
        raised(openai.RateLimitError, lambda: llama(model=BUSY, default_headers=PAST, max_retries=1).chat(HELLO))
    with refused("deadline", 2):
        raised(openai.RateLimitError, lambda: llama(model=BUSY, default_headers=PAST, max_retries=2).chat(HELLO))
    return "With `max_retries` above 1 it repeats by itself beside the SDK, and does not read `x-should-retry`."


def llama_limited() -> None:
    given: Any = {"model": TINY, "api_base": BASE_URL, "api_key": LIMITED_KEY, "is_chat_model": True}
    unmodified = OpenAILike(**given, max_tokens=5)
    last = llama(api_key=LIMITED_KEY, max_tokens=5)
    refusal = limited(lambda: unmodified.chat(HELLO), openai.RateLimitError, lambda: last.chat(HELLO))
    assert refusal.code == "rate_limit"


def llama_leaving() -> str:
    with leaves():
        stream = llama(model=SLOW, max_tokens=MANY_TOKENS, context_window=10_000).stream_chat(HELLO)
        next(stream)
        stream.close()
        time.sleep(1)  # as long as any other client takes, five times over
        assert running(SLOW) == 1
        gc.collect()
    return "A stream that is closed keeps its connection until Python collects garbage (`gc.collect()`)."


def llama_tools() -> None:
    tool = FunctionTool.from_defaults(lambda **_: "warm", name="weather", fn_schema=Weather)
    *_, last = llama().stream_chat_with_tools([tool], user_msg="Weather?", tool_required=True)
    (call,) = llama().get_tool_calls_from_response(last)
    Weather.model_validate(call.tool_kwargs)


def llama_structured() -> None:
    assert isinstance(llama().as_structured_llm(Weather).complete("Weather?").raw, Weather)


def responding_llama(tokens: int) -> OpenAILikeResponses:
    given: Any = {"model": TINY, "api_base": BASE_URL, "api_key": KEY, "context_window": 2048}
    return OpenAILikeResponses(**given, max_output_tokens=tokens)


def llama_turns() -> None:
    tool = FunctionTool.from_defaults(lambda **_: WARM, name="weather", fn_schema=Weather)
    for model, short in ((llama(), llama(max_tokens=5)), (responding_llama(TOKENS), responding_llama(5))):
        for stream in (False, True):
            parts = [TextBlock(text=part["text"]) for part in PARTS]
            history = [ChatMessage(role="system", content=BRIEF), ChatMessage(role="user", blocks=parts)]
            ask = model.stream_chat_with_tools if stream else model.chat_with_tools
            first = ask([tool], chat_history=history, tool_required=True)
            first = list(first)[-1] if stream else first
            calls = [one.tool_id for one in model.get_tool_calls_from_response(first)]
            results = [ChatMessage(role="tool", content=WARM, additional_kwargs={"tool_call_id": one}) for one in calls]
            history += [first.message, *results]
            history += [short.chat(history).message, *HELLO]
            assert short.chat(history).message.content
            again = [ChatMessage.model_validate(stored(one.model_dump(mode="json"))) for one in history]
            assert list(short.stream_chat(again))


def llama_responses() -> None:
    model = responding_llama(300)
    assert model.chat(HELLO).message.content
    assert list(model.stream_chat(HELLO))


def llama_embeddings() -> None:
    model = OpenAILikeEmbedding(model_name=EMBED, api_base=BASE_URL, api_key=KEY)
    assert len(model.get_text_embedding_batch(["a", "b"])) == 2


CHECKS: dict[str, dict[str, Check]] = {
    "langchain-openai": {
        "chat, stream": langchain_chat,
        "usage of a stream": langchain_usage,
        "errors": langchain_errors,
        "429": langchain_busy,
        "limited key": langchain_limited,
        "leaving a stream": langchain_leaving,
        "tools, streamed": langchain_tools,
        "structured output": langchain_structured,
        "two turns": langchain_turns,
        "responses": langchain_responses,
        "embeddings": langchain_embeddings,
    },
    "llama-index-llms-openai-like": {
        "chat, stream": llama_chat,
        "usage of a stream": llama_usage,
        "errors": llama_errors,
        "429": llama_busy,
        "limited key": llama_limited,
        "leaving a stream": llama_leaving,
        "tools, streamed": llama_tools,
        "structured output": llama_structured,
        "two turns": llama_turns,
        "responses": llama_responses,
        "embeddings": llama_embeddings,
    },
}
