"""Requests that a router stops for others while its engine runs them.

Each request is answered undisturbed first, and then once for each of some series of stops: it is stopped as for others
each time when the engine has produced so many more tokens (`ModelRouter.stop_drained`). A result has a run's `text`
with `ID` for its id and `ID-1` and so on for the others in it, how often it was `preempted` and `moved` and its
`tokens` by its receipt, and how often it `stayed`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serve_app.engine.vllm_adapter.continuing import AnswerIdentity
from tests.e2e.continued_streams import (
    ANTHROPIC,
    CREATED,
    GO_ON,
    PAIR,
    PENALTIES,
    SCHEMA,
    SCHEMA_TOKENS,
    SEEDED,
    TOOL,
    USAGE,
    late_in,
)
from tests.fakes.asgi_client import BATCH_KEY, CHAT, COMPLETIONS, Client, Reply
from tests.fakes.engines import MODEL, until

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
REPLICA = "r1"
SLOTS = 6  # of the engine: as many as one request has sequences, at most
TOKENS = 32
IDS = 9  # that an answer has beside that of its request, at most
STOPS = ([12], [1, 3, 9, 2])  # new tokens before each stop
TRIES = 4  # for a request that is to be stopped
ENGINE_S = 550.0  # for the whole, below the Makefile's STUCK_S: an engine starts in minutes where others run beside it
PROMPT = "Tell me of the river and the stone, and of the bridge between them."  # more than one block of the KV cache

CHATS: dict[str, dict[str, Any]] = {
    "chat": GO_ON,
    "chat_schema": {"response_format": SCHEMA, "max_tokens": SCHEMA_TOKENS},
    "chat_tool": {
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": "required",
        "max_tokens": SCHEMA_TOKENS,
    },
    "chat_penalties_seeded": GO_ON | PENALTIES | SEEDED | {"top_p": 0.9, "top_k": 50},
}
ANTHROPIC_MESSAGES: dict[str, dict[str, Any]] = {
    "messages": GO_ON,
    "messages_schema": ANTHROPIC["messages_schema"],
    "messages_tool": ANTHROPIC["messages_tool"],
}
STREAMED: dict[str, dict[str, Any]] = {
    "chat_pair": GO_ON | PAIR,
    "chat_logprobs": GO_ON | {"logprobs": True, "top_logprobs": 2},
}
STAYING: dict[str, tuple[str, dict[str, Any]]] = {
    "whole_pair": (CHAT, GO_ON | PAIR),
    "whole_logprobs": (CHAT, GO_ON | {"logprobs": True}),
    "whole_sampled_logprobs": (COMPLETIONS, {"logprobs": 0}),
    "streamed_prompt_logprobs": (COMPLETIONS, {"logprobs": 1, "echo": True, "stream": True}),
}


def body(path: str, more: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    if path in (CHAT, MESSAGES):
        asked |= {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    elif path == COMPLETIONS:
        asked |= {"prompt": PROMPT, "max_tokens": TOKENS} | GO_ON
    else:
        asked |= {"input": PROMPT, "max_output_tokens": TOKENS}
    asked |= more
    return asked | (USAGE if asked.get("stream") and path in (CHAT, COMPLETIONS) else {})


async def stopped(client: Client, path: str, asked: dict[str, Any], stops: list[int]) -> dict[str, Any]:
    """One request that is stopped so often, unless it has ended before."""
    made = client.engine_tokens()
    stayed = 0
    reply = Reply()
    task = client.posting(asked, path=path, key=BATCH_KEY, reply=reply)
    for tokens in stops:
        made += tokens
        await until(lambda: task.done() or client.engine_tokens() >= made, ENGINE_S, "tokens")  # noqa: B023
        stayed += client.model.stop_drained(REPLICA)
        made = client.engine_tokens()
    await task
    assert reply.status == 200, reply.body
    request_id = reply.headers["x-serve-app-request-id"]
    receipt = client.edge.parts.receipts.find(request_id, None)
    assert receipt is not None
    text = "\n\n".join(one for one in reply.body.decode().split("\n\n") if not one.startswith(":"))
    identity = AnswerIdentity(request_id, CREATED)
    for number in range(IDS):
        text = text.replace(identity.next_id(), f"ID-{number}")
    return {
        "text": text.replace(request_id, "ID"),
        "preempted": receipt.trace.preempted,
        "moved": receipt.trace.moved,
        "losses": receipt.trace.losses,
        "tokens": [receipt.prompt_tokens, receipt.output_tokens],
        "stayed": stayed,
    }


async def surely_stopped(client: Client, path: str, asked: dict[str, Any], stops: list[int]) -> dict[str, Any]:
    """The same, again if a busy machine saw its tokens too late: it had ended, or had one stop where it was to have
    two."""
    for _ in range(TRIES - 1):
        run = await stopped(client, path, asked, stops)
        if run["moved"] >= min(2, len(stops)):
            return run
    return await stopped(client, path, asked, stops)


def requests(stop: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The path and the body of each request that can be stopped, by name. `stop`: of the completions."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind in ("whole", "streamed"):
        stream = {"stream": kind == "streamed"}
        found |= {f"{kind}_{name}": (CHAT, more | stream) for name, more in CHATS.items()}
        found[f"{kind}_completion"] = COMPLETIONS, {"stop": stop} | stream
        found[f"{kind}_responses"] = RESPONSES, GO_ON | stream
        tool = {"tools": [{"type": "function"} | TOOL], "tool_choice": "required", "max_output_tokens": SCHEMA_TOKENS}
        found[f"{kind}_responses_tool"] = RESPONSES, tool | stream
        found |= {f"{kind}_{name}": (MESSAGES, more | stream) for name, more in ANTHROPIC_MESSAGES.items()}
    return found | {f"streamed_{name}": (CHAT, more | {"stream": True}) for name, more in STREAMED.items()}


async def each_stopped(client: Client, asked: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Each request undisturbed, then once for each of `STOPS`. `asked`: path and body by name."""
    found = {}
    for name, (path, more) in asked.items():
        whole = body(path, more)
        first = {"max_output_tokens" if path == RESPONSES else "max_tokens": PENALTIES["min_tokens"]}
        await stopped(client, path, whole | first, [])  # after it, the prompt is cached
        found[name] = [await surely_stopped(client, path, whole, stops) for stops in ([], *STOPS)]
    return found


