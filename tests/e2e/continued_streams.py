"""Streams of an engine that are cut and continued, without a router.

Each scenario runs undisturbed first, then for some borders between its messages once more from there, on an engine that
knows of it what a router knows: the groups and the number of the events in the messages so far. The answer has for each
scenario `places`, the numbers of the messages before each cut, and `undisturbed` and `cuts`: of each run its text and
the tokens of its choices (of a cut: those of all engines), its usage and failure, and the statuses and the number of
new tokens of the last engine. What was cut in the middle is cut once more in what the second engine made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from serve_app.core.anthropic import chat_body
from serve_app.core.responses import expanded, own_items
from serve_app.errors import EngineFailed
from serve_app.transport import EngineBackend, Frame, Submit
from serve_app.transport.frame_batcher import FrameBatcher
from serve_app.transport.messages import batch_decoder
from serve_app.types import Operation
from tests.fakes.engines import MODEL

CREATED = 1_700_000_000
TOKENS = 28
SCHEMA_TOKENS = 200  # of an answer with a schema, at most: a model may put white space around each value
CUTS = 5  # of a scenario; fewer if its answer has fewer borders
TRIES = 8  # of an undisturbed run: on a busy machine an answer comes in fewer messages than there are cuts
MESSAGES = {"messages": [{"role": "user", "content": "Tell me of the river and the stone."}]}
PROMPT = {"prompt": "Tell me of the river"}
USAGE = {"stream_options": {"include_usage": True}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
        "station": {"type": "string", "pattern": "^([a-z][0-9]){8}$"},  # 16 tokens at least, whatever the model says
    },
    "required": ["city", "days", "station"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather.", "parameters": WEATHER}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
SIGNS = {"structured_outputs": {"regex": "(é|ü|€|\N{GRINNING FACE}|\N{CJK UNIFIED IDEOGRAPH-4E2D}){9}"}}
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 2.0, "min_tokens": 9}
SEEDED = {"temperature": 1.0, "seed": 11}
PAIR = {"temperature": 2.0, "seed": 11, "n": 2}  # hot enough for two answers that differ, however sure a model is
GO_ON = {"ignore_eos": True}  # where an answer has to have many tokens: the model may end it before

CHAT: dict[str, dict[str, Any]] = {
    "chat": GO_ON | USAGE,
    "chat_end": {"max_tokens": 2 * TOKENS} | USAGE,  # the only one that may end before, and without a grammar
    "chat_logprobs": GO_ON | {"logprobs": True, "top_logprobs": 3},
    "chat_seeded_pair": GO_ON | PAIR | USAGE,
    "chat_characters": SIGNS | {"logprobs": True, "top_logprobs": 1, "max_tokens": 40},  # a sign has at most four
    "chat_schema": {"response_format": SCHEMA, "max_tokens": SCHEMA_TOKENS},
    "chat_schema_pair": {"response_format": SCHEMA, "max_tokens": SCHEMA_TOKENS, "n": 2} | SEEDED,
    "chat_tool": {
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "max_tokens": SCHEMA_TOKENS,
    },
    "chat_tool_cached": GO_ON | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"} | USAGE,
    "chat_penalties": GO_ON | PENALTIES,
    "chat_penalties_seeded": GO_ON | PENALTIES | SEEDED | {"top_p": 0.9, "top_k": 50},
}
COMPLETION: dict[str, dict[str, Any]] = {
    "completion": USAGE,
    "completion_logprobs": {"logprobs": 2},
    "completion_echo": {"echo": True},
    "completion_prompts": {"prompt": ["Tell me of the river", "A stone", "Ten"], "n": 2} | SEEDED | USAGE,
    "completion_token_ids": {"return_token_ids": True},
}
ANSWERED = "I know nothing about the river."
STORED = [  # of a response that another one continues, as the store has them
    {"type": "message", "id": "msg_1", "role": "user", "status": "completed", "content": "Tell me of the river."},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "It rains."},
    {
        "type": "message",
        "id": "msg_2",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": ANSWERED, "annotations": [], "logprobs": []}],
    },
]
RESPONSES: dict[str, dict[str, Any]] = {
    "responses": GO_ON,
    "responses_stored": expanded(GO_ON, STORED, own_items("And of the stone?", {})),
    "responses_schema": {
        "text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER, "strict": True}},
        "max_output_tokens": SCHEMA_TOKENS,
    },
    "responses_tool": {
        "tools": [{"type": "function"} | TOOL],
        "tool_choice": "required",
        "max_output_tokens": SCHEMA_TOKENS,
    },
}
ANTHROPIC_TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
ANTHROPIC: dict[str, dict[str, Any]] = {
    "messages": GO_ON,
    "messages_end": {"max_tokens": 2 * TOKENS, "system": [{"type": "text", "text": "Be brief."}]},
    "messages_schema": {
        "output_config": {"format": {"type": "json_schema", "schema": WEATHER}},
        "max_tokens": SCHEMA_TOKENS,
    },
    "messages_tool": {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}, "max_tokens": SCHEMA_TOKENS},
    "messages_tool_auto": GO_ON | {"tools": [ANTHROPIC_TOOL]},
    "messages_begun": GO_ON | {"messages": [*MESSAGES["messages"], {"role": "assistant", "content": ANSWERED[:-1]}]},
}
INEXACT: dict[str, tuple[Operation, dict[str, Any]]] = {
    "responses_logprobs": (
        Operation.RESPONSES,
        GO_ON | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "prompt_logprobs": (Operation.COMPLETION, {"echo": True, "logprobs": 1}),
}


def request(name: str, operation: Operation, more: dict[str, Any]) -> Submit:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True}
    match operation:
        case Operation.CHAT:
            body |= MESSAGES | {"max_tokens": TOKENS}
        case Operation.COMPLETION:
            body |= PROMPT | {"max_tokens": TOKENS} | GO_ON
        case Operation.RESPONSES:
            body |= {"input": "Tell me of the river and the stone.", "max_output_tokens": TOKENS}
        case Operation.MESSAGES:
            body = chat_body(operation, body | MESSAGES | {"max_tokens": TOKENS} | more)
            return Submit(1, name, operation, body, cache_salt="s", created=CREATED)
    return Submit(1, name, operation, body | more, cache_salt="s", created=CREATED)


def continued(asked: Submit, had: list[Frame]) -> Submit:
    first = had[0].prompt
    return msgspec.structs.replace(
        asked,
        groups=[group for frame in had for group in frame.groups],
        events=sum(frame.events for frame in had),
        cached_tokens=0 if first is None else first.cached_tokens,
    )


async def messages(backend: EngineBackend, asked: Submit) -> tuple[list[Frame], str]:
    """The frames of its messages, and the code of its failure."""
    frames: list[Frame] = []
    batcher = FrameBatcher(lambda message: frames.extend(batch_decoder.decode(message).frames))
    failure = ""
    try:
        async for frame in backend.run(asked):
            batcher.put(frame)
    except EngineFailed as error:
        failure = error.code
    await asyncio.sleep(0)  # the last message leaves
    return frames, failure


def summary(frames: list[Frame], failure: str, new: list[Frame]) -> dict[str, Any]:
    usage = frames[-1].usage
    made: dict[int, list[int]] = {}
    for frame in frames:
        for choice, *tokens in frame.groups:
            made.setdefault(choice, []).extend(tokens)
    return {
        "text": b"".join(frame.body for frame in frames).decode(),
        "status": [frame.status for frame in new],
        "usage": None if usage is None else msgspec.to_builtins(usage),
        "failure": failure,
        "made": made,
        "new": sum(len(group) - 1 for frame in new for group in frame.groups),
    }


def borders(count: int) -> list[int]:
    """Some borders between so many messages: the first, the last, and some between."""
    return sorted({1 + (count - 2) * i // (CUTS - 1) for i in range(CUTS)}) if count > 1 else []


async def cut(backend: EngineBackend, asked: Submit) -> dict[str, Any]:
    for _ in range(TRIES):
        undisturbed, failure = await messages(backend, asked)
        if failure or len(undisturbed) > CUTS:
            break
    cuts: list[dict[str, Any]] = []
    numbers = borders(len(undisturbed))
    for number in numbers:
        had = undisturbed[:number]
        rest, failed = await messages(backend, continued(asked, had))
        cuts.append(summary(had + rest, failed, rest))
        if rest and not failed and number == numbers[len(numbers) // 2]:  # once more, in what the second engine made
            middle = had + rest[: len(rest) // 2]
            rest, failed = await messages(backend, continued(asked, middle))
            cuts.append(summary(middle + rest, failed, rest))
    return {"places": numbers, "undisturbed": summary(undisturbed, failure, undisturbed), "cuts": cuts}


def late_in(text: str) -> str:
    """A stop string over several tokens that is whole only late in the text: ten characters before its end."""
    sizes = range(30, len(text) + 1)
    return next(text[-size:-10] for size in sizes if text.index(text[-size:-10]) == len(text) - size)


def scenarios() -> Iterator[tuple[str, Operation, dict[str, Any]]]:
    for operation, found in (
        (Operation.CHAT, CHAT), (Operation.COMPLETION, COMPLETION), (Operation.RESPONSES, RESPONSES),
        (Operation.MESSAGES, ANTHROPIC),
    ):  # fmt: skip
        for name, more in found.items():
            yield name, operation, more


def exact() -> list[str]:
    """The names of the scenarios of `cut_streams` that can be continued."""
    return [*(name for name, *_ in scenarios()), "completion_stop", "messages_stop"]


async def cut_streams(backend: EngineBackend) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = summary(*(await messages(backend, request("text", Operation.COMPLETION, {}))), [])["text"]
    chunks = [json.loads(event.removeprefix("data: ")) for event in plain.split("\n\n")[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    stop = {"stop": [late_in(text)]}
    for name, operation, more in [*scenarios(), ("completion_stop", Operation.COMPLETION, stop)]:
        found[name] = await cut(backend, request(name, operation, more))
    message = summary(*(await messages(backend, request("message", Operation.MESSAGES, GO_ON))), [])["text"]
    deltas = [json.loads(event.partition("\ndata: ")[2]).get("delta", {}) for event in message.split("\n\n")[:-1]]
    stop = {"stop_sequences": [late_in("".join(delta.get("text", "") for delta in deltas))]}
    found["messages_stop"] = await cut(backend, request("messages_stop", Operation.MESSAGES, GO_ON | stop))
    for name, (operation, more) in INEXACT.items():
        found[name] = await cut(backend, request(name, operation, more))
    asked = request("wrong", *CASE_OF_WRONG)
    had, _ = await messages(backend, asked)
    for name, changed in wrong(continued(asked, had[: len(had) // 2])).items():
        rest, failed = await messages(backend, changed)
        found[name] = summary(had[:1] + rest, failed, rest)
    found["after"] = summary(*(await messages(backend, asked)), [])
    found["first"] = summary(had, "", [])
    return found


CASE_OF_WRONG: tuple[Operation, dict[str, Any]] = (Operation.CHAT, CHAT["chat_schema"])


def wrong(asked: Submit) -> dict[str, Submit]:
    """Continued requests that do not fit."""

    def but(**fields: Any) -> Submit:
        return msgspec.structs.replace(asked, **fields)

    return {
        "too_few_events": but(events=asked.events - 1),
        "too_many_events": but(events=asked.events + 1),
        "no_groups": but(groups=[]),
        "unknown_tokens": but(groups=[[0, 10**6], *asked.groups[1:]]),
        "unknown_choice": but(groups=[[1, *group[1:]] for group in asked.groups]),
        "empty_group": but(groups=[[0], *asked.groups]),
        "against_the_grammar": but(groups=[[0, token] for token in reversed([token for _, token, *_ in asked.groups])]),
        "beyond_the_end": but(groups=asked.groups * SCHEMA_TOKENS, events=asked.events),
        "no_stream": but(body=asked.body | {"stream": False}),
    }  # fmt: skip
