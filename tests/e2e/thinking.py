"""Requests whose model thinks before it answers, cut and continued, and stopped, on a vLLM engine beside a router and
the quota actor in one process: `python -m tests.e2e.thinking` prints them as JSON.

`cut` is as in `continued_streams`, `stopped` as in `stopped_requests`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from serve_app.core.responses import expanded, own_items
from serve_app.http import engine_calls
from serve_app.settings.settings import BUILT_IN_MODEL
from serve_app.types import Operation
from tests.e2e import continued_streams, one_engine
from tests.e2e.continued_streams import (
    ANTHROPIC,
    CHAT,
    CREATED,
    GO_ON,
    PAIR,
    RESPONSES,
    SCHEMA_TOKENS,
    STORED,
    USAGE,
    cut,
    request,
)
from tests.e2e.small_models import write_thinking
from tests.e2e.stopped_requests import ENGINE_S, REPLICA, SLOTS, each_stopped
from tests.e2e.stopped_requests import MESSAGES as MESSAGES_PATH
from tests.e2e.stopped_requests import RESPONSES as RESPONSES_PATH
from tests.fakes.asgi_client import CHAT as CHAT_PATH
from tests.fakes.asgi_client import started
from tests.fakes.engines import MODEL, FakeCluster, run, until

PARSER = "qwen3"
TOKENS = 40  # the thought has some 20
BUDGET = 7  # tokens of a thought that is ended by the engine
LONG = GO_ON | {"max_tokens": TOKENS}
THOUGHT = {"type": "enabled", "budget_tokens": 1024}  # Anthropic's least; without `GO_ON` the answer ends before
STORED_THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Which river?"}],
}
# The model would fill an object with white space.
STATION = {"type": "string", "pattern": "^([a-z][0-9]){8}$"}
FORM = {"type": "json_schema", "schema": STATION}
CHAT_FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": STATION}}}
MESSAGES_SCHEMA = {"output_config": {"format": FORM}, "max_tokens": SCHEMA_TOKENS}
QUESTION = continued_streams.MESSAGES  # about which it thinks
TEXT = QUESTION["messages"][0]["content"]
CUT: dict[str, tuple[Operation, dict[str, Any]]] = {
    "chat_thinking": (Operation.CHAT, LONG | USAGE),
    "chat_thinking_budget": (Operation.CHAT, LONG | USAGE | {"thinking_token_budget": BUDGET}),
    "chat_thinking_pair": (Operation.CHAT, LONG | USAGE | PAIR | {"thinking_token_budget": BUDGET}),
    "chat_thinking_schema": (Operation.CHAT, CHAT_FORM | {"max_tokens": SCHEMA_TOKENS}),
    "chat_thinking_tool": (Operation.CHAT, CHAT["chat_tool"]),
    "messages_thinking": (Operation.MESSAGES, LONG | {"thinking": {"type": "adaptive"}}),
    "messages_thinking_budget": (Operation.MESSAGES, {"thinking": THOUGHT, "max_tokens": 1025}),
    "messages_thinking_schema": (Operation.MESSAGES, MESSAGES_SCHEMA),
    "messages_thinking_tool": (Operation.MESSAGES, ANTHROPIC["messages_tool"]),
    "responses_thinking": (Operation.RESPONSES, GO_ON | {"reasoning": {"effort": "low"}, "max_output_tokens": TOKENS}),
    "responses_thinking_schema": (
        Operation.RESPONSES,
        {"text": {"format": FORM | {"name": "s"}}, "max_output_tokens": SCHEMA_TOKENS},
    ),
    "responses_thinking_tool": (Operation.RESPONSES, RESPONSES["responses_tool"]),
    "responses_thinking_stored": (
        Operation.RESPONSES,
        expanded(GO_ON | {"max_output_tokens": TOKENS}, [STORED[0], STORED_THOUGHT, *STORED[1:]], own_items(TEXT, {})),
    ),
}
STOPPED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}_{name}": (path, more | asked | {"stream": kind == "streamed"})
    for kind in ("whole", "streamed")
    for name, path, more, asked in (
        ("chat_thinking", CHAT_PATH, LONG, QUESTION),
        ("messages_thinking", MESSAGES_PATH, LONG, QUESTION),
        ("messages_thinking_schema", MESSAGES_PATH, MESSAGES_SCHEMA, QUESTION),
        ("messages_thinking_tool", MESSAGES_PATH, ANTHROPIC["messages_tool"], QUESTION),
        ("responses_thinking", RESPONSES_PATH, GO_ON | {"input": TEXT, "max_output_tokens": TOKENS}, {}),
    )
}


@functools.cache
def found() -> dict[str, Any]:
    """What such a process has printed."""
    return one_engine.run_module("tests.e2e.thinking")


async def scenario(cluster: FakeCluster) -> None:
    client = await started(cluster, REPLICA)
    await until(lambda: client.model.replica_set.info is not None, ENGINE_S, "the engine's limits")
    backend = cluster[REPLICA].engine.backend
    answer: dict[str, Any] = {"cut": {name: await cut(backend, request(name, *asked)) for name, asked in CUT.items()}}
    answer["stopped"] = await each_stopped(client, STOPPED)
    print(json.dumps(answer), flush=True)


def main(parser: str = PARSER) -> None:
    """`parser`: of vLLM's for a model with `<think>`."""
    changed = {"name": MODEL, "enforce_eager": True, "max_num_seqs": SLOTS, "reasoning_parser": parser}
    clock = SimpleNamespace(time=lambda: CREATED, monotonic=time.monotonic)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(engine_calls, "time", clock):
        path = str(write_thinking(Path(folder) / "thinking"))
        settings = BUILT_IN_MODEL.model_copy(update=changed | {"path": path})
        run(scenario, settings, loop=asyncio.new_event_loop, bound_s=ENGINE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