async def stop_requests(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = {"staying": {}}
    plain = json.loads((await client.post(body(COMPLETIONS, {}), COMPLETIONS)).body)["choices"][0]["text"]
    found["stopped"] = await each_stopped(client, requests([late_in(plain)]))
    for name, (path, more) in STAYING.items():
        asked = body(path, more)
        found["staying"][name] = [await stopped(client, path, asked, stops) for stops in ([], [5, 5])]
    found["queued"] = await queued(client)
    await until(client.at_rest, ENGINE_S, "all given back")
    return found


async def queued(client: Client) -> dict[str, Any]:
    """As many requests as the engine has slots, streams and whole answers, and then two of a higher class."""
    asked = [body(CHAT, GO_ON | {"stream": number % 2 == 0, "max_tokens": 70 + number}) for number in range(SLOTS)]
    undisturbed = [await stopped(client, CHAT, one, []) for one in asked]
    steps = client.engine_steps()
    tasks = [asyncio.create_task(stopped(client, CHAT, one, [])) for one in asked]
    await until(lambda: client.engine_steps() > steps + 20, ENGINE_S, "some tokens")
    urgent = [client.posting(body(CHAT, {"priority": "high", "max_tokens": 8}), path=CHAT) for _ in range(2)]
    replies = [await one for one in urgent]
    overtaken = not any(task.done() for task in tasks)
    answers = [await task for task in tasks]
    return {
        "statuses": [one.status for one in replies],
        "overtaken": overtaken,
        "undisturbed": undisturbed,
        "answers": answers,
    }
