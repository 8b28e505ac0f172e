"""One turn with a tool by LiteLLM, whole and streamed: as a client of Messages, and as Messages before our chat.

Prints a line of JSON. Needs LiteLLM, and nothing of this project.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import traceback
from typing import Any

import litellm

ENDPOINT = os.environ["ENDPOINT"]
KEY = os.environ["API_KEY"]
MODEL = os.environ["MODEL"]
ANSWER = os.environ["ANSWER"]
TOOL = "read_note"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
QUESTION = {"role": "user", "content": "Read the note."}


def chat_of_messages(stream: bool) -> None:
    """A chat that LiteLLM sends as a Messages request (`anthropic/MODEL`)."""
    function = {"name": TOOL, "description": "Read a note.", "parameters": SCHEMA}
    asked: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": ENDPOINT, "api_key": KEY, "max_tokens": 500}
    asked |= {"tools": [{"type": "function", "function": function}], "stream": stream}

    def answered(messages: list[Any]) -> Any:
        got = litellm.completion(**asked, messages=messages)
        return (litellm.stream_chunk_builder(list(got)) if stream else got).choices[0].message

    answer = answered([QUESTION])
    (call,) = answer.tool_calls
    assert json.loads(call.function.arguments)["name"], answer
    result = {"role": "tool", "tool_call_id": call.id, "content": "hello"}
    second = answered([QUESTION, answer.model_dump(exclude_none=True), result])
    assert second.content == ANSWER, second


async def messages_of(provider: str, base: str, stream: bool) -> None:
    """A Messages request by LiteLLM's own route: passed on to ours, or sent as a chat (`openai/MODEL`)."""
    tool = {"name": TOOL, "description": "Read a note.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "max_tokens": 500}

    async def answered(messages: list[Any]) -> Any:
        got = await litellm.anthropic.messages.acreate(**asked, tools=[tool], messages=messages, stream=stream)
        return await _joined(got) if stream else dict(got)["content"]

    content = await answered([QUESTION])
    (call,) = (block for block in content if block["type"] == "tool_use")
    assert call["input"]["name"], content
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "hello"}
    turns = [QUESTION, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    second = await answered(turns)
    assert [block["text"] for block in second if block["type"] == "text"] == [ANSWER], second


async def _joined(stream: Any) -> list[dict[str, Any]]:
    """The blocks of a stream: bytes of events, or events."""
    text = ""
    events: list[Any] = []
    async for part in stream:
        if isinstance(part, bytes):
            text += part.decode()
        else:
            events.append(part)
    events += [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "partial": ""}
        elif event["type"] == "content_block_delta":
            block = blocks[event["index"]]
            delta = event["delta"]
            block["partial"] += delta.get("partial_json", "")
            for name in ("text", "thinking", "signature"):
                if name in delta:
                    block[name] = block.get(name, "") + delta[name]
    for block in blocks.values():
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return list(blocks.values())


def main() -> None:
    error = None
    try:
        for stream in (False, True):
            chat_of_messages(stream)
            asyncio.run(messages_of("anthropic", ENDPOINT, stream))
            asyncio.run(messages_of("openai", f"{ENDPOINT}/v1", stream))
    except Exception as failure:  # noqa: BLE001 - any failure is the client's line
        error = f"{type(failure).__name__}: {failure}"[:600]
        traceback.print_exc()
    print(json.dumps({"client": "litellm", "version": importlib.metadata.version("litellm"), "error": error}))


if __name__ == "__main__":
    main()
